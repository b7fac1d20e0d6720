"""Ctrl-C while modules are imported. Little else is imported here, because it stands before all other imports."""

import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130


class QuickExit:
    """A block in which Ctrl-C ends the process at once, with a line instead of a traceback, unless the program handles
    Ctrl-C in its own way. For imports: they take seconds, leave nothing behind, and a KeyboardInterrupt
    inside of torch's aborts the process. Use as a context manager."""

    def __init__(self, message: str = "nanovllm: interrupted", with_sigterm: bool = False):
        """message: the line. with_sigterm: SIGTERM does the same."""
        self._message = message
        self._usual: dict[int, Callable | signal.Handlers] = {signal.SIGINT: signal.default_int_handler}
        if with_sigterm:
            self._usual[signal.SIGTERM] = signal.SIG_DFL
        self._is_set: list[int] = []

    def __enter__(self) -> None:
        for number, usual in self._usual.items():
            if signal.getsignal(number) is not usual:  # Also within another such block.
                continue
            try:
                signal.signal(number, self._leave)
                self._is_set.append(number)
            except ValueError:  # Not the main thread, which alone gets signals.
                pass

    def __exit__(self, *exc_info: object) -> None:
        while self._is_set:
            number = self._is_set.pop()
            signal.signal(number, self._usual[number])

    def _leave(self, number: int, frame: FrameType | None) -> NoReturn:
        try:
            os.write(2, os.fsencode(f"\n{self._message}\n"))
        finally:
            os._exit(_INTERRUPTED)
