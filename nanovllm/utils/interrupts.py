"""Ctrl-C at a moment when it would do harm."""

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Within the block SIGINT waits for its end, where the previous handler gets it once: what all ranks must do
    together is done by all or by none. An exception of the block's own takes the interrupt's place."""
    handler = signal.getsignal(signal.SIGINT)
    # Signals reach only the main thread.
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held:
        signal.raise_signal(signal.SIGINT)


class InterruptPipe:
    """Tells another thread of Ctrl-C, also while the main thread is inside a call that is not Python's, such as a
    collective, and runs no handler. Wait for `reader` to become readable, then call `receive`."""

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)
        self._is_listening = self._is_closing = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """A block in which the pipe reports Ctrl-C. It does so only in the main thread, and not where an event loop
        already receives signals in this way."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        if before != -1:
            signal.set_wakeup_fd(before)
        self._is_listening = True
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            self._is_listening = False
            if self._is_closing:
                self.close()

    def receive(self) -> bool:
        """Whether Ctrl-C was among the signals that have arrived."""
        try:
            return signal.SIGINT in self.reader.recv(4096)
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Now, or at the end of the block in which it listens: the next signal is written to its descriptor."""
        self._is_closing = True
        if not self._is_listening:
            self.reader.close()
            self._writer.close()
