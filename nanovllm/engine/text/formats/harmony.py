"""Harmony, the format of gpt-oss's answers (https://github.com/openai/harmony): messages in channels.

    <|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>

What the model thinks is in the channel analysis. Its answer is in final, and what it says before it calls a tool in
commentary. A message to a tool has its name in the header, before the channel or behind it:

    <|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "Rome"}<|call|>
"""

import re
from collections.abc import Iterable
from typing import Any, cast

from nanovllm.engine.text.formats.argument_types import ArgumentTypes
from nanovllm.engine.text.formats.format import CALL, CONTENT, REASONING, AnswerReader, ConversationFormat, Event
from nanovllm.engine.text.formats.json_end import INCOMPLETE, MAY_END_JSON, WRONG, JsonEnd, parse
from nanovllm.engine.text.formats.state_reader import StateReader
from nanovllm.engine.text.formats.tag_reader import CallForm, CallScanner, Scan

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL_END = "<|end|>", "<|return|>", "<|call|>"
_TAGS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL_END)
_ENDS = (END, RETURN, CALL_END)  # of a message
_BODY_ENDS = (*_ENDS, START, CHANNEL)  # The last two begin another, where a model has left the end out.
_BODY_END = re.compile("|".join(map(re.escape, _BODY_ENDS)))
# What of a header stands before its end.
_HEADER = re.compile(r"(?:<\|start\|>)?([^<]*)(<\|channel\|>[^<]*)?(?:<\|constrain\|>[^<]*)*")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(analysis|commentary|final)(?![\w.\-])\s*")
_RECIPIENT = re.compile(r"to=([^\s<]+)")
# A message may begin with the recipient, where the prompt has the beginning of its header.
_BEGINS_WITH_RECIPIENT = re.compile(r"\s*to=[^\s<][^<\n]{0,160}<\|(?:channel|constrain|message)\|>")
_MAY_BEGIN_WITH_RECIPIENT = re.compile(r"\s*(?:t|to|to=(?:[^\s<][^<\n]{0,160})?(?:<\|?\w*\|?)?)?\Z")
# Words of a header behind its channel.
_TYPES = ("json", "code", "text", "python", "javascript", "xml", "yaml", "html", "markdown", "sql", "bash")
_ROLES = ("assistant", "user", "system", "developer", "tool", "all")  # They are no tools.


def _num_undecided(text: str, tags: tuple[str, ...]) -> int:
    """Characters at the end of a text that may be the beginning of one of the tags."""
    start = text.rfind("<")
    return len(text) - start if start >= 0 and any(tag.startswith(text[start:]) for tag in tags) else 0


class _Header:
    """What a message's header says.

    Attributes:
        end: where it ends in the text.
        channel: analysis, commentary, final, or "" for another or none.
        tool: the name of the tool that is called; None if it is no call.
        body: where the body begins; None if the header has no end, and no body.
        is_open: whether more text may change any of it.
    """

    body: int | None = None

    def __init__(self, text: str, is_last: bool, types: ArgumentTypes):
        """text: it begins at the header."""
        match = cast(re.Match[str], _HEADER.match(text))
        self.end, self.is_open = match.end(), False
        rest = text[match.end() :]
        named = _CHANNEL_NAME.match(match[2] or "")
        self.channel = named[1] if named else ""
        recipient = _RECIPIENT.search(match[1])
        words = (match[2] or "")[named.end() :] if named else ""
        # The model has left <|message|> out: a text follows the channel.
        is_text = recipient is None and words != "" and not _may_be_header(words, is_followed=rest != "")
        if recipient is None and not is_text:
            recipient = _RECIPIENT.search(match[2] or "")
        self.tool = None if recipient is None else _tool(recipient[1], types)
        if named and is_text:
            self.body = match.start(2) + named.end()
        elif rest.startswith(MESSAGE):
            self.body = self.end = match.end() + len(MESSAGE)
        elif not is_last and (not rest or any(tag.startswith(rest) for tag in _TAGS)):
            self.is_open = True
        elif named and recipient is None:
            self.body = match.start(2) + named.end()


def _may_be_header(words: str, is_followed: bool) -> bool:
    """Whether what follows a channel's name is no text yet. is_followed: the last word is whole."""
    first = words.split(maxsplit=1)[0]
    if first.startswith("to="):
        return True
    is_whole = is_followed or len(first) < len(words)
    return first in _TYPES if is_whole else any(each.startswith(first) for each in (*_TYPES, "to="))


def _tool(recipient: str, types: ArgumentTypes) -> str | None:
    name = recipient.removeprefix("functions.")
    if name in types.names:
        return name
    for each in _TYPES:  # The type of the content may be glued to it.
        if name.endswith(each) and name.removesuffix(each) in types.names:
            return name.removesuffix(each)
    return None if name in _ROLES and name == recipient else name


class _Arguments:
    """Reads the body of a call: JSON, and the tag behind it."""

    awaited: frozenset[str] = frozenset()  # as CallScanner's

    def __init__(self, start: int):
        self._start = start  # of the body, and then of the JSON
        self._json: JsonEnd | None = None

    def read(self, text: str, is_last: bool) -> tuple[int, dict[str, Any] | None] | None:
        """Where the call ends, and its arguments, which are None if it is none. None while that is open."""
        if self._json is None:
            rest = text[self._start :].lstrip()
            if rest.startswith(_ENDS):
                return len(text) - len(rest) + rest.index(">") + 1, {}
            if not rest.startswith("{"):
                is_open = not is_last and (not rest or any(tag.startswith(rest) for tag in _ENDS))
                return None if is_open else (self._start, None)
            self._start = len(text) - len(rest)
            self._json = JsonEnd(self._start)
        end = self._json.find(text)
        if end == INCOMPLETE and not is_last:
            self.awaited = MAY_END_JSON
            return None
        self.awaited = frozenset()
        rest = "" if end in (INCOMPLETE, WRONG) else text[end:].lstrip()
        found = None if end in (INCOMPLETE, WRONG) else parse(text[self._start : end])
        if not isinstance(found, dict):
            return self._start, None
        if rest.startswith(_BODY_ENDS):
            size = rest.index(">") + 1 if rest.startswith(_ENDS) else 0
            return len(text) - len(rest) + size, found
        if not any(tag.startswith(rest) for tag in _BODY_ENDS):
            return self._start, None  # Something else than a tag follows.
        return (len(text), found) if is_last else None


class HarmonyReader(StateReader):
    """Messages of one kind are joined by a line feed. What is no whole call is content as written."""

    def __init__(self, tools: Iterable[Any] | None, is_open: bool):
        super().__init__()
        self.has_reasoning = is_open
        self._types = ArgumentTypes(tools or ())
        self._reads_calls = tools is not None
        # Content that is white space, and was not given yet: it belongs to no part, if a call follows.
        self._spaces: list[Event] = []
        self._part = REASONING if is_open else CONTENT  # of the message that is read
        self._is_as_written = False  # It is no message, but content with its tags.
        self._begun = {REASONING} if is_open else set[str]()  # kinds of which there have been messages
        self._arguments: _Arguments | None = None
        self._tool, self._header_size = "", 0  # of the call that is read
        self._read = self._read_body if is_open else self._read_start

    def push(self, text: str, is_last: bool = False) -> list[Event]:
        events = super().push(text, is_last)
        if is_last:
            events += self._spaces
            self._spaces = []
        return events

    def _give(self, text: str, raw: str) -> None:
        """A piece of the message that is read."""
        if not (text or raw):
            return
        if self._part == REASONING or not self._reads_calls:
            self._events += [*self._spaces, Event(self._part, text, raw)]
            self._spaces = []
            return
        stripped = text.rstrip()
        size = len(text) - len(stripped)
        if not stripped:
            self._spaces.append(Event(CONTENT, text, raw))
            return
        self._events += [*self._spaces, Event(CONTENT, stripped, raw[: len(raw) - size])]
        self._spaces = [Event(CONTENT, text[len(stripped) :], raw[len(raw) - size :])] if size else []

    def _read_start(self, is_last: bool) -> bool:
        """Before a header, or a text without one."""
        held = self._held
        text = held.lstrip()
        if text.startswith((START, CHANNEL, MESSAGE)) or _BEGINS_WITH_RECIPIENT.match(held):
            self._read = self._read_header
            return True
        if text.startswith(_ENDS):  # of a message that has ended already
            self._give("", self._take(len(held) - len(text) + text.index(">") + 1))
            return True
        is_open = any(tag.startswith(text) for tag in _TAGS) or _MAY_BEGIN_WITH_RECIPIENT.match(held)
        if held == "" or (is_open and not is_last):
            return False
        self._part, self._is_as_written, self._read = CONTENT, False, self._read_body
        return True

    def _read_header(self, is_last: bool) -> bool:
        """A header that is not over is no text, apart from that of a call."""
        spaces = len(self._held) - len(self._held.lstrip())
        header = _Header(self._held[spaces:], is_last, self._types)
        if header.is_open:
            return False
        if header.tool is not None and header.body is not None and self._reads_calls:
            self._tool, self._header_size = header.tool, spaces + header.body
            self._arguments = _Arguments(self._header_size)
            self._read = self._read_call
        elif header.tool is not None:
            self._begin_as_written(spaces + header.end)
        elif header.body is None:
            self._part = CONTENT
            self._give("", self._take(spaces + header.end))
            self._read = self._read_start
        else:
            self._begin(REASONING if header.channel == "analysis" else CONTENT, spaces + header.body)
        return True

    def _begin(self, kind: str, size: int, is_as_written: bool = False) -> None:
        """A message of a kind. size: of its header."""
        self._part, self._is_as_written, self._read = kind, is_as_written, self._read_body
        self.has_reasoning |= kind == REASONING
        raw = self._take(size)
        self._give("\n" * (kind in self._begun) + raw * is_as_written, raw)
        self._begun.add(kind)

    def _begin_as_written(self, size: int) -> None:
        """The header of a call that is none, or is not read: the message with its tags is content."""
        self._begin(CONTENT, size, is_as_written=True)

    def _read_body(self, is_last: bool) -> bool:
        match = _BODY_END.search(self._held)
        if match is None:
            size = len(self._held) - (0 if is_last else _num_undecided(self._held, _BODY_ENDS))
            text = self._take(size)
            self._give(text, text)
            if not self._held and not self._spaces:
                self._kind, self._firsts = self._part, frozenset("<")
            return False
        text = self._take(match.start())
        self._give(text, text)
        if match[0] in _ENDS:
            raw = self._take(len(match[0]))
            self._give(raw if self._is_as_written else "", raw)
        self._read = self._read_start
        return True

    def _read_call(self, is_last: bool) -> bool:
        found = cast(_Arguments, self._arguments).read(self._held, is_last)
        if found is None:
            self._awaited = cast(_Arguments, self._arguments).awaited
            return False
        end, arguments = found
        if arguments is None:
            self._begin_as_written(self._header_size)
            return True
        raw = "".join(event.raw for event in self._spaces) + self._take(end)
        self._spaces, self._read = [], self._read_start
        self._events.append(Event(CALL, "", raw, self._tool, arguments))
        return True


class _CallInText(CallScanner):
    """A call in a text of which nobody says that it is Harmony."""

    def __init__(self, types: ArgumentTypes):
        self._types = types
        self._header: _Header | None = None
        self._arguments: _Arguments | None = None

    def scan(self, text: str, is_last: bool) -> Scan | None:
        if self._header is None:
            header = _Header(text, is_last, self._types)
            if header.is_open:
                return None
            if header.tool is None or header.body is None:
                return Scan(text.index(">") + 1, [])
            self._header, self._arguments = header, _Arguments(header.body)
        found = cast(_Arguments, self._arguments).read(text, is_last)
        if found is None:
            return None
        end, arguments = found
        calls = [] if arguments is None else [(cast(str, self._header.tool), arguments)]
        return Scan(end if calls else cast(int, self._header.body), calls)


CHANNEL_CALLS = CallForm((START, CHANNEL), _CallInText)


def begins_harmony(text: str) -> bool | None:
    """Whether a text begins as Harmony does. None while that is open."""
    if text.lstrip().startswith((START, CHANNEL)) or _BEGINS_WITH_RECIPIENT.match(text):
        return True
    is_open = any(tag.startswith(text.lstrip()) for tag in (START, CHANNEL)) or _MAY_BEGIN_WITH_RECIPIENT.match(text)
    return None if is_open else False


class Harmony(ConversationFormat):
    name = "harmony"
    thinking = (f"{CHANNEL}analysis{MESSAGE}", END)
    answer = f"{START}assistant{CHANNEL}final{MESSAGE}"
    ends = (RETURN, CALL_END)
    tags = _TAGS

    def reader(self, tools: Iterable[Any] | None = None, is_open: bool = False) -> AnswerReader:
        return HarmonyReader(tools, is_open)

    def is_named_by(self, template: str) -> bool:
        return CHANNEL in template and MESSAGE in template

    def is_known_by(self, tokens: set[str]) -> bool:
        return {CHANNEL, MESSAGE} <= tokens
