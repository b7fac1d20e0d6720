"""Structured outputs: which tokens a JSON schema, a regular expression, a list of choices or a grammar allows next."""

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from nanovllm.engine.features.logits.json_schema import as_meant
from nanovllm.layers.sampling.token_masks import pack_mask
from nanovllm.sampling_params import FORMS, StructuredOutputsParams
from nanovllm.utils.checks import quoted, shortened
from nanovllm.utils.sized_cache import SizedCache

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Compiled forms that are kept for later requests. A schema takes up to about 100 ms to compile, 100,000 choices some
# seconds. Measured: 80 to 100 KB each, and 20 to 40 bytes for each byte of the library's source.
_MAX_COMPILED_BYTES = 2**28
_BYTES_EACH, _BYTES_PER_SOURCE_BYTE = 100_000, 40
# A compiled form remembers the states in which it was, all copies together: up to 7 KB for a token of a long list of
# choices. It is compiled again when its requests have read so many tokens.
_MAX_TOKENS_READ = 50_000
# What the library may spend on a form before its first token. Its own limit is the first number, which a list of 50,000
# texts exceeds.
_FUEL, _FUEL_PER_SOURCE_BYTE = 1_000_000, 16

# Instead of the library's message, which names an option of its own.
_ONE_OF = (
    "oneOf: schemas of which exactly one may fit must exclude each other plainly, such as by a property with another "
    "const in each; use anyOf, where several may fit"
)


class _Compiled:
    """A form's grammar before its first token, which the requests that follow it copy.

    Attributes:
        num_tokens_read: by all copies.
    """

    def __init__(self, matcher: "LLMatcher", num_bytes: int):
        self.matcher = matcher
        self.num_bytes = num_bytes
        self.num_tokens_read = 0


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
        self._formats: dict[str, bool] = {}  # of JSON schemas: whether the library knows them
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos)
        except Exception as error:
            raise ValueError(f"structured_outputs: llguidance cannot use this tokenizer: {error}") from error
        is_end = np.zeros(vocab_size, bool)
        is_end[eos] = True
        self.without_ends = ~pack_mask(is_end)
        self._compiled: SizedCache[StructuredOutputsParams, _Compiled] = SizedCache(
            self._compile, lambda form, compiled: compiled.num_bytes, _MAX_COMPILED_BYTES
        )

    def start(self, form: StructuredOutputsParams) -> "Grammar":
        """The form's grammar before its first token. Raises ValueError if it cannot be enforced."""
        compiled = self._compiled.get(form)
        if compiled.num_tokens_read > _MAX_TOKENS_READ:
            self._compiled.drop(form)
            compiled = self._compiled.get(form)
        return Grammar(self, compiled)

    def _compile(self, form: StructuredOutputsParams) -> _Compiled:
        what = next(name for name in FORMS if getattr(form, name) is not None)
        fault: object = None
        try:
            source = self._source(form)
            limits = self._llguidance.LLParserLimits(
                initial_lexer_fuel=_FUEL + _FUEL_PER_SOURCE_BYTE * len(source), max_lexer_states=2**31
            )
            matcher = self._llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
            compiled = _Compiled(matcher, _BYTES_EACH + _BYTES_PER_SOURCE_BYTE * len(source))
            if matcher.is_error():
                fault = matcher.get_error().strip()
            elif self._is_stuck_at_start(compiled):
                fault = "no text has this form"
        except ValueError as error:
            fault = error
        if fault is not None:
            text = _ONE_OF if "coerce_one_of" in str(fault) else shortened(fault)
            raise ValueError(f"{what}={quoted(getattr(form, what))}: cannot be enforced: {text}")
        return compiled

    def _is_stuck_at_start(self, compiled: _Compiled) -> bool:
        grammar = Grammar(self, compiled)
        bitmask = np.zeros((1, len(self.without_ends)), np.int32)
        self.fill_masks([(grammar, 0)], bitmask)
        return grammar.is_stuck(bitmask[0])

    def _source(self, form: StructuredOutputsParams) -> str:
        matcher_class: Any = self._llguidance.LLMatcher
        if form.json is not None:
            schema = as_meant(json.loads(cast(str, form.json)), self._is_known_format, form.additional_properties)
            text = json.dumps(schema, ensure_ascii=False)
            if form.whitespace_pattern is None:
                return matcher_class.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
            options = {"whitespace_flexible": True, "whitespace_pattern": form.whitespace_pattern}
            return matcher_class.grammar_from_json_schema(text, overrides=options)
        if form.regex is not None:
            regex = self._llguidance.regex_to_lark(form.regex, use_ascii="d")
            return matcher_class.grammar_from_lark(f"start: /{regex}/")
        if form.grammar is not None:
            return matcher_class.grammar_from_lark(self._as_lark(form.grammar))
        # Lark writes strings as JSON does, except that DEL must be escaped. In capitals it is one terminal: the parser
        # would follow 2,000 at most.
        texts = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f") for text in form.choice or ())
        return matcher_class.grammar_from_lark(f"start: CHOICE\nCHOICE: {' | '.join(texts)}")

    def _is_known_format(self, name: str) -> bool:
        """Whether the library knows a `format` of texts."""
        if name not in self._formats:
            text = json.dumps({"type": "string", "format": name})
            matcher_class: Any = self._llguidance.LLMatcher
            fault = matcher_class.validate_grammar(matcher_class.grammar_from_json_schema(text), None)
            self._formats[name] = not fault.startswith("Unknown format")
        return self._formats[name]

    def _as_lark(self, grammar: str) -> str:
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            return any_to_lark(grammar)
        except Exception as error:  # Its own classes, and Exception itself.
            raise ValueError(f"is neither Lark nor GBNF: {error}") from error

    def fill_masks(self, grammars: list[tuple["Grammar", int]], bitmask: np.ndarray) -> None:
        """Write the tokens that grammars allow next, in parallel: each into its row of the int32 bitmask
        [.., num_mask_words]."""
        work = [(grammar.matcher, row) for grammar, row in grammars]
        self._llguidance.numpy.fill_next_token_bitmask_par(self._executor, work, bitmask)


class Grammar:
    """A form that a completion follows, and its state."""

    def __init__(self, grammars: Grammars, compiled: _Compiled):
        self.grammars = grammars
        self._compiled = compiled
        self._num_tokens = 0

    @cached_property
    def matcher(self) -> "LLMatcher":
        """Its own state, made when its sequence runs, because thousands may be waiting."""
        return self._compiled.matcher.deep_copy()

    def is_stuck(self, mask: np.ndarray) -> bool:
        """Whether nothing can follow, and what there is does not have the form. mask: the row of `fill_masks`. The
        library allows an end then."""
        return not (mask & self.grammars.without_ends).any() and not self.matcher.is_accepting()

    def num_valid(self, token_ids: Sequence[int], num_tokens: int, proposed: list[int]) -> int:
        """How many of the proposed tokens may follow the completion, the last num_tokens of token_ids."""
        return 0 if self.advance(token_ids, num_tokens) else self.matcher.validate_tokens(proposed)

    def rewind(self, num_tokens: int) -> None:
        """Forget the last num_tokens that were read."""
        self._num_tokens -= num_tokens
        self.matcher.rollback(num_tokens)

    def advance(self, token_ids: Sequence[int], num_tokens: int) -> str | None:
        """Read what is new in the completion, the last num_tokens of token_ids. Returns what went wrong, if anything:
        from then on only an end-of-sequence token is allowed."""
        new = num_tokens - self._num_tokens
        if new > 0:
            self._num_tokens = num_tokens
            self._compiled.num_tokens_read += new
            self.matcher.consume_tokens(list(token_ids[-new:]))
        return self.matcher.get_error().splitlines()[0] if self.matcher.is_error() else None
