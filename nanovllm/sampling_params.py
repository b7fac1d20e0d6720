"""SamplingParams: every option of a request, checked where it is made."""

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np

from nanovllm.utils.checks import is_int, quoted, refuse_constant, shortened
from nanovllm.utils.option_hints import HINTS, explains_unknown_options
from nanovllm.utils.rules import FLAG, Rule, check_rules, integer, option, together

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


def _as_choice(values: Any) -> Any:
    texts = None if isinstance(values, str) else _as_tuple(values)
    return texts if _are_texts(texts) else values


def _as_pairs(biases: Any) -> Any:
    """(token id, bias) pairs. A dict's keys may be digits, as in JSON."""
    pairs = biases.items() if isinstance(biases, Mapping) else () if biases is None else biases
    try:
        return tuple(
            (int(t) if isinstance(t, str) and t.isdecimal() else _as_python(t), _as_float(b)) for t, b in pairs
        )
    except (TypeError, ValueError):
        return pairs


def _as_schema_text(schema: Any) -> Any:
    """A JSON schema's text. Raises ValueError, naming json."""
    given = schema
    if hasattr(schema, "model_json_schema"):  # a pydantic model
        try:
            schema = schema.model_json_schema()
        except Exception as error:  # pydantic's own classes, and pydantic is not imported here
            raise ValueError(f"json={quoted(given)}: has no JSON schema: {shortened(error)}") from error
    if not isinstance(schema, str | dict):
        return given
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        content = json.loads(text, parse_constant=refuse_constant)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"json={quoted(given)}: is not JSON: {error}") from None
    json.dumps(content, ensure_ascii=False).encode()
    return text


def _is_float32(value: Any, low: float, high: float) -> bool:
    """Whether the number is in the range, and does not become zero when it is rounded to float32."""
    return isinstance(value, float) and low <= value <= high and (value == 0 or abs(value) >= MIN_FLOAT)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and value.encode() is not None  # It can be encoded.


def _are_texts(values: Any) -> bool:
    return isinstance(values, tuple) and values != () and all(map(_is_text, values))


def _is_token_id(value: Any) -> bool:
    return is_int(value, 0, MAX_INT32)


def _is_bias(pair: Any) -> bool:
    is_pair = isinstance(pair, tuple) and len(pair) == 2
    return is_pair and _is_token_id(pair[0]) and _is_float32(pair[1], -MAX_BIAS, MAX_BIAS)


def _sizes(texts: tuple[str, ...]) -> list[int]:
    return list(map(len, map(str.encode, texts)))


def _integer(low: int, high: int, allowed: str, none: bool = False) -> Rule:
    return integer(low, high, allowed, none)._replace(convert=_as_python)


def _number(low: float, high: float, allowed: str) -> Rule:
    return Rule(lambda value: _is_float32(value, low, high), allowed, _as_float)


def _all(
    is_right_entry: Callable[[Any], bool],
    allowed: str,
    convert: Callable[[Any], Any] = _as_tuple,
    is_filled: bool = False,
) -> Rule:
    def is_right(values: Any) -> bool:
        return isinstance(values, tuple) and all(map(is_right_entry, values)) and (values != () or not is_filled)

    return Rule(is_right, allowed, convert, is_right_entry)


_FLAG = FLAG._replace(convert=_as_python)
_FINITE = f"finite number in {MIN_FLOAT:.2g}..{MAX_FLOAT:.2g}"
_PENALTY = _number(-2, 2, "a number in -2..2 that float32 can hold")
_TOP_K = _integer(0, MAX_INT32, "an integer in 1..2**31 - 1, or 0 or -1 for all tokens")._replace(
    convert=lambda value: 0 if is_int(_as_python(value), -1, -1) else _as_python(value)
)
_UP_TO_MAX_TOKENS = together(
    lambda params: params.max_tokens is None or params.min_tokens <= params.max_tokens,
    lambda params: f"at most max_tokens, {params.max_tokens}",
)
_LOGPROBS = _integer(0, MAX_LOGPROBS, f"None or an integer in 0..{MAX_LOGPROBS}")
_WITH_LOGPROBS = together(
    lambda params: params.logprobs is not None, "None where logprobs is not given (0 gives no others)"
)
_INDEX = _integer(-MAX_INT32, MAX_INT32, "an integer in -2**31 + 1..2**31 - 1")
_WITH_PROMPT_LOGPROBS = together(
    lambda params: params.prompt_logprobs is not None, "0 where prompt_logprobs is not given"
)
_END_TEXT = Rule(lambda text: isinstance(text, str) and text.encode() is not None, "a text")
_WITH_BUDGET = together(
    lambda params: params.thinking_token_budget is not None, "'' where thinking_token_budget is not given"
)
_FORM = Rule(lambda value: isinstance(value, StructuredOutputsParams), "StructuredOutputsParams", _as_python)
_TEXTS = _all(_is_text, "a text or a list of texts, none of them empty", _as_texts)
_TOKEN_IDS = _all(_is_token_id, "a list of one or more token ids >= 0, or None", is_filled=True)
_BIASES = _all(_is_bias, f"a dict of token ids >= 0 to numbers in -{MAX_BIAS}..{MAX_BIAS}", _as_pairs)
_EACH_TOKEN_ONCE = Rule(lambda pairs: len(dict(pairs)) == len(pairs), f"{_BIASES.allowed}, each token once")
_EXTRA_ARGS = _all(
    lambda pair: isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str),
    "a dict of names to values",
    lambda given: tuple(given.items()) if isinstance(given, Mapping) else _as_tuple(given),
)
_JSON = Rule(_is_text, "a JSON schema, as a dict, a string or a pydantic model", _as_schema_text)
_GRAMMAR = Rule(
    lambda text: _is_text(text) and not text.isspace() and len(text) <= MAX_GRAMMAR_CHARACTERS,
    f"the text of a grammar, at most {MAX_GRAMMAR_CHARACTERS} characters",
)
_CHOICES = (
    Rule(_are_texts, "a list of one or more texts, none of them empty", _as_choice),
    # A larger list would take minutes to compile, or gigabytes.
    Rule(lambda texts: len(texts) <= MAX_CHOICES, lambda texts: f"at most {MAX_CHOICES} texts; there are {len(texts)}"),
    Rule(
        lambda texts: max(_sizes(texts)) <= MAX_CHOICE_BYTES and sum(_sizes(texts)) <= MAX_CHOICES_BYTES,
        lambda texts: (
            f"at most {MAX_CHOICES} texts of up to {MAX_CHOICE_BYTES} bytes, {MAX_CHOICES_BYTES} bytes together; "
            f"the longest has {max(_sizes(texts))} bytes, and all have {sum(_sizes(texts))}"
        ),
    ),
)


@explains_unknown_options(HINTS["StructuredOutputsParams"])
@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """The form that a completion must have: exactly one of json, regex, choice and grammar.

    Raises:
        ValueError: none or several of these, or a value of the wrong kind. Whether the schema, expression or grammar
            can be enforced is checked when the request is added.
        TypeError: an unknown keyword; the message names the nearest known one.
    """

    # A JSON schema: dict, text or pydantic model; kept as text, so that it can be hashed.
    json: str | dict[str, Any] | type | None = option(None, _JSON)
    # That the whole completion matches; \d is 0-9, \w and \s are Unicode's.
    regex: str | None = option(None, Rule(_is_text, "a regular expression"))
    choice: Collection[str] | None = option(None, *_CHOICES)  # texts; the completion is one of them
    grammar: str | None = option(None, _GRAMMAR)  # in Lark's form, whose start is `start`, or in GBNF, whose is `root`
    # With json: of the whitespace between its parts; bound its length.
    whitespace_pattern: str | None = option(
        None,
        Rule(lambda text: isinstance(text, str) and text.encode() is not None, "a regular expression, or None"),
        together(lambda form: form.json is not None, "None where json is not given"),
    )
    # With json: objects that do not say whether they take other keys than their properties do so, as in the standard.
    additional_properties: bool = option(
        False, _FLAG, together(lambda form: form.json is not None, "False where json is not given")
    )

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            kinds = f"{', '.join(FORMS[:-1])} and {FORMS[-1]}"
            raise ValueError(f"structured_outputs: give exactly one of {kinds}, not {given or 'none'}")
        check_rules(self)


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

    # Divides the logits; 0 is greedy.
    temperature: float = option(1.0, _number(0, MAX_FLOAT, f"0 (greedy), or a {_FINITE}, as float32 can hold"))
    # Most completion tokens; None: up to the engine's longest sequence.
    max_tokens: int | None = option(64, _integer(1, MAX_INT32, "an integer in 1..2**31 - 1, or None", none=True))
    ignore_eos: bool = option(False, _FLAG)
    # Makes the tokens reproducible whatever else is in the batch; None: of the engine's seed.
    seed: int | None = option(None, _integer(0, MAX_SEED, "None or an integer in 0..2**63 - 1"))
    top_k: int = option(0, _TOP_K)  # sample from the k likeliest tokens; 0 or -1 is all
    # Sample from the likeliest tokens whose probabilities together reach top_p.
    top_p: float = option(1.0, _number(MIN_FLOAT, 1, f"a number in {MIN_FLOAT:.2g}..1"))
    # Leave out tokens less likely than min_p times the likeliest.
    min_p: float = option(0.0, _number(0, 1, "a number in 0..1 that float32 can hold"))
    # Completion tokens before anything may end it.
    min_tokens: int = option(0, _integer(0, MAX_INT32, "an integer in 0..2**31 - 1"), _UP_TO_MAX_TOKENS)
    stop: Collection[str] = option((), _TEXTS)  # texts that end the completion where they first appear
    include_stop_str_in_output: bool = option(False, _FLAG)
    # Tokens that end it, besides the end-of-sequence tokens.
    stop_token_ids: Collection[int] = option((), _all(_is_token_id, "a list of token ids >= 0"))
    # Samples; they share the prompt's full KV cache blocks.
    n: int = option(1, _integer(1, MAX_N, f"an integer in 1..{MAX_N}"))
    # Log-probabilities of each completion token and the k likeliest, before any edit.
    logprobs: int | None = option(None, _LOGPROBS)
    # Tokens whose log-probabilities are added to those of logprobs.
    logprob_token_ids: Collection[int] | None = option(None, _TOKEN_IDS, _WITH_LOGPROBS)
    prompt_logprobs: int | None = option(None, _LOGPROBS)  # as logprobs, for each prompt token except the first
    # Index of the first prompt token that gets them; from the prompt's end if negative.
    prompt_logprobs_start: int = option(0, _INDEX, _WITH_PROMPT_LOGPROBS)
    presence_penalty: float = option(0.0, _PENALTY)  # subtracted from the logits of tokens that are in the completion
    frequency_penalty: float = option(0.0, _PENALTY)  # the same, times the number of occurrences
    # Of tokens in prompt or completion (arXiv:1909.05858); 1 changes nothing.
    repetition_penalty: float = option(1.0, _number(MIN_FLOAT, MAX_FLOAT, f"a {_FINITE} (1 is none)"))
    skip_special_tokens: bool = option(True, _FLAG)  # leave them out of the text
    # The form that the completion must have; of a model that thinks, what follows the thinking.
    structured_outputs: StructuredOutputsParams | None = option(None, _FORM)
    # Most tokens that a model thinks: then the tag that ends its thinking is forced. 0 is no thinking; None no limit.
    thinking_token_budget: int | None = option(
        None, _integer(0, MAX_INT32, "an integer in 0..2**31 - 1, or None", none=True)
    )
    thinking_end_text: str = option("", _END_TEXT, _WITH_BUDGET)  # forced before that tag
    # Token id -> number; kept as pairs.
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = option((), _BIASES, _EACH_TOKEN_ONCE)
    allowed_token_ids: Collection[int] | None = option(None, _TOKEN_IDS)  # the only tokens that may be sampled
    bad_words: Collection[str] = option((), _TEXTS)  # texts that must not be generated
    # For the engine's features: name -> what to ask of it; kept as pairs.
    extra_args: Mapping[str, Any] | tuple[tuple[str, Any], ...] = option((), _EXTRA_ARGS)

    def __post_init__(self) -> None:
        check_rules(self)

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
        return self.draws_plainly and not reports and not self.extra_args

    @cached_property
    def draws_plainly(self) -> bool:
        """True if tokens are drawn as for a plain request; log-probabilities may be reported."""
        edits = self.penalizes or self.edits_logits or self.min_tokens or self.structured_outputs is not None
        return not (self.truncates or edits)


def misplaced_option(name: str, value: object) -> str:
    """Where an option of SamplingParams belongs that was given to a method; "" for any other name."""
    is_option = name in SamplingParams.__dataclass_fields__
    return f"pass sampling_params=SamplingParams({name}={quoted(value)})" if is_option else ""
