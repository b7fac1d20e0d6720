"""Ctrl-C while modules are imported. Nothing else is imported here, because it stands before all other imports."""

import os
import signal
from types import FrameType
from typing import NoReturn

_INTERRUPTED = 130


class QuickExit:
    """A block in which Ctrl-C ends the process at once, with a line instead of a traceback, unless the program handles
    Ctrl-C in its own way. For imports: they take seconds, leave nothing behind, and a KeyboardInterrupt
    inside of torch's aborts the process. Use as a context manager."""

    def __enter__(self) -> None:
        self._is_set = False
        if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # Also within another such block.
            return
        try:
            signal.signal(signal.SIGINT, _leave)
            self._is_set = True
        except ValueError:  # Not the main thread, which alone gets signals.
            pass

    def __exit__(self, *exc_info: object) -> None:
        if self._is_set:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    try:
        os.write(2, b"\nnanovllm: interrupted\n")
    finally:
        os._exit(_INTERRUPTED)
