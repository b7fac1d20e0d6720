"""StepLock: an engine's memory is given back between two of its steps, whichever thread asks for it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepLock:
    """Held during a step, so that `exit` waits for the step under way and no step begins after it.

    exit may be called in any thread. In the middle of a step of the same thread, where a signal handler or the garbage
    collector can call it, it returns at once, and the end of that step gives the memory back.
    """

    def __init__(self, end: Callable[[], None]):
        """end: gives the memory back; called once."""
        self._end = end
        self._lock = threading.RLock()
        self._is_in_step = False  # whoever has the lock is in a step of this very thread
        self._is_exiting = False
        self._has_ended = False

    def check(self) -> None:
        """Raises RuntimeError after exit."""
        if self._is_exiting:
            raise RuntimeError("this engine has exited: make a new LLM")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """A block that `exit` waits for. Raises RuntimeError after exit, and in the middle of such a block."""
        try:
            with self._lock:
                if self._is_in_step:
                    raise RuntimeError("a signal handler can exit() an engine in the middle of a step, but not use it")
                self._is_in_step = True
                try:
                    self.check()
                    yield
                finally:
                    self._is_in_step = False
        finally:
            if self._is_exiting:  # since the block began
                self.exit()

    def exit(self) -> None:
        """Give the memory back. Harmless when called again."""
        self._is_exiting = True
        with self._lock:
            if not self._is_in_step and not self._has_ended:
                self._has_ended = True
                self._end()
