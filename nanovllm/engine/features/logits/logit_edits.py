"""LogitEdits: logit_bias, allowed_token_ids and bad_words as arrays."""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np

from nanovllm.layers.sampling.token_masks import pack_mask
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.checks import quoted

_BYTES_PER_ENTRY = 250  # of Python's numbers and tuples


class LogitEdits:
    """The tokens that a request makes likelier or forbids. Its samples share it.

    Attributes:
        bias_tokens, biases: int64 and float32 [biases]: numbers that are added to these tokens' logits.
        banned: int64: the bad words of one token.
        mask: int32 [num_mask_words]: the bit mask of allowed tokens, as far as it is the same at each step.
        needs_mask: whether the mask is a shorter description than the forbidden tokens.
        reads_completion: whether `completing` can find a token.
        num_bytes: about what it takes, with the params.
    """

    def __init__(self, params: SamplingParams, bad_words: list[list[int]], vocab_size: int):
        """bad_words: the tokens of each form of the params' bad words."""
        allowed, biases = params.allowed_token_ids, dict(params.logit_bias)
        self.bias_tokens = np.array(list(biases), np.int64)
        self.biases = np.array(list(biases.values()), np.float32)
        self.banned = np.array(sorted({tokens[0] for tokens in bad_words if len(tokens) == 1}), np.int64)
        self.needs_mask = allowed is not None or len(bad_words) > vocab_size // 4
        is_allowed = np.full(vocab_size, allowed is None)
        if allowed is not None:
            is_allowed[list(allowed)] = True
        is_allowed[self.banned] = False
        self.mask = pack_mask(is_allowed)
        # Words of several tokens, by the last token but one: most steps find nothing in one look-up.
        self._phrases: dict[int, list[tuple[array, int]]] = defaultdict(list)
        for *beginning, last in bad_words:
            if beginning:
                self._phrases[beginning[-1]].append((array("i", beginning), last))
        self.reads_completion = bool(self._phrases)
        num_entries = len(biases) + len(allowed or ()) + len(bad_words)
        self.num_bytes = self.mask.nbytes + _BYTES_PER_ENTRY * num_entries

    def completing(self, tokens: array, num_completion_tokens: int) -> list[int]:
        """The tokens that would complete a bad word of several tokens. The completion is at the end of `tokens`."""
        return [
            last
            for beginning, last in self._phrases.get(tokens[-1], ())
            if len(beginning) <= num_completion_tokens and tokens[-len(beginning) :] == beginning
        ]


def tokenize_bad_words(encode: Callable[[str], list[int]], bad_words: Iterable[str]) -> list[list[int]]:
    """The tokens of each word, as it is and after a space. Raises ValueError for a word without tokens."""
    found = []
    for word in bad_words:
        bare = word.lstrip(" ") or word
        ids, spaced = encode(bare), encode(f" {bare}")
        if not ids:
            raise ValueError(f"bad_words: {quoted(word)} has no tokens")
        found.append(ids)
        if spaced[-len(ids) :] != ids:  # Otherwise the space is a token of its own, and the first form suffices.
            found.append(spaced)
    return found
