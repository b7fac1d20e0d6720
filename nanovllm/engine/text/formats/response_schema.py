"""The format that a tokenizer describes itself, read by transformers' parse_response when the answer is whole."""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.engine.text.formats.format import CALL, CONTENT, REASONING, AnswerReader, ConversationFormat, Event
from nanovllm.engine.text.formats.json_end import read_call

_THINKING = ("reasoning_content", "thinking", "reasoning")  # what schemas call it


def response_schema(tokenizer: Any) -> Any:
    """What a tokenizer has for parse_response: `response_schema` in transformers 5.0 to 5.12, `response_template`
    since. None if it has none, or transformers cannot read it."""
    if not hasattr(tokenizer, "parse_response"):
        return None
    return getattr(tokenizer, "response_template", None) or getattr(tokenizer, "response_schema", None)


class _Reader(AnswerReader):
    """The texts of its events are not all that the model wrote: a schema does not tell what belongs to what."""

    def __init__(self, tokenizer: Any, tools: Iterable[Any] | None, prefix: str):
        """prefix: the end of the prompt that the schema has to know."""
        self._tokenizer, self._prefix = tokenizer, prefix
        self._tools = None if tools is None else list(tools)
        self._pieces: list[str] = []

    def push(self, text: str, is_last: bool = False) -> list[Event]:
        self._pieces.append(text)
        return self._read("".join(self._pieces)) if is_last else []

    def _read(self, text: str) -> list[Event]:
        as_written = [Event(CONTENT, text, text)]
        options: dict[str, Any] = {"prefix": self._prefix, "tools": self._tools}
        known = inspect.signature(self._tokenizer.parse_response).parameters
        try:
            found = self._tokenizer.parse_response(text, **{key: options[key] for key in options if key in known})
        except Exception:  # The library's own, of an answer that does not fit the schema.
            return as_written
        if not isinstance(found, Mapping):
            return as_written
        reasoning = next((found[key] for key in _THINKING if isinstance(found.get(key), str)), None)
        content = found.get("content") if isinstance(found.get("content"), str) else ""
        calls = [read_call(each.get("function", each)) for each in found.get("tool_calls") or ()]
        if None in calls:
            return as_written
        if calls and self._tools is None:
            content, calls = (text.partition(reasoning)[2] if reasoning else text), []
        self.has_reasoning = reasoning is not None
        events = [Event(REASONING, reasoning, reasoning)] if reasoning else []
        events += [Event(CONTENT, content, content)] if content else []
        return [*events, *(Event(CALL, "", "", *call) for call in calls if call is not None)]


class ResponseSchema(ConversationFormat):
    name = "response_schema"

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        template = getattr(tokenizer, "response_template", None)
        fields = template.get("fields") if isinstance(template, Mapping) else None
        named = [fields.get(key) for key in _THINKING] if isinstance(fields, Mapping) else []
        pairs = [(each.get("open"), each.get("close")) for each in named if isinstance(each, Mapping)]
        self.thinking = next(((a, b) for a, b in pairs if isinstance(a, str) and isinstance(b, str)), None)

    def reader(self, tools: Iterable[Any] | None = None, is_open: bool = False) -> AnswerReader:
        prefix = self.thinking[0] if is_open and self.thinking is not None else ""
        return _Reader(self._tokenizer, tools, prefix)
