"""How far a job is: a bar in a terminal, and elsewhere a line every half minute."""

import sys
import threading
import time

from typing_extensions import Self

from nanovllm.jobs.arguments import line_bar

SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Counts lines, errors and tokens, and shows them on standard error. A context manager.

    Attributes:
        has_begun: whether an engine has started.
    """

    def __init__(self, total: int, num_done: int, num_failed: int, is_wanted: bool):
        """num_done: of an earlier call, num_failed of them without an answer."""
        self._total, self._before, self._num_failed = total, num_done, num_failed
        self._num_new = self._num_tokens = 0
        self._bar = line_bar("Answering", is_wanted, total, num_done)
        self.has_begun = False
        self._start = time.perf_counter()
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        if is_wanted and sys.stderr is not None and not sys.stderr.isatty():
            self._thread = threading.Thread(target=self._show_lines, name="nanovllm-jobs-progress", daemon=True)

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def begin(self) -> float:
        """Start the clock; returns its time. What an engine needs to start is not part of the speed."""
        self.has_begun = True
        self._start = time.perf_counter()
        return self._start

    def __exit__(self, *exc_info: object) -> None:
        self._has_ended.set()
        self._bar.close()

    def add(self, num_tokens: int, num_lines: int = 1, num_failed: int = 0) -> None:
        """num_tokens: of these lines' answers."""
        self._num_new += num_lines
        self._num_failed += num_failed
        self._num_tokens += num_tokens
        if not self._bar.disable:
            rate = self._num_tokens / (time.perf_counter() - self._start)
            self._bar.set_postfix_str(f"{self._num_failed} errors, {rate:.0f} tok/s", refresh=False)
            self._bar.update(num_lines)

    def _show_lines(self) -> None:
        while not self._has_ended.wait(SECONDS_BETWEEN_LINES):
            print(f"nanovllm: {self.describe()}", file=sys.stderr, flush=True)

    def describe(self) -> str:
        """Such as "1,200 of 10,000 lines, 3 errors, 5120 tok/s, 4 min left"."""
        seconds = time.perf_counter() - self._start
        done = self._before + self._num_new
        text = f"{done:,} of {self._total:,} lines, {self._num_failed} errors, {self._num_tokens / seconds:.0f} tok/s"
        if not self._num_new:
            return text
        left = (self._total - done) * seconds / self._num_new
        return f"{text}, {left / 60:.0f} min left" if left >= 120 else f"{text}, {left:.0f} s left"
