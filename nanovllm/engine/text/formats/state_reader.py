"""StateReader: a reader whose state is the method that reads what comes next."""

from collections.abc import Callable

from nanovllm.engine.text.formats.format import AnswerReader, Event

_NONE: frozenset[str] = frozenset()


class StateReader(AnswerReader):
    """Holds what is not decided, and lets `_read` go on with it.

    Most tokens decide nothing: they lie within a text or within an argument. `push` is quick with these.
    """

    _read: Callable[[bool], bool]  # Its argument says whether nothing comes after what is held. It returns whether
    # another method goes on with the rest.

    def __init__(self) -> None:
        self._held = ""
        self._events: list[Event] = []  # what this push has found
        # Text of this kind goes on, and nothing is held. A text is only that, unless it has one of these characters or
        # ends in white space.
        self._kind: str | None = None
        self._firsts = _NONE
        # Nothing is decided before one of these characters comes. Meanwhile texts are kept in pieces.
        self._awaited = _NONE
        self._pieces: list[str] = []

    def push(self, text: str, is_last: bool = False) -> list[Event]:
        if not is_last:
            if self._kind is not None and self._firsts.isdisjoint(text) and text and not text[-1].isspace():
                return [Event(self._kind, text, text)]
            if self._awaited and self._awaited.isdisjoint(text):
                self._pieces.append(text)
                return []
        if self._pieces:
            text = "".join([*self._pieces, text])
            self._pieces = []
        self._held += text
        events: list[Event] = []
        self._events = events
        self._kind, self._awaited = None, _NONE
        while self._read(is_last):
            pass
        return events

    def _take(self, size: int) -> str:
        """The first characters held, which are held no longer."""
        taken, self._held = self._held[:size], self._held[size:]
        return taken
