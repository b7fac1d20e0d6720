"""What `nanovllm tune` shows while it works."""

import time
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

_SECONDS_BETWEEN_LINES = 30.0


class Progress:
    """Shows one part of the work: a bar in a terminal; elsewhere, for example in a file, a line every half minute. Use
    as a context manager."""

    def __init__(self, text: str, unit: str, total: int = 0, clock: Callable[[], float] = time.monotonic):
        self._text, self._total, self._done, self._clock = text, total, 0, clock
        self._start = self._last_line = clock()
        # disable=None: unless standard error is a terminal.
        self._bar = tqdm(desc=text, unit=unit, total=total or None, disable=None, dynamic_ncols=True)

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._bar.close()

    def show(self, done: int, total: int) -> None:
        """Never more than all, and never less than before."""
        self._total = total
        self._done = min(max(done, self._done), total)
        if not self._bar.disable:
            self._bar.total, self._bar.n = self._total, self._done
            self._bar.refresh()
            return
        now = self._clock()
        if self._done and now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            left = (now - self._start) * (total - self._done) / self._done
            print(f"{self._text}: {self._done} of {total}, {_in_words(left)} left at this speed", flush=True)

    def step(self) -> None:
        self.show(self._done + 1, self._total)

    def tell(self, line: str) -> None:
        """A line that stays."""
        if self._bar.disable:
            print(line, flush=True)
        else:
            self._bar.write(line)


def _in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
