"""LogitEdits: what logit_bias, allowed_token_ids and bad_words come to, as arrays."""

from array import array
from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from nanovllm.layers.token_masks import pack_mask


class LogitEdits:
    """The tokens that a request makes likelier or keeps away. Made once a request; its samples share it.

    Attributes:
        bias_tokens, biases: int64 and float32 [biases]: what is added to these tokens' logits.
        banned: int64: tokens that are never drawn, the bad words of one token.
        mask: int32 [num_mask_words]: the bit mask of tokens that may be drawn, as far as that is the same at each step.
        needs_mask: whether few tokens may be left, so that it is shorter to say which they are.
    """

    def __init__(
        self,
        biases: Iterable[tuple[int, float]],
        allowed: tuple[int, ...] | None,
        bad_words: Iterable[list[int]],
        vocab_size: int,
    ):
        """biases: (token, number). allowed: tokens; None for all. bad_words: the tokens of each. All tokens are in the
        vocabulary."""
        pairs = list(biases)
        self.bias_tokens = np.array([token for token, _ in pairs], np.int64)
        self.biases = np.array([bias for _, bias in pairs], np.float32)
        bad_words = list(bad_words)
        self.banned = np.array(sorted({tokens[0] for tokens in bad_words if len(tokens) == 1}), np.int64)
        self.needs_mask = allowed is not None or len(bad_words) > vocab_size // 4
        is_allowed = np.full(vocab_size, allowed is None)
        if allowed is not None:
            is_allowed[list(allowed)] = True
        is_allowed[self.banned] = False
        self.mask = pack_mask(is_allowed)
        # Those of several tokens, by the last but one, so that most steps find nothing in one look.
        self._phrases: dict[int, list[tuple[array, int]]] = defaultdict(list)
        for *beginning, last in bad_words:
            if beginning:
                self._phrases[beginning[-1]].append((array("i", beginning), last))

    @property
    def reads_completion(self) -> bool:
        """Whether `completing` can find any."""
        return bool(self._phrases)

    def completing(self, tokens: array, num_completion_tokens: int) -> list[int]:
        """The tokens that would complete a bad word of several; of `tokens` the last ones are the completion."""
        return [
            last
            for beginning, last in self._phrases.get(tokens[-1], ())
            if len(beginning) <= num_completion_tokens and tokens[-len(beginning) :] == beginning
        ]


def tokenize_bad_words(tokenizer, bad_words: Iterable[str]) -> list[list[int]]:
    """The tokens of each, as it is and after a space. Raises ValueError for what has no tokens."""
    found = []
    for word in bad_words:
        bare = word.lstrip(" ") or word
        ids, spaced = (tokenizer.encode(text, add_special_tokens=False) for text in (bare, f" {bare}"))
        if not ids:
            raise ValueError(f"bad_words: {word!r} has no tokens")
        found.append(ids)
        if spaced[-len(ids) :] != ids:  # Else the space is a token of its own, and the word is kept away after it.
            found.append(spaced)
    return found
