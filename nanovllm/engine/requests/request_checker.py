"""Everything that a caller hands in, checked before any work: prompts, sampling parameters, a model's tokenizer."""

import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import repeat, zip_longest
from operator import index
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.requests.prompts import Prompt, as_prompts, read_prompt
from nanovllm.engine.sampling.logit_edits import LogitEdits, tokenize_bad_words
from nanovllm.engine.sampling.structured import Grammar, Grammars
from nanovllm.layers.token_masks import unpack_mask
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.model_files import one_line, read_json

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model")
_OTHER_TOKENIZERS = "tokenizer= takes another's, and skip_tokenizer_init=True does without"
_MAX_LOGIT_EDITS = 256  # kept for later requests, 20 KB each for 150,000 tokens


class Request(NamedTuple):
    """A request that has passed the checks."""

    token_ids: array  # the prompt, int32
    grammar: Grammar | None = None  # the form that each of its samples must follow
    logit_edits: LogitEdits | None = None  # the tokens that it makes likelier or forbids


class RequestChecker:
    """Turns prompts into token ids and forms into grammars, and finds what is wrong with a request."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Iterable[int], check_length: Callable[[int], None]):
        """tokenizer: None accepts token ids only. check_length: raises ValueError for too many prompt tokens."""
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = tuple(eos)
        self._check_length = check_length
        self._grammars: Grammars | None = None
        self._logit_edits = lru_cache(_MAX_LOGIT_EDITS)(self._make_logit_edits)

    def as_prompts(self, prompts: Any, name: str = "prompts") -> Iterable[Prompt]:
        return as_prompts(prompts, name, self.tokenizer)

    def check_one(self, prompt: Prompt, params: SamplingParams) -> Request:
        """Raises as check_all."""
        (token_ids,) = self._encode([prompt])
        return self._check(token_ids, params, "prompt: ", "sampling_params: ")

    def check_all(
        self, prompts: list[Prompt], params: Iterable[SamplingParams], on_error: str = "raise", start: int = 0
    ) -> list[Request | Exception]:
        """The requests; texts go through the tokenizer in one batch.

        Args:
            params: one for each prompt.
            on_error: "raise" the first error, or "return" it in the place of its request.
            start: index of the first prompt, for messages.

        Raises ValueError, TypeError, or ImportError for a missing library; the message begins with the argument and the
        index.
        """
        checked: list[Request | Exception] = []
        for i, (token_ids, p) in enumerate(zip(self._encode(prompts), params, strict=True), start):
            try:
                checked.append(self._check(token_ids, p, f"prompts[{i}]: ", f"sampling_params[{i}]: "))
            except (TypeError, ValueError, ImportError) as error:
                if on_error == "raise":
                    raise
                checked.append(error)
        return checked

    def encode_completions(self, completions: list[Prompt]) -> list[array]:
        """Token ids of texts that follow a prompt, without the tokens that begin a text. Raises ValueError or
        TypeError, naming the index."""
        encoded = []
        for i, token_ids in enumerate(self._encode(completions, add_special_tokens=False)):
            if isinstance(token_ids, Exception):
                raise _error_at(f"completions[{i}]: ", token_ids) from token_ids
            encoded.append(token_ids)
        return encoded

    def _check(self, token_ids: array | Exception, params: Any, where: str, where_params: str) -> Request:
        try:
            if isinstance(token_ids, Exception):
                raise token_ids
            self._check_length(len(token_ids))
        except (TypeError, ValueError) as error:
            raise _error_at(where, error) from error
        check_params(params, where_params)
        form = params.structured_outputs
        if form is None and not (params.stop or params.stop_token_ids or params.edits_logits):
            return Request(token_ids)  # Nearly all of them: thousands are checked while the device waits.
        try:
            if params.stop and self.tokenizer is None:
                raise ValueError(f"stop={params.stop!r}: without a tokenizer there is no text to find it in")
            self._check_vocabulary("stop_token_ids", params.stop_token_ids)
            edits = grammar = None
            if params.edits_logits:
                tokens = (params.logit_bias, params.allowed_token_ids, params.bad_words, params.stop_token_ids)
                edits = self._logit_edits(*tokens, params.min_tokens > 0, form is not None)
            if form is not None:
                grammar = self._start_grammar(params)
            return Request(token_ids, grammar, edits)
        except (ValueError, ImportError) as error:
            raise _error_at(where_params, error) from error

    def _start_grammar(self, params: SamplingParams) -> Grammar:
        if self.tokenizer is None:
            raise ValueError("structured_outputs: need the model's tokenizer, but skip_tokenizer_init is set")
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self._vocab_size, self._eos)
        form = params.structured_outputs
        grammar = self._grammars.start(form)
        if form.choice is not None:
            longest = max(len(text.encode()) for text in form.choice)  # A token has one byte at least.
            if params.min_tokens > longest:
                raise ValueError(
                    f"min_tokens={params.min_tokens}: the longest choice has no more than {longest} tokens"
                )
        return grammar

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
        self._check_vocabulary("logit_bias", (token for token, _ in biases))
        self._check_vocabulary("allowed_token_ids", allowed or ())
        if bad_words and self.tokenizer is None:
            raise ValueError(
                f"bad_words={bad_words!r}: need the model's tokenizer, but skip_tokenizer_init is set; logit_bias and "
                "allowed_token_ids take token ids"
            )
        words = tokenize_bad_words(self.tokenizer, bad_words)
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

    def _encode(self, prompts: list[Prompt], **options: Any) -> list[array | Exception]:
        """Token ids of each prompt, or what is wrong with it."""
        found = [prompt if type(prompt) is list else _result_or_error(read_prompt, prompt) for prompt in prompts]
        texts = [i for i, prompt in enumerate(found) if isinstance(prompt, str)]
        if texts:
            encoded = _result_or_error(self._encode_texts, [found[i] for i in texts], options)
            if isinstance(encoded, Exception):
                encoded = [_result_or_error(self._encode_text, found[i], options) for i in texts]
            for i, token_ids in zip(texts, encoded, strict=True):
                found[i] = token_ids
        return [
            prompt if isinstance(prompt, Exception) else _result_or_error(_as_array, prompt, self._vocab_size)
            for prompt in found
        ]

    def _encode_texts(self, texts: list[str], options: dict[str, Any]) -> list[list[int]]:
        if self.tokenizer is None:
            raise ValueError("is a text, but skip_tokenizer_init is set: pass token ids")
        return self.tokenizer(texts, **options)["input_ids"]

    def _encode_text(self, text: str, options: dict[str, Any]) -> list[int]:
        try:
            text.encode()  # The tokenizer's own message for a lone surrogate is that this is no text.
        except UnicodeError as error:
            raise ValueError(f"cannot be encoded: {error}") from error
        return self._encode_texts([text], options)[0]


def _result_or_error(function: Callable[..., Any], *args: Any) -> Any:
    try:
        return function(*args)
    except (TypeError, ValueError) as error:
        return error


def _error_at(where: str, error: Exception) -> Exception:
    """The error with `where` ahead of its message; of a plain class, because a UnicodeError wants other arguments."""
    kind = next(kind for kind in (TypeError, ImportError, ValueError) if isinstance(error, kind))
    return kind(f"{where}{error}")


def _as_array(token_ids: list[int], vocab_size: int) -> array:
    """int32 token ids. Raises TypeError or ValueError unless all are in the vocabulary: any other would end the
    process's CUDA context."""
    if not token_ids:
        raise ValueError("is empty: it must hold at least one token")
    # Without a loop over ids in Python: the device waits while the prompts of a batch are checked.
    try:
        tokens = array("I", token_ids)  # Unsigned integers convert in a third of the time; a negative one overflows.
        values = np.frombuffer(tokens, np.uint32)
        # To an array, a bool is an integer too: 0 or 1.
        is_right = np.maximum.reduce(values) < vocab_size
        if is_right and (np.minimum.reduce(values) > 1 or bool not in set(map(type, token_ids))):
            return array("i", tokens.tobytes())
    except (TypeError, OverflowError):
        pass
    odd = [type(i).__name__ for i in token_ids if isinstance(i, bool) or not hasattr(i, "__index__")]
    try:
        ids = [] if odd else list(map(index, token_ids))
    except TypeError:
        ids = []
    if not ids:
        found = f"; this list holds a {odd[0]}" if odd else ""
        raise TypeError(f"must be a string or a list of integer token ids{found}")
    bad = min(ids) if min(ids) < 0 else max(ids)
    raise ValueError(f"token id {bad} is outside the vocabulary, 0..{vocab_size - 1}")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r}: must be one of {', '.join(allowed)}")


def check_params(params: object, where: str = "sampling_params: ") -> SamplingParams:
    if not isinstance(params, SamplingParams):
        raise TypeError(f"{where}must be a SamplingParams, not {type(params).__name__}")
    return params


def params_per_prompt(params: Any, num_prompts: int) -> list[SamplingParams]:
    """From one for all, a list with one each, whose items are not checked, or None for the defaults."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    params = list(_check_iterable(params))
    if len(params) != num_prompts:
        raise ValueError(
            f"sampling_params: {len(params)} of them for {num_prompts} prompts; pass one for all, or one each"
        )
    return params


def pair_lazily(prompts: Iterable[Prompt], params: Any) -> Iterator[tuple[Prompt, SamplingParams]]:
    """Prompts with their SamplingParams, given as to params_per_prompt; both may be long iterables. Raises ValueError
    when one of them ends before the other."""
    if params is None or isinstance(params, SamplingParams):
        return zip(prompts, repeat(params or SamplingParams()), strict=False)
    return _pair_strictly(prompts, _check_iterable(params))


def _pair_strictly(prompts: Iterable[Prompt], params: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    missing = object()
    for i, (prompt, p) in enumerate(zip_longest(prompts, params, fillvalue=missing)):
        if prompt is missing or p is missing:
            shorter, longer = ("prompts", "sampling_params") if prompt is missing else ("sampling_params", "prompts")
            raise ValueError(
                f"sampling_params: {shorter} ended after {i}, {longer} did not; pass one for all, or one each"
            )
        yield prompt, p


def _check_iterable(params: Any) -> Iterable[Any]:
    if isinstance(params, str | Mapping) or not isinstance(params, Iterable):
        raise TypeError(f"sampling_params: must be a SamplingParams or a list of them, not {type(params).__name__}")
    return params


def load_tokenizer(config: Config) -> Any:
    """Raises FileNotFoundError or ValueError, naming the file and the alternatives."""
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
                read_json(file)  # Raises for the file at fault. Only now, because these files have megabytes.
        names = ", ".join(file.name for file in files)
        raise ValueError(
            f"{config.tokenizer}: its tokenizer ({names}) cannot be loaded: {one_line(error)}; {_OTHER_TOKENIZERS}"
        ) from error
