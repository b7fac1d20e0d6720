"""SamplingParams: every option of a request, checked where it is made."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from nanovllm.utils.checks import is_int, quoted, refuse_constant, require, shortened
from nanovllm.utils.option_hints import HINTS, explains_unknown_options

MAX_INT32 = 2**31 - 1  # token ids, and counts of tokens
MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_N = 16384
MAX_BIAS = 100
MAX_CHOICES = 100_000
MAX_CHOICE_BYTES, MAX_CHOICES_BYTES = 2**16, 2**24  # of one, and of all

FORMS = ("json", "regex", "choice", "grammar")  # the kinds of structured outputs
MAX_GRAMMAR_CHARACTERS = 2**20

# The device computes in float32: beyond these a number would become infinity, or 0.
MIN_FLOAT, MAX_FLOAT = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


@explains_unknown_options(HINTS["StructuredOutputsParams"])
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form that a completion must have: exactly one of json, regex, choice and grammar.

    Raises:
        ValueError: none or several of these, or a value of the wrong kind. Whether the schema, expression or grammar
            can be enforced is checked when the request is added.
        TypeError: an unknown keyword; the message names the nearest known one.
    """

    json: str | dict[str, Any] | type | None = None  # a JSON schema: dict, text or pydantic model; kept as text
    regex: str | None = None  # that the whole completion matches; \d is 0-9, \w and \s are Unicode's
    choice: Collection[str] | None = None  # texts; the completion is one of them
    grammar: str | None = None  # in Lark's form, whose start is `start`, or in GBNF, whose start is `root`
    whitespace_pattern: str | None = None  # with json: of the whitespace between its parts; bound its length

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            kinds = f"{', '.join(FORMS[:-1])} and {FORMS[-1]}"
            raise ValueError(f"structured_outputs: give exactly one of {kinds}, not {given or 'none'}")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))  # Text, so that it can be hashed.
        if self.regex is not None:
            require("regex", self.regex, isinstance(self.regex, str) and self.regex != "", "a regular expression")
            _require_encodable("regex", self.regex)
        if self.grammar is not None:
            is_text = isinstance(self.grammar, str) and not self.grammar.isspace() and self.grammar != ""
            allowed = f"the text of a grammar, at most {MAX_GRAMMAR_CHARACTERS} characters"
            require("grammar", self.grammar, is_text and len(self.grammar) <= MAX_GRAMMAR_CHARACTERS, allowed)
            _require_encodable("grammar", self.grammar)
        if self.choice is not None:
            texts = _as_tuple(self.choice)
            ok = not isinstance(self.choice, str) and _are_texts(texts) and texts != ()
            require("choice", self.choice, ok, "a list of one or more texts, none of them empty")
            _require_encodable("choice", *texts)
            _check_choice_size(texts)
            object.__setattr__(self, "choice", texts)
        pattern = self.whitespace_pattern
        if pattern is not None:
            require("whitespace_pattern", pattern, isinstance(pattern, str), "a regular expression, or None")
            require("whitespace_pattern", pattern, self.json is not None, "None where json is not given")
            _require_encodable("whitespace_pattern", pattern)


def _check_choice_size(texts: tuple[str, ...]) -> None:
    """Raises ValueError for a list that would take minutes to compile, or gigabytes."""
    sizes = list(map(len, map(str.encode, texts)))
    allowed = f"at most {MAX_CHOICES} texts"
    require("choice", texts, len(texts) <= MAX_CHOICES, f"{allowed}; there are {len(texts)}")
    allowed += f" of up to {MAX_CHOICE_BYTES} bytes, {MAX_CHOICES_BYTES} bytes together"
    is_small = max(sizes) <= MAX_CHOICE_BYTES and sum(sizes) <= MAX_CHOICES_BYTES
    require("choice", texts, is_small, f"{allowed}; the longest has {max(sizes)} bytes, and all have {sum(sizes)}")


def _schema_text(schema: Any) -> str:
    """A JSON schema's text. Raises ValueError, naming json."""
    given = schema
    if hasattr(schema, "model_json_schema"):  # a pydantic model
        try:
            schema = schema.model_json_schema()
        except Exception as error:  # pydantic's own classes, and pydantic is not imported here
            raise ValueError(f"json={quoted(given)}: has no JSON schema: {shortened(error)}") from error
    require("json", given, isinstance(schema, str | dict), "a JSON schema, as a dict, a string or a pydantic model")
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        content = json.loads(text, parse_constant=refuse_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json={quoted(given)}: is not JSON: {error}") from None
    _require_encodable("json", json.dumps(content, ensure_ascii=False))
    return text


@explains_unknown_options(HINTS["SamplingParams"])
@dataclass(frozen=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names and meanings are vLLM's; docs/reference.md describes each.

    Immutable, so that one object can serve many requests; `dataclasses.replace` makes a changed copy. Numbers of numpy
    and arrays or tensors without a dimension become Python's numbers. Collections become tuples.

    Logits pass through logit_bias, the penalties, the masks (allowed_token_ids, bad_words, min_tokens and
    structured_outputs), then temperature, top_k, top_p and min_p, each as transformers defines it.

    Raises:
        ValueError: a value out of range, with the field, the value and what is allowed.
        TypeError: an unknown keyword, with what to use instead.
    """

    temperature: float = 1.0  # divides the logits; 0 is greedy
    max_tokens: int | None = 64  # most completion tokens; None: up to the engine's longest sequence
    ignore_eos: bool = False
    seed: int | None = None  # makes the tokens reproducible whatever else is in the batch; None: of the engine's seed
    top_k: int = 0  # sample from the k likeliest tokens; 0 or -1 is all
    top_p: float = 1.0  # sample from the likeliest tokens whose probabilities together reach top_p
    min_p: float = 0.0  # leave out tokens less likely than min_p times the likeliest
    min_tokens: int = 0  # completion tokens before anything may end it
    stop: Collection[str] = ()  # texts that end the completion where they first appear
    include_stop_str_in_output: bool = False
    stop_token_ids: Collection[int] = ()  # tokens that end it, besides the end-of-sequence tokens
    n: int = 1  # samples; they share the prompt's full KV cache blocks
    logprobs: int | None = None  # log-probabilities of each completion token and the k likeliest, before any edit
    logprob_token_ids: Collection[int] | None = None  # tokens whose log-probabilities are added to those of logprobs
    prompt_logprobs: int | None = None  # as logprobs, for each prompt token except the first
    prompt_logprobs_start: int = 0  # index of the first prompt token that gets them; from the prompt's end if negative
    presence_penalty: float = 0.0  # subtracted from the logits of tokens that are in the completion
    frequency_penalty: float = 0.0  # the same, times the number of occurrences
    repetition_penalty: float = 1.0  # of tokens in prompt or completion (arXiv:1909.05858); 1 changes nothing
    skip_special_tokens: bool = True  # leave them out of the text
    structured_outputs: StructuredOutputsParams | None = None  # the form that the completion must have
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()  # token id -> number; kept as pairs
    allowed_token_ids: Collection[int] | None = None  # the only tokens that may be sampled
    bad_words: Collection[str] = ()  # texts that must not be generated

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            value = rule.convert(getattr(self, name))
            require(name, value, rule.is_right(value), rule.explain(value))
            object.__setattr__(self, name, value)
        if self.max_tokens is not None:
            ok = self.min_tokens <= self.max_tokens
            require("min_tokens", self.min_tokens, ok, f"at most max_tokens, {self.max_tokens}")
        ok = self.logprob_token_ids is None or self.logprobs is not None
        require("logprob_token_ids", self.logprob_token_ids, ok, "None where logprobs is not given (0 gives no others)")
        start = self.prompt_logprobs_start
        ok = start == 0 or self.prompt_logprobs is not None
        require("prompt_logprobs_start", start, ok, "0 where prompt_logprobs is not given")
        _require_encodable("stop", *self.stop)
        _require_encodable("bad_words", *self.bad_words)
        is_once = len(dict(self.logit_bias)) == len(self.logit_bias)
        require("logit_bias", self.logit_bias, is_once, f"{_RULES['logit_bias'].allowed}, each token once")

    @classmethod
    def from_generation_config(cls, config: Mapping[str, Any]) -> "SamplingParams":
        """The settings that a model's generation_config.json recommends; do_sample false is greedy. Raises ValueError
        for a value that cannot be used."""
        names = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")}
        names["max_tokens"] = "max_new_tokens"
        given = {field: config[name] for field, name in names.items() if config.get(name) is not None}
        if config.get("do_sample") is False:
            given["temperature"] = 0.0
        try:
            return cls(**given)
        except ValueError as error:
            raise ValueError(f"generation_config.json: {error}") from None

    @cached_property
    def truncates(self) -> bool:
        """True if top_k, top_p or min_p can exclude tokens. Greedy sampling is the same with and without them."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @cached_property
    def penalizes(self) -> bool:
        """True if logits depend on the tokens so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @cached_property
    def edits_logits(self) -> bool:
        """True if single tokens are made likelier or forbidden."""
        return bool(self.logit_bias or self.bad_words) or self.allowed_token_ids is not None

    @cached_property
    def is_plain(self) -> bool:
        """True if sampling needs only the logits, the temperature and the seed."""
        reports = self.logprobs is not None or self.prompt_logprobs is not None
        return self.draws_plainly and not reports

    @cached_property
    def draws_plainly(self) -> bool:
        """True if tokens are drawn as for a plain request; log-probabilities may be reported."""
        edits = self.penalizes or self.edits_logits or self.min_tokens or self.structured_outputs is not None
        return not (self.truncates or edits)


def misplaced_option(name: str, value: object) -> str:
    """Where an option of SamplingParams belongs that was given to a method; "" for any other name."""
    return f"pass sampling_params=SamplingParams({name}={quoted(value)})" if name in _RULES else ""


class _Rule(NamedTuple):
    """What one option accepts."""

    convert: Callable[[Any], Any]  # to the one spelling that is kept; a value of a wrong kind stays, for the message
    is_right: Callable[[Any], bool]  # whether the converted value is accepted
    allowed: str  # for the message
    is_right_entry: Callable[[Any], bool] | None = None  # of a collection: whether one of its entries is accepted

    def explain(self, value: Any) -> str:
        """What is allowed, and the first wrong entry of a collection, which may be too long to be shown."""
        if self.is_right_entry is None or not isinstance(value, tuple) or len(value) < 2:
            return self.allowed
        wrong = next((entry for entry in enumerate(value) if not self.is_right_entry(entry[1])), None)
        return self.allowed if wrong is None else f"{self.allowed}; entry {wrong[0]} is {quoted(wrong[1])}"


def _integer(low: int, high: int, allowed: str, optional: bool = False) -> _Rule:
    return _Rule(_as_python, lambda value: is_int(value, low, high) or (optional and value is None), allowed)


def _number(low: float, high: float, allowed: str) -> _Rule:
    return _Rule(_as_float, lambda value: _is_float32(value, low, high), allowed)


def _require_encodable(name: str, *texts: str) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}={quoted(text)}: cannot be encoded: {error}") from None


def _as_python(value: Any) -> Any:
    """Python's scalar for one of numpy or torch."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _as_float(value: Any) -> Any:
    value = _as_python(value)
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value
    except OverflowError:
        return value


def _as_tuple(values: Any) -> Any:
    try:
        return () if values is None else tuple(map(_as_python, values))
    except TypeError:
        return values


def _as_texts(texts: Any) -> Any:
    texts = _as_python(texts)
    return (texts,) if isinstance(texts, str) else _as_tuple(texts)


def _as_pairs(biases: Any) -> Any:
    """(token id, bias) pairs. A dict's keys may be digits, as in JSON."""
    if isinstance(biases, Mapping):
        biases = biases.items()
    try:
        pairs = () if biases is None else biases
        return tuple(
            (int(t) if isinstance(t, str) and t.isdecimal() else _as_python(t), _as_float(b)) for t, b in pairs
        )
    except (TypeError, ValueError):
        return biases


def _collection(
    convert: Callable[[Any], Any], is_right_entry: Callable[[Any], bool], allowed: str, optional: bool = False
) -> _Rule:
    """optional: None is accepted, and an empty collection is not."""

    def is_right(values: Any) -> bool:
        if optional and values is None:
            return True
        return isinstance(values, tuple) and all(map(is_right_entry, values)) and not (optional and values == ())

    return _Rule(convert, is_right, allowed, is_right_entry)


def _are_texts(values: Any) -> bool:
    return isinstance(values, tuple) and all(map(_is_text, values))


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_token_id(value: Any) -> bool:
    return is_int(value, 0, MAX_INT32)


def _is_bias(pair: Any) -> bool:
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    return is_pair and _is_token_id(pair[0]) and _is_float32(pair[1], -MAX_BIAS, MAX_BIAS)


def _is_float32(value: Any, low: float, high: float) -> bool:
    """Whether the number is in the range, and does not become zero when it is rounded to float32."""
    return isinstance(value, float) and low <= value <= high and (value == 0 or abs(value) >= MIN_FLOAT)


_LOW, _HIGH = f"{MIN_FLOAT:.2g}", f"{MAX_FLOAT:.2g}"
_FLAG = _Rule(_as_python, lambda value: isinstance(value, bool), "True or False")
_PENALTY = _number(-2, 2, "a number in -2..2 that float32 can hold")
_LOGPROBS = _integer(0, MAX_LOGPROBS, f"None or an integer in 0..{MAX_LOGPROBS}", optional=True)
_TEXTS = _collection(_as_texts, _is_text, "a text or a list of texts, none of them empty")

_TOKEN_IDS = _collection(
    lambda ids: None if ids is None else _as_tuple(ids),
    _is_token_id,
    "a list of one or more token ids >= 0, or None",
    optional=True,
)

_RULES = {
    "temperature": _number(0, MAX_FLOAT, f"0 (greedy), or a finite number in {_LOW}..{_HIGH}, as float32 can hold"),
    "max_tokens": _integer(1, MAX_INT32, "an integer in 1..2**31 - 1, or None", optional=True),
    "ignore_eos": _FLAG,
    "seed": _integer(0, MAX_SEED, "None or an integer in 0..2**63 - 1", optional=True),
    "top_k": _integer(0, MAX_INT32, "an integer in 1..2**31 - 1, or 0 or -1 for all tokens")._replace(
        convert=lambda value: 0 if is_int(_as_python(value), -1, -1) else _as_python(value)
    ),
    "top_p": _number(MIN_FLOAT, 1, f"a number in {_LOW}..1"),
    "min_p": _number(0, 1, "a number in 0..1 that float32 can hold"),
    "min_tokens": _integer(0, MAX_INT32, "an integer in 0..2**31 - 1"),
    "stop": _TEXTS,
    "include_stop_str_in_output": _FLAG,
    "stop_token_ids": _collection(_as_tuple, _is_token_id, "a list of token ids >= 0"),
    "n": _integer(1, MAX_N, f"an integer in 1..{MAX_N}"),
    "logprobs": _LOGPROBS,
    "logprob_token_ids": _TOKEN_IDS,
    "prompt_logprobs": _LOGPROBS,
    "prompt_logprobs_start": _integer(-MAX_INT32, MAX_INT32, "an integer in -2**31 + 1..2**31 - 1"),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "repetition_penalty": _number(MIN_FLOAT, MAX_FLOAT, f"a finite number in {_LOW}..{_HIGH} (1 is none)"),
    "skip_special_tokens": _FLAG,
    "structured_outputs": _Rule(
        _as_python, lambda form: form is None or isinstance(form, StructuredOutputsParams), "StructuredOutputsParams"
    ),
    "logit_bias": _collection(_as_pairs, _is_bias, f"a dict of token ids >= 0 to numbers in -{MAX_BIAS}..{MAX_BIAS}"),
    "allowed_token_ids": _TOKEN_IDS,
    "bad_words": _TEXTS,
}
