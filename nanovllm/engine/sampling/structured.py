"""Structured outputs: which tokens a JSON schema, a regular expression or a list of choices allows next."""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from nanovllm.sampling_params import StructuredOutputsParams

_MAX_COMPILED = 256  # kept for later requests; a schema takes up to about 100 ms to compile


class Grammars:
    """Compiles forms for one tokenizer, with llguidance."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Iterable[int]):
        """vocab_size: the model's, which may be larger than the tokenizer's. eos: tokens that follow a complete form.

        Raises:
            ImportError: llguidance is not installed.
            ValueError: a tokenizer that llguidance cannot read, or no end-of-sequence token.
        """
        try:
            import llguidance
            import llguidance.hf
            import llguidance.numpy
        except ImportError as error:
            raise ImportError(f"structured_outputs need llguidance ({error}): pip install llguidance") from error
        eos = sorted(token for token in eos if token < vocab_size)
        if not eos:
            raise ValueError("structured_outputs: the model has no end-of-sequence token that would end them: set eos")
        self._llguidance = llguidance
        self._executor = llguidance.LLExecutor()
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos)
        except Exception as error:
            raise ValueError(f"structured_outputs: llguidance cannot use this tokenizer: {error}") from error
        self._compiled = lru_cache(_MAX_COMPILED)(self._compile)

    def start(self, form: StructuredOutputsParams) -> "Grammar":
        """The form's grammar before its first token. Raises ValueError if it cannot be enforced."""
        return Grammar(self, self._compiled(form))

    def _compile(self, form: StructuredOutputsParams) -> Any:
        what = next(name for name in ("json", "regex", "choice") if getattr(form, name) is not None)
        fault: object = None
        try:
            matcher = self._llguidance.LLMatcher(self._tokenizer, self._source(form), log_level=0)
            if matcher.is_error():
                fault = matcher.get_error().strip()
        except ValueError as error:
            fault = error
        if fault is not None:
            raise ValueError(f"{what}={getattr(form, what)!r}: cannot be enforced: {fault}")
        return matcher

    def _source(self, form: StructuredOutputsParams) -> str:
        matcher_class: Any = self._llguidance.LLMatcher
        if form.json is not None:
            if form.whitespace_pattern is None:
                return matcher_class.grammar_from_json_schema(form.json, defaults={"whitespace_flexible": False})
            options = {"whitespace_flexible": True, "whitespace_pattern": form.whitespace_pattern}
            return matcher_class.grammar_from_json_schema(form.json, overrides=options)
        if form.regex is not None:
            regex = self._llguidance.regex_to_lark(form.regex, use_ascii="d")
            return matcher_class.grammar_from_lark(f"start: /{regex}/")
        # Lark writes strings as JSON does, except that DEL must be escaped.
        texts = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in form.choice)
        return matcher_class.grammar_from_lark(f"start: {' | '.join(texts)}")

    def fill_masks(self, grammars: list[tuple["Grammar", int]], bitmask: np.ndarray) -> None:
        """Write the tokens that grammars allow next, in parallel: each into its row of the int32 bitmask
        [.., num_mask_words]."""
        work = [(grammar.matcher, row) for grammar, row in grammars]
        self._llguidance.numpy.fill_next_token_bitmask_par(self._executor, work, bitmask)


class Grammar:
    """A form that a completion follows, and its state."""

    def __init__(self, grammars: Grammars, compiled: Any):
        """compiled: llguidance's matcher before its first token, which several grammars copy."""
        self.grammars = grammars
        self._compiled = compiled
        self._num_tokens = 0

    @cached_property
    def matcher(self) -> Any:
        """Its own state, made when its sequence runs, because thousands may be waiting."""
        return self._compiled.deep_copy()

    def advance(self, token_ids: Sequence[int], num_tokens: int) -> str | None:
        """Read what is new in the completion, the last num_tokens of token_ids. Returns what went wrong, if anything:
        from then on only an end-of-sequence token is allowed."""
        new = num_tokens - self._num_tokens
        if new > 0:
            self._num_tokens = num_tokens
            self.matcher.consume_tokens(list(token_ids[-new:]))
        return self.matcher.get_error().splitlines()[0] if self.matcher.is_error() else None
