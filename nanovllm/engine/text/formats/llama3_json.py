"""Llama 3's calls: an answer that is {"name": ..., "parameters": {...}}, after <|python_tag|> or without it. Several
follow each other with a semicolon."""

from collections.abc import Iterable
from typing import Any

from nanovllm.engine.text.formats.argument_types import ArgumentTypes
from nanovllm.engine.text.formats.format import AnswerReader, ConversationFormat
from nanovllm.engine.text.formats.json_end import INCOMPLETE, MAY_END_JSON, WRONG, JsonEnd, parse, read_call
from nanovllm.engine.text.formats.tag_reader import CallForm, CallScanner, NamedCall, Scan, TagReader

TAG = "<|python_tag|>"


class _Calls(CallScanner):
    """An answer may be JSON of another meaning. So all of it must be calls, and of known tools."""

    def __init__(self, types: ArgumentTypes):
        self._names = types.names
        self._calls: list[NamedCall] = []
        self._at = 0
        self._json: JsonEnd | None = None

    def scan(self, text: str, is_last: bool) -> Scan | None:
        tag_size = len(TAG) if text.startswith(TAG) else 0
        no_call = Scan(tag_size or 1, [])
        self._at = max(self._at, tag_size)
        while True:
            if self._json is None:
                rest = text[self._at :].lstrip(" \t\r\n;" if self._calls else None)
                if not rest and not is_last:
                    return None
                if not rest and self._calls:
                    return Scan(len(text), self._calls)
                if not rest.startswith("{"):
                    return no_call
                self._at = len(text) - len(rest)
                self._json = JsonEnd(self._at)
            end = self._json.find(text)
            if end == INCOMPLETE and not is_last:
                self.awaited = MAY_END_JSON
                return None
            self.awaited = frozenset()
            found = None if end in (INCOMPLETE, WRONG) else parse(text[self._at : end])
            call = read_call(found) if found and not found.keys().isdisjoint(("parameters", "arguments")) else None
            if call is None or (self._names and call[0] not in self._names):
                return no_call
            self._calls.append(call)
            self._at, self._json = end, None


class Llama3Json(ConversationFormat):
    name = "llama3_json"
    tags = (TAG,)

    def reader(self, tools: Iterable[Any] | None = None, is_open: bool = False) -> AnswerReader:
        return TagReader((), (CallForm((TAG,), _Calls), CallForm(("{",), _Calls, is_whole_answer=True)), tools, False)

    def is_named_by(self, template: str) -> bool:
        return "<|start_header_id|>" in template and (TAG in template or '"parameters": ' in template)
