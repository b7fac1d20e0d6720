"""Tool calls: what a model asks for, taken out of the text of a chat's completion."""

from collections.abc import Iterable
from typing import Any

from nanovllm.engine.text.formats.format import CALL, ToolCall, tool_call
from nanovllm.engine.text.reasoning import Format, as_format


class ToolCallSplitter:
    """Takes the calls out of a completion's text as it comes.

    White space around calls belongs to no part. Text that may be the beginning of a call is held back until that is
    decided. What is no whole call stays a part of the text. So does what the model thinks, with drafts of calls in it.

        splitter = ToolCallSplitter(tools)
        for delta in llm.stream([prompt_token_ids], params):
            content, calls = splitter.push(delta["text"], delta["finish_reason"] is not None)
    """

    def __init__(self, tools: Iterable[Any] = (), format: Format = None):
        """
        Args:
            tools: schemas as in `chat`, whose types tell which arguments are no texts.
            format: as ReasoningSplitter's.
        """
        self._reader = as_format(format).reader(tools or (), is_open=False)

    def push(self, text: str, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """What a text adds to (content, calls). is_last: nothing comes after it. A call is
        {"type": "function", "function": {"name": ..., "arguments": {...}}}, as a message of a chat has it."""
        content, calls = "", []
        for event in self._reader.push(text, is_last):
            if event.kind != CALL:
                content += event.raw
            elif event.arguments is not None:
                calls.append(tool_call(event.name, event.arguments))
        return content, calls


def split_tool_calls(text: str, tools: Iterable[Any] = (), format: Format = None) -> tuple[str, list[ToolCall]]:
    """(content, calls) of a whole text. The arguments are ToolCallSplitter's."""
    return ToolCallSplitter(tools, format).push(text, is_last=True)
