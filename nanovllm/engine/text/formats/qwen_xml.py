"""Calls as Qwen3-Coder, Qwen3.5 and Qwen3.6 write them: <function=NAME> with a <parameter=KEY> for each argument.

    <tool_call>
    <function=look>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

Values are bare text, in which anything may stand. So a tag ends a value only where a call goes on behind it.
"""

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

from nanovllm.engine.text.formats.argument_types import ArgumentTypes
from nanovllm.engine.text.formats.format import AnswerReader, ConversationFormat
from nanovllm.engine.text.formats.hermes import CLOSING, JSON_CALLS, OPENING
from nanovllm.engine.text.formats.tag_reader import CallForm, CallScanner, Scan, TagReader
from nanovllm.engine.text.formats.think import THINKING

_FUNCTION, _END, _PARAMETER, _VALUE_END = "<function=", "</function>", "<parameter=", "</parameter>"
_PARAMETER_BEGINS = re.compile(rf"{_PARAMETER}([^>\n]+)>")
_LINE_BEGINS_PARAMETER = re.compile(rf"\n{_PARAMETER}[^>\n]+>")


class _Grammar:
    """What is found in a call between two tags, its opening and its closing one."""

    def __init__(self, opening: str, closing: str):
        self.opening, self.closing = opening, closing
        begins = rf"(?:{opening}\s*)?"
        self.head = re.compile(rf"{begins}{_FUNCTION}([^>\n]+)>\s*(?={_PARAMETER}[^>\n]+>|{_END})")
        # What comes of a head while it is not whole.
        self.head_begins = re.compile(rf"{begins}(?:{_FUNCTION}(?:[^>\n]+(?:>\s*(?:{_PARAMETER}[^>\n]*)?)?)?)?\Z")
        end_of_call = rf"{_END}\s*(?:{closing}|(?={opening}|{_FUNCTION}))"
        self.last_value_ends = re.compile(rf"{_VALUE_END}\s*(?:{end_of_call}|{closing})")
        self.nothing_ends = re.compile(end_of_call)
        # Where another call begins although a value of the one before has no end.
        call_begins = rf"{begins}{_FUNCTION}[^>\n]+>\s*(?:{_PARAMETER}|{_END})"
        self.next_call = re.compile(rf"{_END}\s*(?:{closing}\s*)?(?={call_begins})")


class _XmlCall(CallScanner):
    def __init__(self, grammar: _Grammar, types: ArgumentTypes):
        self._grammar, self._types = grammar, types
        self._name = ""
        self._start = 0  # of the parameters, once the head is known
        self._searched = 0

    def scan(self, text: str, is_last: bool) -> Scan | None:
        opening = self._grammar.opening
        no_call = Scan(len(opening) if text.startswith(opening) else len(_FUNCTION), [])
        if not self._start:
            head = self._grammar.head.match(text)
            if head is None:
                return None if not is_last and self._may_be_head(text) else no_call
            self._name, self._start = head[1].strip(), head.end()
            self._searched = self._start
            self.awaited = frozenset(">")  # of a tag
        found = self._find_end(text, is_last)
        if found is None:
            return no_call if is_last else None
        inside, end = found
        arguments = self._arguments(text[self._start : inside])
        return no_call if arguments is None else Scan(end, [(self._name, arguments)])

    def _find_end(self, text: str, is_last: bool) -> tuple[int, int] | None:
        """Where the parameters of the call end, and the call. None if that is open."""
        closing = self._grammar.closing
        if text.startswith(_END, self._start):  # It has none.
            match = self._grammar.nothing_ends.match(text, self._start)
            if match is not None:
                return self._start, match.end()
        else:
            match = self._grammar.last_value_ends.search(text, self._searched)
            if match is None:
                last = text.rfind(_VALUE_END, self._searched)
                self._searched = last if last >= 0 else max(self._searched, len(text) - len(_VALUE_END) + 1)
        if match is None and not is_last:
            return None
        # A value without an end has swallowed what follows.
        other = self._grammar.next_call.search(text, self._start, len(text) if match is None else match.start())
        if other is not None:
            return other.start(), other.end()
        if match is not None:
            return match.start() + len(_VALUE_END), match.end()
        inside = text.rfind(_END, self._start)
        if inside < 0:
            return None
        end = inside + len(_END)
        rest = text[end:].lstrip()
        if rest.startswith(closing):
            return inside, len(text) - len(rest) + len(closing)
        return inside, len(text) if closing.startswith(rest) else end

    def _may_be_head(self, text: str) -> bool:
        """Whether more text may make a head of it."""
        if self._grammar.head_begins.match(text):
            return True
        opening = self._grammar.opening
        rest = text.removeprefix(opening).lstrip() if text.startswith(opening) else text
        name, bracket, after = rest.partition(">")
        if not bracket:
            return _FUNCTION.startswith(rest)
        after = after.lstrip()
        return name.startswith(_FUNCTION) and (_PARAMETER.startswith(after) or _END.startswith(after))

    def _arguments(self, text: str) -> dict[str, Any] | None:
        """The arguments of all parameters; None if they cannot be told apart for sure."""
        arguments: dict[str, Any] = {}
        at = 0
        while at < len(text):
            match = _PARAMETER_BEGINS.match(text, at)
            if match is None or match[1].strip() in arguments:
                return None
            key = match[1].strip()
            end, at = _value_end(text, match.end())
            value = text[match.end() : end].removeprefix("\n").removesuffix("\n")
            arguments[key] = self._types.value(self._name, key, value)
            at += len(text[at:]) - len(text[at:].lstrip())
        return arguments


def _value_end(text: str, start: int) -> tuple[int, int]:
    """Where the value ends that begins at `start`, and where the text goes on behind its tag."""
    first: int | None = None
    at = start
    while (end := text.find(_VALUE_END, at)) >= 0:
        at = end + len(_VALUE_END)
        rest = text[at:].lstrip()
        if rest and not _PARAMETER_BEGINS.match(rest):
            continue  # The tag is a part of the value.
        first = end if first is None else first
        value = text[start:end]
        # A value may have parameters of its own, such as in a text about calls.
        if len(_LINE_BEGINS_PARAMETER.findall(value)) <= value.count(_VALUE_END):
            return end, at
    # The tag is missing.
    other = _LINE_BEGINS_PARAMETER.search(text, start)
    end = len(text) if other is None else other.start()
    if first is not None and first < end:
        return first, first + len(_VALUE_END)
    return end, end


class QwenXml(ConversationFormat):
    name = "qwen_xml"
    thinking = THINKING
    tags = (*THINKING, OPENING, CLOSING)

    def reader(self, tools: Iterable[Any] | None = None, is_open: bool = False) -> AnswerReader:
        return TagReader((THINKING,), (XML_CALLS, JSON_CALLS), tools, is_open)

    def is_named_by(self, template: str) -> bool:
        return _FUNCTION in template and _PARAMETER in template


def xml_calls(opening: str, closing: str) -> CallForm:
    """Calls of this kind between two tags."""
    return CallForm((opening, _FUNCTION), partial(_XmlCall, _Grammar(opening, closing)))


XML_CALLS = xml_calls(OPENING, CLOSING)
