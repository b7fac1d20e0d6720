"""Reads a text of which nobody says what format it has: by the tags that it has."""

from collections.abc import Iterable
from typing import Any

from nanovllm.engine.text.formats import gemma4, mistral, seed_oss, think
from nanovllm.engine.text.formats.format import AnswerReader, ConversationFormat, Event
from nanovllm.engine.text.formats.harmony import CHANNEL_CALLS, HarmonyReader, begins_harmony
from nanovllm.engine.text.formats.hermes import JSON_CALLS
from nanovllm.engine.text.formats.qwen_xml import XML_CALLS
from nanovllm.engine.text.formats.tag_reader import TagReader

_THINKING = (think.THINKING, mistral.THINKING, gemma4.THINKING, seed_oss.THINKING)
# Llama's calls have no tags: JSON may be an answer.
_CALLS = (XML_CALLS, seed_oss.SEED_CALLS, JSON_CALLS, mistral.BRACKET_CALLS, gemma4.NAMED_CALL, CHANNEL_CALLS)


class _Reader(AnswerReader):
    def __init__(self, tools: Iterable[Any] | None, is_open: bool):
        self._tools = None if tools is None else list(tools)
        self._held = ""
        self._reader: AnswerReader | None = None
        self.has_reasoning = is_open
        if is_open:
            self._reader = self._by_tags(is_open)

    def _by_tags(self, is_open: bool) -> AnswerReader:
        return TagReader(_THINKING, _CALLS, self._tools, is_open, {gemma4.THINKING[0]: gemma4.TITLE})

    def push(self, text: str, is_last: bool = False) -> list[Event]:
        if self._reader is None:
            self._held += text
            is_harmony = begins_harmony(self._held)
            if is_harmony is None and not is_last:
                return []
            text = self._held
            self._reader = HarmonyReader(self._tools, is_open=False) if is_harmony else self._by_tags(is_open=False)
        events = self._reader.push(text, is_last)
        self.has_reasoning = self._reader.has_reasoning
        return events


class ByTags(ConversationFormat):
    name = "by_tags"

    def reader(self, tools: Iterable[Any] | None = None, is_open: bool = False) -> AnswerReader:
        return _Reader(tools, is_open)
