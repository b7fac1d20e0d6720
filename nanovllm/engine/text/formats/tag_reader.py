"""TagReader: reads answers in which thinking and calls stand between tags, one after the other."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, cast

from nanovllm.engine.text.formats.argument_types import ArgumentTypes
from nanovllm.engine.text.formats.format import CALL, CONTENT, REASONING, Event
from nanovllm.engine.text.formats.state_reader import StateReader

NamedCall = tuple[str, dict[str, Any]]  # its name and arguments


class Scan(NamedTuple):
    """What a text that begins like a call is: its first `end` characters are these calls, or no call."""

    end: int
    calls: list[NamedCall]


NO_TITLES: Mapping[str, str] = {}


class CallScanner(ABC):
    """Reads one text that begins like a call. It remembers how far it has read.

    Attributes:
        awaited: while a scan is open, it stays open until one of these characters comes; none if any text may decide.
    """

    awaited: frozenset[str] = frozenset()

    @abstractmethod
    def scan(self, text: str, is_last: bool) -> Scan | None:
        """None while it is open what the text is. text: all of it, more with each call. is_last: nothing comes after
        it. A scan that has been given is never another with more text."""


class CallForm(NamedTuple):
    """A way to write calls: the texts with which they may begin, and what reads one of them."""

    openings: tuple[str, ...]
    scanner: Callable[[ArgumentTypes], CallScanner]
    is_whole_answer: bool = False  # A call begins an answer, or follows another call.


class TagReader(StateReader):
    """Thinking stands at the beginning or nowhere: its tag further on is content. White space around thinking and calls
    belongs to no part.

    What is no whole call stays content as written. A call in thinking is a draft and so a part of it; but where the
    thinking never ends and the answer ends with whole calls, the model has forgotten to close it: they are calls.
    """

    def __init__(
        self,
        thinking: tuple[tuple[str, str], ...],
        forms: tuple[CallForm, ...],
        tools: Iterable[Any] | None,
        is_open: bool,
        titles: Mapping[str, str] = NO_TITLES,
    ):
        """
        Args:
            thinking: pairs of tags that may begin and end it.
            tools, is_open: as ConversationFormat.reader's.
            titles: lines that may follow an opening tag and are no thoughts, by the tag.
        """
        super().__init__()
        self.has_reasoning = is_open
        self._openings = tuple(opening for opening, _ in thinking)
        self._closings = dict(thinking)
        self._forms, self._reads_calls = forms, tools is not None
        self._types = ArgumentTypes(tools or ())
        self._titles = titles
        self._calls = Tags(opening for form in forms for opening in form.openings if not form.is_whole_answer)
        self._whole_answers = tuple(opening for form in forms for opening in form.openings if form.is_whole_answer)
        self._scanner: CallScanner | None = None
        self._is_trimmed = False  # The white space before the thinking is over.
        self._draft = ""  # white space and calls at the end of the thinking so far, no longer held
        self._drafts: list[tuple[int, list[NamedCall]]] = []  # these calls, and where in it they end
        self._searched = 0  # of what is held, where no closing tag begins
        self._read = self._read_start
        if is_open:
            self._open(self._openings)

    def _give(self, kind: str, text: str, raw: str) -> None:
        if raw or text:
            self._events.append(Event(kind, text, raw))

    def _read_start(self, is_last: bool) -> bool:
        text = self._held.lstrip()
        for opening in self._openings:
            if text.startswith(opening):
                self.has_reasoning = True
                self._give(REASONING, "", self._take(len(self._held) - len(text) + len(opening)))
                self._open((opening,))
                return True
        if not is_last and any(tag.startswith(text) for tag in (*self._openings, *self._whole_answers)):
            return False
        return self._begin_content(is_last)

    def _begin_content(self, is_last: bool) -> bool:
        """At the beginning of the content, or after a call."""
        text = self._held.lstrip()
        if self._reads_calls and any(text.startswith(each) for each in self._whole_answers):
            self._begin_call(len(self._held) - len(text))
            return True
        self._read = self._read_content
        return True

    # -- thinking ------------------------------------------------------------------------------------------------------

    def _open(self, openings: tuple[str, ...]) -> None:
        """The thinking has begun, with one of these tags."""
        closings = tuple(self._closings[opening] for opening in openings)
        self._title = self._titles.get(openings[0], "") if len(openings) == 1 else ""
        self._ends = Tags(closings)
        self._stops = Tags((*closings, *self._calls.texts))
        self._read = self._read_title if self._title else self._read_thinking

    def _read_title(self, is_last: bool) -> bool:
        title = self._title
        if len(self._held) < len(title) and title.startswith(self._held) and not is_last:
            return False
        if self._held.startswith(title):
            self._give(REASONING, "", self._take(len(title)))
        elif is_last and self._held and self._held == title.rstrip():
            self._give(REASONING, "", self._take(len(self._held)))
        self._read = self._read_thinking
        return True

    def _read_thinking(self, is_last: bool) -> bool:
        if not self._is_trimmed:
            self._give(REASONING, "", self._take(len(self._held) - len(self._held.lstrip())))
            self._is_trimmed = self._held != ""
        match = self._stops.search(self._held)
        if match is None:
            size = len(self._held) if is_last else self._stops.num_free(self._held)
            text = self._held[:size].rstrip()
            self._give(REASONING, text, self._take(size if is_last else len(text)))
            if self._is_trimmed and not self._held:
                self._kind, self._firsts = REASONING, self._stops.firsts
            return False
        text = self._held[: match.start()].rstrip()
        self._give(REASONING, text, self._take(len(text)))
        if match[0] in self._ends.texts:
            return self._close(match.end() - len(text))
        self._searched, self._scanner = 0, None
        self._read = self._read_draft
        return True

    def _close(self, size: int) -> bool:
        """The thinking ends with the first characters held."""
        self._give(REASONING, "", self._take(size))
        self._read = self._read_space
        return True

    def _read_space(self, is_last: bool) -> bool:
        text = self._held.lstrip()
        self._give(REASONING, "", self._take(len(self._held) - len(text)))
        if not text or (not is_last and any(tag.startswith(text) and tag != text for tag in self._whole_answers)):
            return False
        return self._begin_content(is_last)

    def _read_draft(self, is_last: bool) -> bool:
        """Of thinking from what looks like a call on. What is held begins where the last of the calls so far ends."""
        end = self._ends.search(self._held, self._searched)
        if end is not None:  # It is closed, so they were drafts.
            self._give_drafts(end.start())
            return self._close(end.end() - end.start() + len(self._held) - len(self._held.lstrip()))
        self._searched = max(0, len(self._held) - self._ends.longest + 1)
        if self._scanner is None:
            self._draft += self._take(len(self._held) - len(self._held.lstrip()))
            self._searched = 0
            match = self._calls.match(self._held)
            if match is None:
                if self._held and (is_last or not self._calls.may_begin(self._held)):
                    self._give_drafts(0)  # Something else follows.
                    self._read = self._read_thinking
                    return True
                if is_last:
                    self._give_calls_of_thinking()
                return False
            self._scanner = self._scanner_of(match[0])
        scan = self._scanner.scan(self._held, is_last)
        if scan is None:
            return False
        self._scanner, self._searched = None, 0
        if not scan.calls:
            self._give_drafts(scan.end)
            self._read = self._read_thinking
            return True
        self._draft += self._take(scan.end)
        self._drafts.append((len(self._draft), scan.calls))
        return True

    def _give_drafts(self, size: int) -> None:
        """Drafts, and the first characters held, are a part of the thinking. White space after them is held."""
        whole = self._draft + self._take(size)
        text = whole.rstrip()
        self._give(REASONING, text, text)
        self._held = whole[len(text) :] + self._held
        self._draft, self._drafts = "", []

    def _give_calls_of_thinking(self) -> None:
        """The thinking has ended with calls."""
        start = len(self._draft) - len(self._draft.lstrip())
        self._give(REASONING, "", self._draft[:start])
        for end, calls in self._drafts:
            self._give_calls(calls, self._draft[start:end])
            start = end
        self._give(CALL, "", self._draft[start:])
        self._draft, self._drafts = "", []

    # -- content and calls ---------------------------------------------------------------------------------------------

    def _read_content(self, is_last: bool) -> bool:
        if not self._reads_calls or not self._calls.texts:
            text = self._take(len(self._held))
            self._give(CONTENT, text, text)
            self._kind, self._firsts = CONTENT, frozenset()
            return False
        match = self._calls.search(self._held)
        if match is None:
            size = len(self._held) if is_last else len(self._held[: self._calls.num_free(self._held)].rstrip())
            text = self._take(size)
            self._give(CONTENT, text, text)
            if not self._held:
                self._kind, self._firsts = CONTENT, self._calls.firsts
            return False
        text = self._take(len(self._held[: match.start()].rstrip()))
        self._give(CONTENT, text, text)
        self._begin_call(match.start() - len(text))
        return True

    def _begin_call(self, num_spaces: int) -> None:
        """What is held begins like a call, behind white space."""
        self._space = self._take(num_spaces)
        self._scanner = self._scanner_of(self._held)
        self._read = self._read_call

    def _scanner_of(self, text: str) -> CallScanner:
        """Of a text that begins like a call."""
        forms = [form for form in self._forms if text.startswith(form.openings)]
        scanners = [form.scanner(self._types) for form in forms]
        return scanners[0] if len(scanners) == 1 else _AnyOf(scanners)

    def _read_call(self, is_last: bool) -> bool:
        scanner = cast(CallScanner, self._scanner)
        scan = scanner.scan(self._held, is_last)
        if scan is None:
            self._awaited = scanner.awaited
            return False
        raw = self._space + self._take(scan.end)
        if scan.calls:
            self._give_calls(scan.calls, raw)
            self._read = self._read_after_call
        else:
            self._give(CONTENT, raw, raw)
            self._read = self._read_content
        return True

    def _give_calls(self, calls: list[NamedCall], raw: str) -> None:
        if not self._reads_calls:
            self._give(CONTENT, raw, raw)
            return
        for name, arguments in calls:
            self._events.append(Event(CALL, "", raw, name, arguments))
            raw = ""

    def _read_after_call(self, is_last: bool) -> bool:
        text = self._held.lstrip()
        self._give(CALL, "", self._take(len(self._held) - len(text)))
        if not text or (not is_last and any(tag.startswith(text) and tag != text for tag in self._whole_answers)):
            return False
        return self._begin_content(is_last)


class _AnyOf(CallScanner):
    """Where several forms begin alike: the first that finds calls."""

    def __init__(self, scanners: list[CallScanner]):
        self._scanners = scanners
        self._wrong: Scan | None = None

    def scan(self, text: str, is_last: bool) -> Scan | None:
        for scanner in [*self._scanners]:
            scan = scanner.scan(text, is_last)
            if scan is not None and scan.calls:
                return scan
            if scan is not None:
                self._wrong = scan
                self._scanners.remove(scanner)
        self.awaited = self._scanners[0].awaited if len(self._scanners) == 1 else frozenset()
        return None if self._scanners else self._wrong


class Tags:
    """Several texts, to be found in others."""

    def __init__(self, texts: Iterable[str]):
        self.texts = tuple(dict.fromkeys(texts))
        self.firsts = frozenset(text[0] for text in self.texts)
        self.longest = max(map(len, self.texts), default=1)
        self._any, self._beginning = _patterns(self.texts)

    def search(self, text: str, start: int = 0) -> re.Match[str] | None:
        """The first that a text has."""
        return None if self.firsts.isdisjoint(text) else self._any.search(text, start)

    def match(self, text: str) -> re.Match[str] | None:
        """The one with which a text begins."""
        return self._any.match(text) if self.texts else None

    def may_begin(self, text: str) -> bool:
        """Whether a text may become one."""
        return any(each.startswith(text) for each in self.texts)

    def find_all(self, text: str) -> list[re.Match[str]]:
        return list(self._any.finditer(text)) if self.texts else []

    def num_free(self, text: str) -> int:
        """How many of a text's characters cannot be the beginning of one."""
        if self.firsts.isdisjoint(text[1 - self.longest :]):
            return len(text)
        match = self._beginning.search(text, max(0, len(text) - self.longest + 1))
        return len(text) if match is None else match.start()


@lru_cache(64)
def _patterns(texts: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What finds one of the texts, the longest first, and what finds the beginning of one at the end of a text."""
    beginnings = sorted({text[:size] for text in texts for size in range(1, len(text))}, key=len, reverse=True)
    longest = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest))), re.compile(f"(?:{'|'.join(map(re.escape, beginnings))})\\Z")
