"""Seed-OSS's answers: Qwen's XML between tags of its own.

    <seed:think>What I think.</seed:think>
    <seed:tool_call>
    <function=look>
    <parameter=city>Rome</parameter>
    </function>
    </seed:tool_call>

With a thinking_budget the model also writes how much of it is left, between <seed:cot_budget_reflect> and
</seed:cot_budget_reflect>. That is a part of what it thinks.
"""

from collections.abc import Iterable
from typing import Any

from nanovllm.engine.text.formats.format import AnswerReader, ConversationFormat
from nanovllm.engine.text.formats.qwen_xml import xml_calls
from nanovllm.engine.text.formats.tag_reader import TagReader

THINKING = ("<seed:think>", "</seed:think>")
_OPENING, _CLOSING = "<seed:tool_call>", "</seed:tool_call>"
SEED_CALLS = xml_calls(_OPENING, _CLOSING)


class SeedOss(ConversationFormat):
    name = "seed_oss"
    thinking = THINKING
    tags = (*THINKING, _OPENING, _CLOSING)

    def reader(self, tools: Iterable[Any] | None = None, is_open: bool = False) -> AnswerReader:
        return TagReader((THINKING,), (SEED_CALLS,), tools, is_open)

    def is_named_by(self, template: str) -> bool:
        return _OPENING in template or THINKING[0] in template

    def is_known_by(self, tokens: set[str]) -> bool:
        return {*THINKING} <= tokens
