"""SequenceMaker: from prompts and sampling parameters to checked sequences; and the order in which a batch begins."""

import secrets
from array import array
from collections.abc import Iterable
from dataclasses import replace
from itertools import count
from typing import Any, cast

from xxhash import xxh64_intdigest

from nanovllm.config import Config
from nanovllm.engine.requests.detokenizer import Detokenizer
from nanovllm.engine.requests.length_limit import LengthLimit
from nanovllm.engine.requests.prompts import Prompt, as_array, read_prompt
from nanovllm.engine.requests.text_stream import StopStrings, TextStream
from nanovllm.engine.sampling.logit_edits import LogitEdits, tokenize_bad_words
from nanovllm.engine.sampling.structured import Grammars
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.sampling.token_masks import unpack_mask
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.bos_check import BosCheck
from nanovllm.utils.checks import quoted
from nanovllm.utils.long_texts import CHARACTERS_PER_TOKEN
from nanovllm.utils.sized_cache import SizedCache

_MAX_LOGIT_EDITS_BYTES = 2**26  # kept for later requests
_MAX_STOP_CHARACTERS = 2**22  # likewise


class SequenceMaker:
    """Checks requests and makes their sequences.

    Attributes:
        num_requests: so far; the next request's id.
        detokenizer: None without a tokenizer.
    """

    def __init__(self, config: Config, tokenizer: Any, length_limit: LengthLimit):
        """tokenizer: None accepts token ids only."""
        self.num_requests = 0
        self._seq_ids = count()
        self._tokenizer = tokenizer
        self._check_bos = BosCheck(tokenizer)
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._vocab_size = config.hf_config.vocab_size
        self._eos = config.eos
        self._block_size = config.kvcache_block_size
        # From it requests without a seed get one each.
        self._seed = secrets.randbits(63) if config.seed is None else config.seed
        self._length_limit = length_limit
        self._long_text = CHARACTERS_PER_TOKEN * length_limit.max_seq_len  # characters
        self._grammars: Grammars | None = None
        self._logit_edits: SizedCache[SamplingParams, LogitEdits] = SizedCache(
            self._make_logit_edits, lambda params, edits: edits.num_bytes, _MAX_LOGIT_EDITS_BYTES
        )
        self._stop_strings: SizedCache[tuple[str, ...], StopStrings] = SizedCache(
            StopStrings, lambda texts, _: sum(map(len, texts)), _MAX_STOP_CHARACTERS
        )

    def make_one(self, prompt: Prompt, params: SamplingParams) -> list[Sequence]:
        """The samples of one request. Raises as make_all."""
        (tokens,) = self._encode([prompt])
        return self._make(tokens, params, "prompt: ", "sampling_params: ")

    def make_all(
        self,
        prompts: list[Prompt],
        params: Iterable[SamplingParams],
        on_error: str = "raise",
        start: int = 0,
        streams: bool = False,
    ) -> list[list[Sequence] | Exception]:
        """The samples of each request; texts go through the tokenizer in one batch.

        Args:
            params: one for each prompt.
            on_error: "raise" the first error, or "return" it in the place of its request.
            start: index of the first prompt.
            streams: whether texts are wanted as they come.

        Raises ValueError, TypeError, or ImportError for a missing library; the message begins with the argument and the
        index.
        """
        made: list[list[Sequence] | Exception] = []
        num_requests = self.num_requests
        for i, (tokens, of_prompt) in enumerate(zip(self._encode(prompts), params, strict=True), start):
            try:
                made.append(self._make(tokens, of_prompt, f"prompts[{i}]: ", f"sampling_params[{i}]: ", i, streams))
            except (TypeError, ValueError, ImportError) as error:
                if on_error == "raise":
                    self.num_requests = num_requests  # Ids have no gaps.
                    raise
                made.append(error)
        return made

    def check_request_id(self, request_id: object, unfinished: Iterable[Sequence]) -> None:
        """Raises TypeError or ValueError if no request has had this id. None stands for all requests. unfinished: for
        the message."""
        if request_id is None:
            return
        if isinstance(request_id, bool) or not isinstance(request_id, int):
            raise TypeError(
                f"request_id={quoted(request_id)}: must be an id from add_request() or a StreamDelta, or None"
            )
        if not 0 <= request_id < self.num_requests:
            known = sorted({seq.request_id for seq in unfinished})
            ids = ", ".join(map(str, known[:10])) + (", ..." if len(known) > 10 else "")
            raise ValueError(
                f"request_id={quoted(request_id)}: there is no such request; unfinished are: {ids or 'none'}"
            )

    def _make(
        self,
        tokens: array | Exception,
        params: SamplingParams,
        where: str,
        where_params: str,
        index: int = 0,
        streams: bool = False,
    ) -> list[Sequence]:
        """The n samples of a request. Each has a seed of its own, the first one the request's."""
        try:
            if isinstance(tokens, Exception):
                raise tokens
            if len(tokens) >= self._length_limit.max_seq_len:
                self._length_limit.check(len(tokens))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}{error}") from error
        if not isinstance(params, SamplingParams):
            raise TypeError(f"{where_params}must be a SamplingParams, not {type(params).__name__}")
        stop_tokens: dict[int, str] = {}
        if params.stop and self.detokenizer is not None:
            params, stop_tokens = self._take_stop_tokens(params, self.detokenizer.special_tokens)
        edits, grammars = None, None
        if params.structured_outputs is not None or params.stop or params.stop_token_ids or params.edits_logits:
            try:
                edits, grammars = self._read_params(params)
            except (ValueError, ImportError) as error:
                raise type(error)(f"{where_params}{error}") from error
        request_id = self.num_requests
        self.num_requests += 1
        # A hash and not a sum, so that neighbouring requests do not draw from related streams.
        seed = _hash_seed(request_id, self._seed) if params.seed is None else params.seed
        seqs = []
        for sample in range(params.n):
            grammar = grammars.start(params.structured_outputs) if grammars else None
            seq = Sequence(next(self._seq_ids), tokens, params, self._block_size, seed, grammar, edits)
            seq.request_id, seq.prompt_index, seq.sample = request_id, index, sample
            if sample:
                seq.seed = _hash_seed(sample, seed)
            seq.stop_tokens = stop_tokens
            if self.detokenizer is not None and (streams or params.stop):
                stops = self._stop_strings.get(cast(tuple[str, ...], params.stop)) if params.stop else None
                seq.text_stream = TextStream(self.detokenizer, params, stops)
            seqs.append(seq)
            if params.prompt_logprobs is not None and params.n > 1:
                params = replace(params, prompt_logprobs=None)  # The first sample's are all the others'.
        return seqs

    def _take_stop_tokens(self, params: SamplingParams, known: dict[str, int]) -> tuple[SamplingParams, dict[int, str]]:
        """Make those stop strings stop tokens that are one special token, because texts may lack special tokens."""
        found = {known[s]: s for s in params.stop if s in known and known[s] < self._vocab_size}
        if found:
            stop = tuple(s for s in params.stop if s not in found.values())
            params = replace(params, stop=stop, stop_token_ids=(*params.stop_token_ids, *found))
        return params, found

    def _read_params(self, params: SamplingParams) -> tuple[LogitEdits | None, Grammars | None]:
        """What the options need beside the sampler. Raises ValueError or ImportError for what this model cannot do."""
        form = params.structured_outputs
        if params.stop and self._tokenizer is None:
            raise ValueError(f"stop={quoted(params.stop)}: without a tokenizer there is no text to find it in")
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_ends(params)
        edits = None
        if params.edits_logits:
            # Requests of a batch differ in little else.
            edits = self._logit_edits.get(params if params.seed is None else replace(params, seed=None))
        if form is None:
            return edits, None
        if self._tokenizer is None:
            raise ValueError("structured_outputs: need the model's tokenizer, but skip_tokenizer_init is set")
        if self._grammars is None:
            self._grammars = Grammars(self._tokenizer, self._vocab_size, self._eos)
        self._grammars.start(form)
        if form.choice is not None and params.min_tokens > 0:
            longest = max(len(text.encode()) for text in form.choice)  # A token has one byte at least.
            if params.min_tokens > longest:
                raise ValueError(
                    f"min_tokens={params.min_tokens}: the longest choice has no more than {longest} tokens"
                )
        return edits, self._grammars

    def _check_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        highest = max(token_ids, default=0)
        if highest >= self._vocab_size:
            raise ValueError(f"{name}: token id {highest} is outside the vocabulary, 0..{self._vocab_size - 1}")

    def _check_ends(self, params: SamplingParams) -> None:
        """Raises ValueError if min_tokens keeps away all tokens."""
        if params.min_tokens and len({*params.stop_token_ids, *self._eos}) >= self._vocab_size:
            raise ValueError(
                f"min_tokens={params.min_tokens}: no token is left to draw: all tokens of the vocabulary are in "
                "stop_token_ids or end a sequence, and may not come so early"
            )

    def _make_logit_edits(self, params: SamplingParams) -> LogitEdits:
        self._check_vocabulary("logit_bias", dict(params.logit_bias))
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        if params.bad_words and self._tokenizer is None:
            raise ValueError(
                f"bad_words={quoted(params.bad_words)}: need the model's tokenizer, but skip_tokenizer_init is set; "
                "logit_bias and allowed_token_ids take token ids"
            )
        words = tokenize_bad_words(self.detokenizer, params.bad_words)
        self._check_vocabulary("bad_words", (token for word in words for token in word))
        edits = LogitEdits(params, words, self._vocab_size)
        is_left = unpack_mask(edits.mask, self._vocab_size)
        eos = [token for token in self._eos if token < self._vocab_size]
        if params.structured_outputs is not None and eos and not is_left[eos].any():
            raise ValueError(
                f"structured_outputs: a form ends with one of the tokens {eos}, and allowed_token_ids or bad_words "
                "exclude them"
            )
        if params.min_tokens > 0:
            is_left[[*eos, *params.stop_token_ids]] = False
        if not is_left.any():
            raise ValueError(
                "no token is left to draw: allowed_token_ids, bad_words and min_tokens, which keeps away the ends, "
                "exclude all of them"
            )
        return edits

    def encode_all(self, prompts: list[Prompt], name: str, **options: Any) -> list[array]:
        """Token ids of each prompt. Raises ValueError or TypeError, with the name and the index of a wrong one."""
        encoded = self._encode(prompts, **options)
        for i, token_ids in enumerate(encoded):
            if isinstance(token_ids, Exception):
                raise type(token_ids)(f"{name}[{i}]: {token_ids}") from token_ids
        return encoded

    def encode_completions(self, completions: list[Prompt], prompts: list[array]) -> list[array]:
        """Token ids of each completion, those of a text such that they add it to their prompt's text, if the tokenizer
        can write it. Raises as encode_all."""
        encoded = self.encode_all(completions, "completions", add_special_tokens=False)
        for i, (completion, prompt) in enumerate(zip(completions, prompts, strict=True)):
            text = read_prompt(completion)
            if not isinstance(text, str):
                continue
            if self.detokenizer.added_text(prompt, len(prompt), encoded[i].tolist(), False) != text:
                encoded[i] = array("i", self.detokenizer.encode(text))
        return encoded

    def check_text(self, text: str) -> None:
        """Raises ValueError for a text that is too long by far, before all of it is tokenized."""
        if self._tokenizer is not None:
            self._length_limit.check_text(text, lambda part: len(self._tokenizer(part, verbose=False)["input_ids"]))

    def _encode(self, prompts: list[Prompt], **options: Any) -> list[Any]:
        """The tokens of each prompt, or the exception that says what is wrong with it. options: the tokenizer's."""
        found: list[Any] = []
        texts: dict[int, str] = {}  # index of the prompt -> its text
        for i, prompt in enumerate(prompts):
            try:
                found.append(prompt if type(prompt) is list else read_prompt(prompt))
                if isinstance(found[i], str):
                    if self._tokenizer is None:
                        raise ValueError("is a text, but skip_tokenizer_init is set: pass token ids")
                    if len(found[i]) > self._long_text:
                        self.check_text(found[i])
                    texts[i] = found[i]
            except (TypeError, ValueError) as error:
                found[i:] = [error]
        if texts:
            # Not verbose: a prompt that is too long gets an error of ours.
            encoded = self._tokenizer(list(texts.values()), verbose=False, **options)["input_ids"]
            self._check_bos(encoded)
            for i, token_ids in zip(texts, encoded, strict=True):
                found[i] = token_ids
        for i, token_ids in enumerate(found):
            if not isinstance(token_ids, Exception):
                try:
                    found[i] = as_array(token_ids, self._vocab_size)
                except (TypeError, ValueError) as error:
                    found[i] = error
        return found


def _hash_seed(number: int, seed: int) -> int:
    return xxh64_intdigest(number.to_bytes(8, "little"), seed) >> 1


def longest_first(seqs: list[Sequence], max_seq_len: int, capacity: int, prefix_caching: bool) -> list[Sequence]:
    """Sort by max_tokens, largest first, so that a batch of more than max_num_seqs does not end with a few long ones
    (the LPT rule, Graham 1969). Equals keep their order.

    All keep their order if prompts share their first block and the cache, of `capacity` tokens, cannot hold the whole
    batch: such prompts side by side find the shared blocks before these are evicted.
    """

    limits = {seq: min(seq.max_tokens, max_seq_len) for seq in seqs}
    if len(set(limits.values())) < 2:
        return seqs
    needed = sum(min(seq.num_tokens + limit, max_seq_len) for seq, limit in limits.items())
    if prefix_caching and needed > capacity:
        # Samples of one request share their prompt in any case, and stay side by side.
        requests = {seq.request_id: seq for seq in seqs if seq.num_tokens >= seq.block_size}.values()
        if len({seq.tokens[: seq.block_size].tobytes() for seq in requests}) < len(requests):
            return seqs
    return sorted(seqs, key=limits.__getitem__, reverse=True)
