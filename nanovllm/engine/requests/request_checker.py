"""What a caller hands in, checked before any work: prompts, sampling parameters, a model's tokenizer."""

import os
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise, repeat, zip_longest
from operator import index
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.requests.prompts import Prompt, as_prompts, read_prompt
from nanovllm.engine.sampling.logit_edits import LogitEdits, tokenize_bad_words
from nanovllm.engine.sampling.structured import Grammar, Grammars
from nanovllm.layers.token_masks import unpack_mask
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.utils.model_files import one_line, read_json

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model")
_OTHER_TOKENIZERS = "tokenizer= takes another's, and skip_tokenizer_init=True does without"

# Token ids that are checked in one go: enough that what a prompt costs by itself does not count, and no more, because
# the copies that are made of them should stay in the processor's cache.
TOKENS_AT_ONCE = 32768

_MAX_LOGIT_EDITS = 256  # different ones that are kept ready, 20 KB each for 150,000 tokens


class Request(NamedTuple):
    """What has passed the checks: the prompt, int32, the form that each of its samples has to follow, and the tokens
    that each makes likelier or keeps away."""

    token_ids: array
    grammar: Grammar | None = None
    logit_edits: LogitEdits | None = None


class RequestChecker:
    """Turns prompts into token ids and forms into grammars, and finds what is wrong with a request."""

    def __init__(self, tokenizer, vocab_size: int, eos: Iterable[int], check_length: Callable[[int], None]):
        """check_length: raises ValueError for a prompt of too many tokens. tokenizer: None takes token ids alone. eos:
        the model's end-of-sequence token ids."""
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos
        self._check_length = check_length
        self._grammars: Grammars | None = None
        self._logit_edits = lru_cache(_MAX_LOGIT_EDITS)(self._make_logit_edits)

    def as_prompts(self, prompts, name: str = "prompts") -> Iterable[Prompt]:
        """The prompts that the argument `name` holds, as `prompts.as_prompts` finds them."""
        return as_prompts(prompts, name, self.tokenizer)

    def check_one(self, prompt: Prompt, params: SamplingParams) -> Request:
        """The request. Raises ValueError, TypeError, or ImportError as check_all."""
        (token_ids,) = self._convert(self._encode([prompt]), lambda i: "prompt: ")
        return self._check(token_ids, params, "prompt: ", "sampling_params")

    def check_all(
        self, prompts: list[Prompt], params: Iterable[SamplingParams], on_error: str = "raise", start: int = 0
    ) -> list[Request | Exception]:
        """The requests; texts go through the tokenizer in one batch.

        Args:
            params: one each.
            on_error: "raise" the first fault, or "return" it in the place of the request.
            start: index of the first prompt, for messages.

        Raises:
            ValueError, TypeError: a fault; the message begins with the argument and the index.
            ImportError: likewise, where a structured output needs a library that is not installed.
        """
        checked = []
        converted = self._convert(self._encode(prompts), lambda i: f"prompts[{start + i}]: ")
        for i, (token_ids, p) in enumerate(zip(converted, params, strict=True), start):
            try:
                checked.append(self._check(token_ids, p, f"prompts[{i}]: ", f"sampling_params[{i}]"))
            except (TypeError, ValueError, ImportError) as error:
                if on_error == "raise":
                    raise
                checked.append(error)
        return checked

    def encode_completions(self, completions: list[Prompt]) -> list[array]:
        """Token ids of texts that go on after a prompt, hence without what the tokenizer puts before one. Raises
        ValueError or TypeError, naming the index."""
        encoded = self._encode(completions, add_special_tokens=False)
        converted = self._convert(encoded, lambda i: f"completions[{i}]: ")
        for error in converted:
            if isinstance(error, Exception):
                raise error
        return converted

    def _check(self, token_ids: array | Exception, params, where: str, where_params: str) -> Request:
        if isinstance(token_ids, Exception):
            raise token_ids
        try:
            self._check_length(len(token_ids))
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None
        form = check_params(params, where_params).structured_outputs
        if form is None and not (params.stop or params.stop_token_ids or params.edits_logits):
            return Request(token_ids)  # Nearly all of them: thousands are checked while the device waits.
        try:
            self._check_stops(params)
            grammar = edits = None
            if params.edits_logits:
                tokens = (params.logit_bias, params.allowed_token_ids, params.bad_words, params.stop_token_ids)
                edits = self._logit_edits(*tokens, params.min_tokens > 0, form is not None)
            if form is not None:
                grammar = self._start_grammar(form)
                _check_min_tokens(params.min_tokens, form)
            return Request(token_ids, grammar, edits)
        except (ValueError, ImportError) as error:
            # Not as what it is: a UnicodeError wants other arguments.
            kind = ImportError if isinstance(error, ImportError) else ValueError
            raise kind(f"{where_params}: {error}") from error

    def _start_grammar(self, form: StructuredOutputsParams) -> Grammar:
        """Raises ValueError where the form cannot be enforced, and ImportError without the library that would."""
        if self.tokenizer is None:
            raise ValueError("structured_outputs: need the model's tokenizer, but skip_tokenizer_init is set")
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self._vocab_size, self._eos)
        return self._grammars.start(form)

    def _check_stops(self, params: SamplingParams) -> None:
        if params.stop and self.tokenizer is None:
            raise ValueError(f"stop={params.stop!r}: without a tokenizer there is no text to find it in")
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)

    def _check_vocabulary(self, name: str, token_ids: Iterable[int]) -> None:
        highest = max(token_ids, default=0)
        if highest >= self._vocab_size:
            raise ValueError(f"{name}: token id {highest} is outside the vocabulary, 0..{self._vocab_size - 1}")

    def _make_logit_edits(
        self,
        biases: tuple[tuple[int, float], ...],
        allowed: tuple[int, ...] | None,
        bad_words: tuple[str, ...],
        stop_token_ids: tuple[int, ...],
        has_min_tokens: bool,
        has_form: bool,
    ) -> LogitEdits:
        """Raises ValueError for a token that the model has not, for words without a tokenizer, and where no token could
        ever be drawn."""
        self._check_vocabulary("logit_bias", (token for token, _ in biases))
        self._check_vocabulary("allowed_token_ids", allowed or ())
        if bad_words and self.tokenizer is None:
            raise ValueError(
                f"bad_words={bad_words!r}: need the model's tokenizer, but skip_tokenizer_init is set; logit_bias and "
                "allowed_token_ids take token ids"
            )
        words = tokenize_bad_words(self.tokenizer, bad_words) if bad_words else []
        self._check_vocabulary("bad_words", (token for word in words for token in word))
        edits = LogitEdits(biases, allowed, words, self._vocab_size)
        is_left = unpack_mask(edits.mask, self._vocab_size)
        eos = [token for token in self._eos if token < self._vocab_size]
        if has_form and eos and not is_left[eos].any():
            raise ValueError(
                f"structured_outputs: a form ends with one of the tokens {eos}, and allowed_token_ids or bad_words "
                "exclude them"
            )
        if has_min_tokens:
            is_left[[*eos, *stop_token_ids]] = False
        if not is_left.any():
            raise ValueError(
                "no token is left to draw: allowed_token_ids, bad_words and min_tokens, which keeps away the ends, "
                "exclude all of them"
            )
        return edits

    def _convert(self, prompts: list[list[int] | Exception], where: Callable[[int], str]) -> list[array | Exception]:
        """int32 token ids of each prompt, or what is wrong with it, the message beginning with where(its index). No
        loop over ids is Python's: the device waits while the prompts of a batch are checked."""
        converted = []
        for portion in _portions(prompts):
            try:
                converted += _convert_lists(portion, self._vocab_size)
            except (TypeError, _EmptyPrompt, OverflowError):
                first = len(converted)
                converted += [self._convert_one(p, where(i)) for i, p in enumerate(portion, first)]
        return converted

    def _convert_one(self, token_ids: list[int] | Exception, where: str) -> array | Exception:
        try:
            if isinstance(token_ids, Exception):
                kind = TypeError if isinstance(token_ids, TypeError) else ValueError
                raise kind(f"{where}{token_ids}") from token_ids
            return check_token_ids(token_ids, self._vocab_size, where)
        except (TypeError, ValueError) as error:
            return error

    def _encode(self, prompts: list[Prompt], **options) -> list[list[int] | Exception]:
        """Token ids of each prompt, or why there are none."""
        token_ids = [prompt if type(prompt) is list else _read(prompt) for prompt in prompts]
        texts = [i for i, prompt in enumerate(token_ids) if isinstance(prompt, str)]
        if texts:
            try:
                encoded = self._encode_texts([token_ids[i] for i in texts], options)
            except (TypeError, ValueError):
                encoded = [self._encode_text(token_ids[i], options) for i in texts]
            for i, ids in zip(texts, encoded, strict=True):
                token_ids[i] = ids
        return token_ids

    def _encode_texts(self, texts: list[str], options: dict) -> list[list[int]]:
        if self.tokenizer is None:
            raise ValueError("is a text, but skip_tokenizer_init is set: pass token ids")
        return self.tokenizer(texts, **options)["input_ids"]

    def _encode_text(self, text: str, options: dict) -> list[int] | Exception:
        try:
            text.encode()  # The tokenizer's own word on a lone surrogate is that this is no text.
            return self._encode_texts([text], options)[0]
        except UnicodeError as error:
            return ValueError(f"cannot be encoded: {error}")
        except (TypeError, ValueError) as error:
            return error


def _check_min_tokens(min_tokens: int, form: StructuredOutputsParams) -> None:
    """Raises ValueError where the form is always complete before. How long others can be is not known here."""
    if form.choice is not None:
        longest = max(len(text.encode()) for text in form.choice)  # A token has one byte at least.
        if min_tokens > longest:
            raise ValueError(f"min_tokens={min_tokens}: the longest choice has no more than {longest} tokens")


def _read(prompt) -> str | list[int] | Exception:
    try:
        return read_prompt(prompt)
    except (TypeError, ValueError) as error:
        return error


def check_choice(name: str, value, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def check_token_ids(token_ids: list[int], vocab_size: int, where: str) -> array:
    """The token ids as an int32 array. Raise TypeError or ValueError, its message beginning with `where`, unless these
    are token ids, one at least.

    An id outside the vocabulary must never reach a GPU: it would end the process's CUDA context.
    """
    try:
        try:
            (tokens,) = _convert_lists([token_ids], vocab_size)
        except OverflowError:
            ids = list(map(index, token_ids))
            if bool in set(map(type, token_ids)):
                raise TypeError from None
            bad = min(ids) if min(ids) < 0 else max(ids)
            raise ValueError(f"{where}token id {bad} is outside the vocabulary, 0..{vocab_size - 1}") from None
    except TypeError:
        odd = [type(i).__name__ for i in token_ids if isinstance(i, bool) or not hasattr(i, "__index__")]
        found = f"; this list holds a {odd[0]}" if odd else ""
        raise TypeError(f"{where}must be a string or a list of integer token ids{found}") from None
    except _EmptyPrompt:
        raise ValueError(f"{where}is empty: it must hold at least one token") from None
    return tokens


class _EmptyPrompt(ValueError):
    """A prompt without a token."""


def _convert_lists(prompts: list[list[int]], vocab_size: int) -> list[array]:
    """int32 token ids of each. Raises TypeError for what is no list of integers, _EmptyPrompt, and OverflowError for an
    id that the model has not."""
    # Unsigned, because array then converts integers in a third of the time; a negative one overflows.
    tokens, ends = array("I"), [0]
    for prompt in prompts:
        tokens.fromlist(prompt)
        ends.append(len(tokens))
    if len(set(ends)) < len(ends):
        raise _EmptyPrompt
    values = np.frombuffer(tokens, np.uint32)
    if np.maximum.reduce(values) >= vocab_size:
        raise OverflowError
    if np.minimum.reduce(values) <= 1:
        # To an array, a bool is an integer too, and one of these.
        for i in np.flatnonzero(values <= 1).tolist():
            row = bisect_right(ends, i) - 1
            if type(prompts[row][i - ends[row]]) is bool:
                raise TypeError
    tokens = array("i", tokens.tobytes())
    return [tokens[start:end] for start, end in pairwise(ends)]


def _portions(prompts: list) -> Iterator[list]:
    """The prompts in order, as many at a time as have TOKENS_AT_ONCE tokens."""
    portion, num_tokens = [], 0
    for prompt in prompts:
        portion.append(prompt)
        num_tokens += len(prompt) if type(prompt) is list else 0
        if num_tokens >= TOKENS_AT_ONCE:
            yield portion
            portion, num_tokens = [], 0
    if portion:
        yield portion


def params_per_prompt(params, num_prompts: int) -> list[SamplingParams]:
    """One SamplingParams a prompt, from one for all, a list with one each, or None for the defaults; what the list
    holds is not looked at. Raises TypeError or ValueError."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    params = list(_check_params_list(params))
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params: {len(params)} of them for {num_prompts} prompts; pass one for all, or one each"
        )
    return params


def pair_lazily(prompts: Iterable[Prompt], params) -> Iterator[tuple[Prompt, SamplingParams]]:
    """Prompts with their SamplingParams, as params_per_prompt finds them, where either may be a long iterable.
    Raises TypeError at once, and ValueError when one of them ends before the other."""
    if params is None or isinstance(params, SamplingParams):
        return zip(prompts, repeat(params or SamplingParams()), strict=False)
    return _pair_strictly(prompts, _check_params_list(params))


def _pair_strictly(prompts: Iterable, params: Iterable) -> Iterator[tuple]:
    missing = object()
    for i, (prompt, p) in enumerate(zip_longest(prompts, params, fillvalue=missing)):
        if prompt is missing or p is missing:
            shorter, longer = ("prompts", "sampling_params") if prompt is missing else ("sampling_params", "prompts")
            raise ValueError(
                f"sampling_params: {shorter} ended after {i}, {longer} did not; pass one for all, or one each"
            )
        yield prompt, p


def _check_params_list(params) -> Iterable:
    if isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(f"sampling_params: must be a SamplingParams or a list of them, not {type(params).__name__}")
    return params


def check_params(params, where: str = "sampling_params") -> SamplingParams:
    """`params` itself, or TypeError."""
    if not isinstance(params, SamplingParams):
        raise TypeError(f"{where}: must be a SamplingParams, not {type(params).__name__}")
    return params


def load_tokenizer(config: Config):
    """The transformers tokenizer of `config.tokenizer`. Raises FileNotFoundError or ValueError, naming the file and the
    ways to do without."""
    from transformers import AutoTokenizer

    if config.tokenizer is None:
        raise ValueError(f"model={config.model!r}: a published shape has no tokenizer; {_OTHER_TOKENIZERS}")
    files = [file for name in _TOKENIZER_FILES if os.path.lexists(file := Path(config.tokenizer, name))]
    if not files:
        raise FileNotFoundError(f"{config.tokenizer}: holds no {_TOKENIZER_FILES[0]}; {_OTHER_TOKENIZERS}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(config.tokenizer, use_fast=True)
        # Without a vocabulary transformers 5 makes up an empty one.
        if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
            raise ValueError("it has no vocabulary")
        return tokenizer
    except Exception as error:
        for file in files:
            if file.suffix == ".json":
                read_json(file)  # Raises for the file at fault. Not before: they are megabytes.
        names = ", ".join(file.name for file in files)
        raise ValueError(
            f"{config.tokenizer}: its tokenizer ({names}) cannot be loaded: {one_line(error)}; {_OTHER_TOKENIZERS}"
        ) from error
