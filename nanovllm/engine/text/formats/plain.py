"""No format: an answer is content as written."""

from collections.abc import Iterable
from typing import Any

from nanovllm.engine.text.formats.format import AnswerReader, ConversationFormat
from nanovllm.engine.text.formats.tag_reader import TagReader


class Plain(ConversationFormat):
    name = "plain"

    def reader(self, tools: Iterable[Any] | None = None, is_open: bool = False) -> AnswerReader:
        return TagReader((), (), tools, is_open=False)
