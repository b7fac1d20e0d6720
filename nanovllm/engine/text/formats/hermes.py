"""Calls as JSON between <tool_call> and </tool_call>, as Hermes, Qwen2.5 and Qwen3 write them."""

from collections.abc import Iterable
from typing import Any

from nanovllm.engine.text.formats.argument_types import ArgumentTypes
from nanovllm.engine.text.formats.format import AnswerReader, ConversationFormat
from nanovllm.engine.text.formats.json_end import INCOMPLETE, MAY_END_JSON, WRONG, JsonEnd, parse, read_call
from nanovllm.engine.text.formats.tag_reader import CallForm, CallScanner, NamedCall, Scan, TagReader
from nanovllm.engine.text.formats.think import THINKING

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_NO_CALL = Scan(len(OPENING), [])


class _JsonCalls(CallScanner):
    def __init__(self, types: ArgumentTypes):
        self._calls: list[NamedCall] = []
        self._at = len(OPENING)  # of the next call, or what follows the last one
        self._json: JsonEnd | None = None

    def scan(self, text: str, is_last: bool) -> Scan | None:
        while True:
            if self._json is None:
                rest = text[self._at :].lstrip()
                start = len(text) - len(rest)
                if not rest.startswith("{"):
                    return self._end(rest, start, len(text), is_last)
                self._at, self._json = start, JsonEnd(start)
            end = self._json.find(text)
            if end == INCOMPLETE and not is_last:
                self.awaited = MAY_END_JSON
                return None
            self.awaited = frozenset()
            call = None if end in (INCOMPLETE, WRONG) else read_call(parse(text[self._at : end]))
            if call is None:
                return _NO_CALL
            self._calls.append(call)
            self._at, self._json = end, None

    def _end(self, rest: str, start: int, size: int, is_last: bool) -> Scan | None:
        """What a text is whose last part is no call. rest: that part, from `start` to `size`."""
        if self._calls and rest.startswith(CLOSING):
            return Scan(start + len(CLOSING), self._calls)
        if self._calls and rest.startswith(OPENING):  # The closing tag is missing.
            return Scan(self._at, self._calls)
        may_go_on = not rest or (self._calls and (CLOSING.startswith(rest) or OPENING.startswith(rest)))
        if may_go_on and not is_last:
            return None
        if self._calls and CLOSING.startswith(rest):
            return Scan(size, self._calls)
        if self._calls and OPENING.startswith(rest):
            return Scan(self._at, self._calls)
        return _NO_CALL


JSON_CALLS = CallForm((OPENING,), _JsonCalls)


class Hermes(ConversationFormat):
    name = "hermes"
    thinking = THINKING
    tags = (*THINKING, OPENING, CLOSING)

    def reader(self, tools: Iterable[Any] | None = None, is_open: bool = False) -> AnswerReader:
        return TagReader((THINKING,), (JSON_CALLS,), tools, is_open)

    def is_named_by(self, template: str) -> bool:
        return OPENING in template

    def is_known_by(self, tokens: set[str]) -> bool:
        return {OPENING, CLOSING} <= tokens
