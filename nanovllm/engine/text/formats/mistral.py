"""Mistral's answers: [THINK]...[/THINK], and two ways to call.

    [TOOL_CALLS]look[ARGS]{"city": "Rome"}
    [TOOL_CALLS][{"name": "look", "arguments": {"city": "Rome"}}]

The first may have [CALL_ID] and an id before [ARGS], or no [ARGS]. The second is that of older models.
"""

import re
from collections.abc import Iterable
from typing import Any

from nanovllm.engine.text.formats.argument_types import ArgumentTypes
from nanovllm.engine.text.formats.format import AnswerReader, ConversationFormat
from nanovllm.engine.text.formats.json_end import INCOMPLETE, MAY_END_JSON, WRONG, JsonEnd, parse, read_call
from nanovllm.engine.text.formats.tag_reader import CallForm, CallScanner, NamedCall, Scan, TagReader

THINKING = ("[THINK]", "[/THINK]")
CALLS, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_MAX_HEAD = 512  # characters before the arguments
_HEAD_CHARACTERS = re.compile(r"[\w.\-/:\s\[\]]*")
_HEAD = re.compile(rf"\s*([\w.\-/:]+)\s*(?:{re.escape(ID)}\s*[\w\-]*\s*)?(?:{re.escape(ARGUMENTS)}\s*)?")
_NO_CALL = Scan(len(CALLS), [])


class _Calls(CallScanner):
    def __init__(self, types: ArgumentTypes):
        self._json: JsonEnd | None = None
        self._name: str | None = None
        self._start = 0  # of the JSON

    def scan(self, text: str, is_last: bool) -> Scan | None:
        if self._json is None:
            if not (rest := text[len(CALLS) :].lstrip()):
                return _NO_CALL if is_last else None
            self._start = len(text) - len(rest)
            if rest[0] not in "[{":
                head = _HEAD_CHARACTERS.match(rest)[0]  # type: ignore[index]
                if head == rest and not is_last and len(rest) <= _MAX_HEAD:
                    return None
                match = _HEAD.fullmatch(head)
                if match is None or not rest.startswith("{", len(head)):
                    return _NO_CALL
                self._name = match[1]
                self._start += len(head)
            self._json = JsonEnd(self._start)
        end = self._json.find(text)
        if end == INCOMPLETE and not is_last:
            self.awaited = MAY_END_JSON
            return None
        calls = [] if end in (INCOMPLETE, WRONG) else self._calls(parse(text[self._start : end]))
        return Scan(end, calls) if calls else _NO_CALL

    def _calls(self, found: Any) -> list[NamedCall]:
        """None if one of them is none."""
        if self._name is not None:
            return [(self._name, found)] if isinstance(found, dict) else []
        calls = [read_call(each) for each in (found if isinstance(found, list) else [found])]
        return [call for call in calls if call is not None] if None not in calls else []


BRACKET_CALLS = CallForm((CALLS,), _Calls)


class Mistral(ConversationFormat):
    name = "mistral"
    thinking = THINKING
    tags = (*THINKING, CALLS, ID, ARGUMENTS)

    def reader(self, tools: Iterable[Any] | None = None, is_open: bool = False) -> AnswerReader:
        return TagReader((THINKING,), (BRACKET_CALLS,), tools, is_open)

    def is_named_by(self, template: str) -> bool:
        return CALLS in template or THINKING[0] in template

    def is_known_by(self, tokens: set[str]) -> bool:
        return CALLS in tokens or {*THINKING} <= tokens
