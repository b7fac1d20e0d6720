"""DeepSeek's way to think: `<think>What I think.</think>What I say.` Calls are not read."""

from collections.abc import Iterable
from typing import Any

from nanovllm.engine.text.formats.format import AnswerReader, ConversationFormat
from nanovllm.engine.text.formats.tag_reader import TagReader

THINKING = ("<think>", "</think>")


class Think(ConversationFormat):
    name = "think"
    thinking = THINKING
    tags = THINKING

    def reader(self, tools: Iterable[Any] | None = None, is_open: bool = False) -> AnswerReader:
        return TagReader((THINKING,), (), tools, is_open)

    def is_named_by(self, template: str) -> bool:
        return any(tag in template for tag in THINKING)

    def is_known_by(self, tokens: set[str]) -> bool:
        return {*THINKING} <= tokens
