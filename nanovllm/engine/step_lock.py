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
        self._lock = threading.Lock()
        self._holder = 0  # the thread that took the lock last
        self._is_exiting = False
        self._has_ended = False

    def check(self) -> None:
        """Raises RuntimeError after exit."""
        if self._is_exiting:
            raise RuntimeError("this engine has exited: make a new LLM")

    @contextmanager
    def hold(self) -> Iterator[None]:
        """A block that `exit` waits for. Raises RuntimeError after exit, and in the middle of such a block."""
        if self._is_held_here():
            raise RuntimeError("a signal handler cannot use an engine in the middle of a step, except to exit() it")
        try:
            with self._lock:
                self._holder = threading.get_ident()
                self.check()
                yield
        finally:
            if self._is_exiting:
                self.exit()

    def exit(self) -> None:
        """Give the memory back. Harmless when called again."""
        self._is_exiting = True
        if self._is_held_here():
            return
        with self._lock:
            self._holder = threading.get_ident()
            if not self._has_ended:
                self._has_ended = True
                self._end()

    def _is_held_here(self) -> bool:
        return self._lock.locked() and self._holder == threading.get_ident()
