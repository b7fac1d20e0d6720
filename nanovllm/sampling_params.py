"""SamplingParams: everything a request may ask for, checked where it is made."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any, TypeVar

import numpy as np

from nanovllm.utils.option_hints import FORM_HINTS, SAMPLING_HINTS, explains_unknown_options

MAX_INT32 = 2**31 - 1  # token ids, and counts of them
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_N = 16384
MAX_BIAS = 100

# The device computes in float32: beyond these a number would become infinity, or 0.
MIN_FLOAT, MAX_FLOAT = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)

Params = TypeVar("Params", bound=type)


def _names_unknown_options(hints: Mapping[str, str]):
    def decorate(cls: Params) -> Params:
        cls.__init__ = explains_unknown_options(hints)(cls.__init__)
        return cls

    return decorate


@_names_unknown_options(FORM_HINTS)
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What a completion has to look like; exactly one of json, regex and choice.

    Attributes:
        json: a JSON schema, as a dict, as its text, or as a pydantic model class; it becomes the text. The completion
            is compact JSON, without whitespace between its parts.
        regex: a regular expression that the whole completion matches. \\d is 0-9; \\w and \\s are Unicode's.
        choice: the texts that it may be.
        whitespace_pattern: a regular expression of what may stand between two parts of the JSON, such as " ?". Bound
            its length: a model that has begun to draw blanks may never stop.

    Raises:
        ValueError: none of the three or several, or a value of the wrong kind. Whether the schema or the expression
            itself can be used is checked when the request is added, by the library that enforces it.
        TypeError: an unknown keyword, with the nearest known one.
    """

    json: str | dict[str, Any] | type | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    whitespace_pattern: str | None = None

    def __post_init__(self):
        given = [name for name in ("json", "regex", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"structured_outputs: give exactly one of json, regex and choice, not {given or 'none'}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))  # hashable, as all of a SamplingParams is
        if self.regex is not None:
            _require("regex", self.regex, isinstance(self.regex, str) and self.regex != "", "a regular expression")
            _require_encodable("regex", self.regex)
        if self.choice is not None:
            texts = _as_tuple(self.choice)
            ok = isinstance(texts, tuple) and texts != () and all(isinstance(t, str) and t for t in texts)
            ok = ok and not isinstance(self.choice, str)
            _require("choice", self.choice, ok, "a list of one or more texts, none of them empty")
            _require_encodable("choice", *texts)
            object.__setattr__(self, "choice", texts)
        pattern = self.whitespace_pattern
        if pattern is not None:
            _require("whitespace_pattern", pattern, isinstance(pattern, str), "a regular expression, or None")
            _require("whitespace_pattern", pattern, self.json is not None, "None where json is not given")
            _require_encodable("whitespace_pattern", pattern)


def _schema_text(schema) -> str:
    """A JSON schema's text. Raises ValueError, naming json."""
    given = schema
    if hasattr(schema, "model_json_schema"):  # a pydantic model
        try:
            schema = schema.model_json_schema()
        except Exception as error:  # of pydantic's own, which is not imported here
            raise ValueError(f"json={given!r}: has no JSON schema: {error}") from error
    allowed = "a JSON schema, as a dict, a string or a pydantic model"
    _require("json", given, isinstance(schema, str | dict), allowed)
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        content = json.loads(text, parse_constant=_refuse_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json={given!r}: is not JSON: {error}") from None
    _require_encodable("json", json.dumps(content, ensure_ascii=False))
    return text


def _refuse_constant(name: str):
    raise ValueError(f"{name} is no number of JSON")


@_names_unknown_options(SAMPLING_HINTS)
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names and meanings are vLLM's.

    Immutable, so that one object can serve many requests; `dataclasses.replace` makes a changed copy. Numbers may be
    numpy's, or arrays and tensors of no dimension; they become Python's.

    Logits pass through logit_bias, the penalties, the masks (allowed_token_ids, bad_words, min_tokens and
    structured_outputs), then temperature, top_k, top_p and min_p, each as transformers defines it.

    Attributes:
        temperature: divides the logits before the softmax; 0 is greedy. Like every number here that is no integer, it
            must be 0 or of a size that float32 can hold, 1.2e-38 to 3.4e38.
        top_k: draw among the k likeliest tokens; 0 or -1 is all of them.
        top_p: draw among the likeliest tokens whose probabilities together reach top_p, the one that crosses it
            included, in (0, 1].
        min_p: leave out tokens less likely than min_p times the likeliest, in 0..1.
        max_tokens: completion tokens at most, in 1..2**31 - 1; None goes on to the engine's longest sequence, which may
            end a completion earlier in any case.
        min_tokens: completion tokens before an end-of-sequence token or one of stop_token_ids may be drawn, or one of
            stop be completed, in 0..max_tokens. Where structured_outputs are complete before, the request is an error.
        seed: makes this request's draws reproducible, whatever else is in the batch, in 0..2**63 - 1; None draws from
            the engine's own seed.
        stop: texts that end the completion where they first appear; one text, or a list of them.
        include_stop_str_in_output: keep that text at the end of the completion's.
        stop_token_ids: tokens of the vocabulary that end the completion, besides the model's end-of-sequence tokens.
        ignore_eos: go on past end-of-sequence tokens (benchmarks use this).
        n: completions of the prompt, each drawn on its own, in 1..16384. Their prompt's full KV cache blocks are
            shared.
        logprobs: for each completion token its log-probability and those of the k likeliest, 0..20; None for none. They
            are the model's own: before biases, penalties, masks, temperature and truncation.
        prompt_logprobs: the same for each prompt token but the first.
        presence_penalty: subtracted from the logits of tokens that the completion holds already, in -2..2.
        frequency_penalty: the same, times how often it holds them, in -2..2.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that prompt or completion
            hold already, > 0; 1 is none (arXiv:1909.05858).
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: a form that the completion has to follow.
        logit_bias: {token id: number in -100..100}, added to these tokens' logits. Kept as pairs.
        allowed_token_ids: the only tokens that may be drawn, end-of-sequence tokens included; None allows all.
        bad_words: texts that may not be generated. Each is tokenized as it is and after a space, and the last token of
            it is kept away wherever the completion ends with those before it. The same text made of other tokens can
            still appear.

    Raises:
        ValueError: a value out of range, with the field, the value and what is allowed.
        TypeError: an unknown keyword, with what to use instead.
    """

    temperature: float = 1.0
    max_tokens: int | None = 64
    ignore_eos: bool = False
    seed: int | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()

    def __post_init__(self):
        self._normalize()
        check = self._check
        fraction = f"{MIN_FLOAT:.2g}"
        ok = _is_number(self.temperature, 0, MAX_FLOAT)
        check("temperature", ok, f"0 (greedy), or a finite number in {fraction}..{MAX_FLOAT:.2g}, as float32 can hold")
        ok = self.max_tokens is None or _is_int(self.max_tokens, 1, MAX_INT32)
        check("max_tokens", ok, "an integer in 1..2**31 - 1, or None")
        check("seed", self.seed is None or _is_int(self.seed, 0, MAX_SEED), "None or an integer in 0..2**63 - 1")
        check("top_k", _is_int(self.top_k, 0, MAX_INT32), "an integer in 1..2**31 - 1, or 0 or -1 for all tokens")
        check("top_p", _is_number(self.top_p, MIN_FLOAT, 1), f"a number in {fraction}..1")
        check("min_p", _is_number(self.min_p, 0, 1), "a number in 0..1 that float32 can hold")
        check("min_tokens", _is_int(self.min_tokens, 0, MAX_INT32), "an integer in 0..2**31 - 1")
        if self.max_tokens is not None:
            check("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens, {self.max_tokens}")
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            ok = isinstance(texts, tuple) and all(isinstance(text, str) and text for text in texts)
            check(name, ok, "a text or a list of texts, none of them empty")
            _require_encodable(name, *texts)
        check("stop_token_ids", _are_token_ids(self.stop_token_ids), "a list of token ids >= 0")
        ok = self.allowed_token_ids is None or (self.allowed_token_ids and _are_token_ids(self.allowed_token_ids))
        check("allowed_token_ids", ok, "a list of one or more token ids >= 0, or None")
        self._check_logit_bias()
        check("n", _is_int(self.n, 1, MAX_N), f"an integer in 1..{MAX_N}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(name, value is None or _is_int(value, 0, MAX_LOGPROBS), f"None or an integer in 0..{MAX_LOGPROBS}")
        for name in ("presence_penalty", "frequency_penalty"):
            check(name, _is_number(getattr(self, name), -2, 2), "a number in -2..2 that float32 can hold")
        ok = _is_number(self.repetition_penalty, MIN_FLOAT, MAX_FLOAT)
        check("repetition_penalty", ok, f"a finite number in {fraction}..{MAX_FLOAT:.2g} (1 is none)")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check(name, isinstance(getattr(self, name), bool), "True or False")
        form = self.structured_outputs
        check(
            "structured_outputs", form is None or isinstance(form, StructuredOutputsParams), "StructuredOutputsParams"
        )

    def _check_logit_bias(self) -> None:
        allowed = f"a dict of token ids >= 0 to numbers in -{MAX_BIAS}..{MAX_BIAS}"
        pairs = self.logit_bias
        ok = isinstance(pairs, tuple) and all(
            isinstance(pair, tuple)
            and len(pair) == 2
            and _is_int(pair[0], 0, MAX_INT32)
            and _is_number(pair[1], -MAX_BIAS, MAX_BIAS)
            for pair in pairs
        )
        self._check("logit_bias", ok, allowed)
        self._check("logit_bias", len(dict(pairs)) == len(pairs), f"{allowed}, each token once")

    @classmethod
    def from_generation_config(cls, config: dict[str, Any]) -> "SamplingParams":
        """What a model's generation_config.json recommends; do_sample false is greedy. Raises ValueError where a
        value of it cannot be used."""
        names = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
        names["max_tokens"] = "max_new_tokens"
        given = {field: config[name] for field, name in names.items() if config.get(name) is not None}
        if config.get("do_sample") is False:
            given["temperature"] = 0.0
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"generation_config.json: {error}") from None

    @property
    def truncates(self) -> bool:
        """Whether top_k, top_p or min_p leave tokens out; a greedy choice never notices."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def penalizes(self) -> bool:
        """Whether tokens that are there already are drawn less readily, or more."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def edits_logits(self) -> bool:
        """Whether single tokens are made likelier, or kept away."""
        return bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None

    @property
    def is_plain(self) -> bool:
        """Whether drawing takes the logits, the temperature and the seed alone."""
        return not (
            self.truncates
            or self.penalizes
            or self.edits_logits
            or self.min_tokens
            or self.logprobs is not None
            or self.prompt_logprobs is not None
            or self.structured_outputs is not None
        )

    def _normalize(self) -> None:
        """One spelling of what has several, so that nobody else needs to know them all."""
        for name in _INTEGERS:
            object.__setattr__(self, name, _as_int(getattr(self, name)))
        for name in _FRACTIONS:
            object.__setattr__(self, name, _as_float(getattr(self, name)))
        for name in _BOOLEANS:
            object.__setattr__(self, name, _as_python(getattr(self, name)))
        if self.top_k == -1 and _is_int(self.top_k):
            object.__setattr__(self, "top_k", 0)
        for name in ("stop", "bad_words"):
            texts = _as_python(getattr(self, name))
            object.__setattr__(self, name, (texts,) if isinstance(texts, str) else _as_tuple(texts))
        object.__setattr__(self, "stop_token_ids", _as_ids(self.stop_token_ids))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", _as_ids(self.allowed_token_ids))
        object.__setattr__(self, "logit_bias", _as_pairs(self.logit_bias))

    def _check(self, name: str, ok: bool, allowed: str) -> None:
        _require(name, getattr(self, name), ok, allowed)


_INTEGERS = ("max_tokens", "seed", "top_k", "min_tokens", "n", "logprobs", "prompt_logprobs")
_FRACTIONS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_BOOLEANS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def _require(name: str, value, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: must be {allowed}")


def _require_encodable(name: str, *texts: str) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}={text!r}: cannot be encoded: {error}") from None


def _as_python(value):
    """Python's scalar for one of numpy's or torch's; what is neither stays what it is, for the checks to name."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _as_int(value):
    value = _as_python(value)
    if type(value) in (int, bool):  # not only for speed: to index(), a bool is an integer
        return value
    try:
        return index(value)
    except TypeError:
        return value


def _as_float(value):
    value = _as_python(value)
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value
    except OverflowError:
        return value


def _as_tuple(values):
    """Its items, as Python's scalars. None is empty; what is not iterable stays what it is, for the checks to name."""
    try:
        return () if values is None else tuple(map(_as_python, values))
    except TypeError:
        return values


def _as_ids(values):
    values = _as_tuple(values)
    return tuple(map(_as_int, values)) if isinstance(values, tuple) else values


def _as_pairs(biases):
    """(token id, bias) pairs of a dict, whose keys may be digits, as JSON's have to be."""
    if isinstance(biases, Mapping):
        biases = biases.items()
    try:
        return () if biases is None else tuple((_as_token_id(token), _as_float(bias)) for token, bias in biases)
    except (TypeError, ValueError):
        return biases


def _as_token_id(key):
    return int(key) if isinstance(key, str) and key.isdecimal() else _as_int(key)


def _are_token_ids(values) -> bool:
    return isinstance(values, tuple) and all(_is_int(value, 0, MAX_INT32) for value in values)


def _is_int(value, low: int = -(2**63), high: int = MAX_SEED) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value, low: float, high: float) -> bool:
    """Whether it is in the range, and float32 can hold it: 0, or not so small that it would become 0."""
    return isinstance(value, float) and low <= value <= high and (value == 0 or abs(value) >= MIN_FLOAT)
