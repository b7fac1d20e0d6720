"""SamplingParams: everything a request may ask for, checked where it is made."""

import json
import sys
from dataclasses import dataclass
from typing import Any

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class StructuredOutputsParams:
    """What a completion has to look like; exactly one of the three.

    Attributes:
        json: a JSON schema, as a dict or as its text, which it becomes.
        regex: a regular expression that the whole completion matches.
        choice: the texts that it may be.

    Raises:
        ValueError: none of them or several, or a value of the wrong kind. Whether the schema or the expression itself
            can be used is checked when the request is added, by the library that enforces it.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None

    def __post_init__(self):
        given = [name for name in ("json", "regex", "choice") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"structured_outputs: give exactly one of json, regex and choice, not {given or 'none'}")
        if self.json is not None:
            _require("json", self.json, isinstance(self.json, str | dict), "a JSON schema, as a dict or a string")
            try:
                text = self.json if isinstance(self.json, str) else json.dumps(self.json)
                json.loads(text)
            except (TypeError, ValueError) as error:
                raise ValueError(f"json={self.json!r}: is not JSON: {error}") from None
            object.__setattr__(self, "json", text)  # hashable, as all of a SamplingParams is
        if self.regex is not None:
            _require("regex", self.regex, isinstance(self.regex, str) and self.regex != "", "a regular expression")
        if self.choice is not None:
            texts = _as_tuple(self.choice)
            ok = isinstance(texts, tuple) and texts != () and all(isinstance(t, str) and t for t in texts)
            ok = ok and not isinstance(self.choice, str)
            _require("choice", self.choice, ok, "a list of one or more texts, none of them empty")
            object.__setattr__(self, "choice", texts)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request is sampled and when it ends. Names and meanings are vLLM's.

    Immutable, so that one object can serve many requests; `dataclasses.replace` makes a changed copy. Logits pass
    through the penalties, then temperature, top_k, top_p and min_p, each as transformers defines it.

    Attributes:
        temperature: divides the logits before the softmax; 0 is greedy. Finite and >= 0.
        top_k: draw among the k likeliest tokens; 0 or -1 is all of them.
        top_p: draw among the likeliest tokens whose probabilities together reach top_p, the one that crosses it
            included, in (0, 1].
        min_p: leave out tokens less likely than min_p times the likeliest, in 0..1.
        max_tokens: completion tokens at most, >= 1; None goes on to the engine's longest sequence, which may end a
            completion earlier in any case.
        min_tokens: completion tokens before an end-of-sequence token or one of stop_token_ids may be drawn, or one of
            stop be completed, >= 0.
        seed: makes this request's draws reproducible, whatever else is in the batch, in 0..2**63 - 1; None draws from
            the engine's own seed.
        stop: texts that end the completion where they first appear; one text, or a list of them.
        include_stop_str_in_output: keep that text at the end of the completion's.
        stop_token_ids: tokens that end the completion, besides the model's end-of-sequence tokens.
        ignore_eos: go on past end-of-sequence tokens (benchmarks use this).
        n: completions of the prompt, each drawn on its own, >= 1. Their prompt's full KV cache blocks are shared.
        logprobs: for each completion token its log-probability and those of the k likeliest, 0..20; None for none. They
            are the model's own: before penalties, temperature and truncation.
        prompt_logprobs: the same for each prompt token but the first.
        presence_penalty: subtracted from the logits of tokens that the completion holds already, in -2..2.
        frequency_penalty: the same, times how often it holds them, in -2..2.
        repetition_penalty: divides the positive and multiplies the negative logits of tokens that prompt or completion
            hold already, > 0; 1 is none (arXiv:1909.05858).
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: a form that the completion has to follow.

    Raises:
        ValueError: a value out of range, with the field, the value and what is allowed.
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

    def __post_init__(self):
        self._normalize()
        check = self._check
        check("temperature", _is_number(self.temperature, 0, sys.float_info.max), "a finite number >= 0 (0 is greedy)")
        check("max_tokens", self.max_tokens is None or _is_int(self.max_tokens, 1), "an integer >= 1, or None")
        check("seed", self.seed is None or _is_int(self.seed, 0, MAX_SEED), "None or an integer in 0..2**63 - 1")
        check("top_k", _is_int(self.top_k, 0, 2**31 - 1), "an integer >= 1, or 0 or -1 for all tokens")
        check("top_p", _is_number(self.top_p, 0, 1) and self.top_p > 0, "a number in (0, 1]")
        check("min_p", _is_number(self.min_p, 0, 1), "a number in 0..1")
        check("min_tokens", _is_int(self.min_tokens, 0), "an integer >= 0")
        if self.max_tokens is not None:
            check("min_tokens", self.min_tokens <= self.max_tokens, f"at most max_tokens, {self.max_tokens}")
        stop, stop_token_ids = self.stop, self.stop_token_ids
        ok = isinstance(stop, tuple) and all(isinstance(s, str) and s for s in stop)
        check("stop", ok, "a text or a list of texts, none of them empty")
        ok = isinstance(stop_token_ids, tuple) and all(_is_int(t, 0, 2**31 - 1) for t in stop_token_ids)
        check("stop_token_ids", ok, "a list of token ids >= 0")
        check("n", _is_int(self.n, 1), "an integer >= 1")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(name, value is None or _is_int(value, 0, MAX_LOGPROBS), f"None or an integer in 0..{MAX_LOGPROBS}")
        for name in ("presence_penalty", "frequency_penalty"):
            check(name, _is_number(getattr(self, name), -2, 2), "a number in -2..2")
        positive = _is_number(self.repetition_penalty, 0, sys.float_info.max) and self.repetition_penalty > 0
        check("repetition_penalty", positive, "a finite number > 0 (1 is none)")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check(name, isinstance(getattr(self, name), bool), "True or False")
        form = self.structured_outputs
        check(
            "structured_outputs", form is None or isinstance(form, StructuredOutputsParams), "StructuredOutputsParams"
        )

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
    def is_plain(self) -> bool:
        """Whether drawing takes the logits, the temperature and the seed alone."""
        return not (
            self.truncates
            or self.penalizes
            or self.min_tokens
            or self.logprobs is not None
            or self.prompt_logprobs is not None
            or self.structured_outputs is not None
        )

    def _normalize(self) -> None:
        """One spelling of what has several, so that nobody else needs to know them all."""
        if self.top_k == -1 and _is_int(self.top_k):
            object.__setattr__(self, "top_k", 0)
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple(self.stop_token_ids))

    def _check(self, name: str, ok: bool, allowed: str) -> None:
        _require(name, getattr(self, name), ok, allowed)


def _require(name: str, value, ok: bool, allowed: str) -> None:
    if not ok:
        raise ValueError(f"{name}={value!r}: must be {allowed}")


def _as_tuple(values):
    """None is empty; what is not iterable stays what it is, for the checks to name."""
    try:
        return () if values is None else tuple(values)
    except TypeError:
        return values


def _is_int(value, low: int = -(2**63), high: int = MAX_SEED) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
