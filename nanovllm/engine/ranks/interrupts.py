"""Ctrl-C, held back where it would tear the ranks out of step."""

import signal
import threading


class HeldInterrupt:
    """Within the block SIGINT waits for its end, where the handler that was there before gets it, once: what all
    ranks must do together is done by all or by none. Costs two system calls; in other threads than the main one, which
    signals never reach, nothing. An exception of the block's own takes the interrupt's place.
    """

    def __enter__(self) -> None:
        self._is_pending = False
        self._handler = None
        if threading.current_thread() is threading.main_thread():
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                signal.signal(signal.SIGINT, self._hold)

    def _hold(self, signum, frame) -> None:
        self._is_pending = True

    def __exit__(self, error_type, error, traceback) -> None:
        if self._handler is not None:
            signal.signal(signal.SIGINT, self._handler)
            if self._is_pending and error_type is None:
                signal.raise_signal(signal.SIGINT)
