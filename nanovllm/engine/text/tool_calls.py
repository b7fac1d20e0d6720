"""Tool calls: what a model asks for between <tool_call> and </tool_call>, taken out of the text of a chat's completion.

Two forms of what is between the tags are published. Qwen2.5 and Qwen3 write JSON: `{"name": ..., "arguments": {...}}`.
Qwen3-Coder, Qwen3.5 and Qwen3.6 write `<function=NAME>`, a `<parameter=KEY>` with its value for each argument, and
`</function>`.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # It needs torch.
    from nanovllm.engine.text.outputs import RequestOutput

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
_OF_JSON = {"integer", "number", "boolean", "object", "array", "null"}  # types whose values are no texts
_OF_PYTHON = {"True": True, "False": False, "None": None}  # as the templates write them

ToolCall = dict[str, Any]


class ToolCallSplitter:
    """Takes the calls out of a completion's text as it comes.

    White space around calls belongs to no part. Text that may be the beginning of a call is held back until that is
    decided. What is no whole call, or none of these forms, stays a part of the text.

        splitter = ToolCallSplitter(tools)
        for delta in llm.stream([prompt_token_ids], params):
            content, calls = splitter.push(delta["text"], delta["finish_reason"] is not None)
    """

    def __init__(self, tools: Iterable[Any] = ()):
        """tools: schemas as in `chat`, whose types tell which arguments are no texts."""
        self._types = {name: _types(function) for name, function in map(_function, tools) if name}
        self._held, self._is_after_call = "", False

    def push(self, text: str, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """What a text adds to (content, calls). is_last: nothing comes after it. A call is
        {"type": "function", "function": {"name": ..., "arguments": {...}}}, as a message of a chat has it."""
        self._held += text
        content, calls = "", []
        while True:
            if self._is_after_call:
                self._held = self._held.lstrip()
            before, opening, rest = self._held.partition(OPENING)
            inside, closing, after = rest.partition(CLOSING)
            if not closing:
                break
            call = self._read(inside.strip())
            self._held = after
            if call is None:
                content += before + opening + inside + closing
            else:
                content += before.rstrip()
                calls.append(call)
            self._is_after_call = call is not None
        num_free = len(self._held) if is_last else self._num_free()
        content += self._held[:num_free]
        self._held = self._held[num_free:]
        self._is_after_call &= num_free == 0
        return content, calls

    def _num_free(self) -> int:
        """How many of the first characters held are certainly content."""
        start = self._held.find(OPENING)
        if start < 0:
            start = len(self._held) - num_undecided(self._held, OPENING)
        return len(self._held[:start].rstrip())

    def _read(self, inside: str) -> ToolCall | None:
        """The call between two tags; None if it has neither form."""
        match = _FUNCTION.fullmatch(inside)
        if match is not None:
            name, types = match[1].strip(), self._types.get(match[1].strip(), {})
            arguments = {key: _value(text, types.get(key, set())) for key, text in _PARAMETER.findall(match[2])}
        else:
            try:
                found = json.loads(inside)
                name, arguments = found["name"], found.get("arguments") or {}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                return None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        return {"type": "function", "function": {"name": name, "arguments": arguments}}


def num_undecided(text: str, *tags: str) -> int:
    """Characters at the end of the text that may be the beginning of one of the tags."""
    counts = range(min(len(text), max(map(len, tags)) - 1), 0, -1)
    return next((n for n in counts if any(tag.startswith(text[-n:]) for tag in tags)), 0)


def split_tool_calls(text: str, tools: Iterable[Any] = ()) -> tuple[str, list[ToolCall]]:
    """(content, calls) of a whole text. tools: as ToolCallSplitter's."""
    return ToolCallSplitter(tools).push(text, is_last=True)


def add_tool_calls(output: "RequestOutput", tools: Iterable[Any]) -> None:
    """Give a chat's result and its samples the keys content and tool_calls. tools: as ToolCallSplitter's."""
    tools = list(tools)
    for sample in (output, *output.get("samples", ())):
        text = sample["content"] if "content" in sample else sample["text"]
        sample["content"], sample["tool_calls"] = (None, []) if text is None else split_tool_calls(text, tools)


def _function(tool: Any) -> tuple[str | None, Mapping[str, Any]]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
    function = function if isinstance(function, Mapping) else {}
    name = function.get("name")
    return (name if isinstance(name, str) else None), function


def _types(function: Mapping[str, Any]) -> dict[str, set[str]]:
    """{argument: the types of JSON that its schema names}"""
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return {key: set(_named(schema)) for key, schema in (properties or {}).items()}


def _named(schema: Any) -> Iterable[str]:
    if not isinstance(schema, Mapping):
        return []
    own = schema.get("type", [])
    others = (name for key in ("anyOf", "oneOf") for each in schema.get(key) or () for name in _named(each))
    return [*([own] if isinstance(own, str) else own), *others]


def _value(text: str, types: set[str]) -> Any:
    """An argument in the function form. What its schema does not say to be something else is a text."""
    if "string" in types or not types & _OF_JSON:
        return text
    if text in _OF_PYTHON:
        return _OF_PYTHON[text]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
