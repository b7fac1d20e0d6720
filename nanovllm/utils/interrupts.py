"""Ctrl-C at a moment when it would do harm."""

import signal
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
