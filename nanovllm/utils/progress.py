"""What a terminal shows while an engine starts."""

import sys
import time
from collections.abc import Callable
from threading import Event, Thread
from typing import Any

from tqdm import tqdm

_SILENT_SECONDS = 2.0
_REFRESH_SECONDS = 0.2


class StartProgress:
    """A line of standard error that says what a start is doing, if it takes longer than two seconds. It is erased in
    the end; without a terminal there is none. Use as a context manager."""

    def __init__(self, is_wanted: bool = True):
        self._text = ""
        self._start = time.time()
        self._has_ended = Event()
        self._thread: Thread | None = None
        if is_wanted and sys.stderr is not None and sys.stderr.isatty():
            self._thread = Thread(target=self._show, name="nanovllm-progress", daemon=True)

    def __enter__(self) -> "StartProgress":
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join()

    def tell(self, text: str) -> None:
        """What begins now."""
        self._text = text

    def count(self, text: str) -> Callable[[int, int], None]:
        """The same with a count: a function of how many are done, and of how many."""
        return lambda done, total: self.tell(f"{text} {done}/{total}")

    def _show(self) -> None:
        if self._has_ended.wait(_SILENT_SECONDS):
            return
        bar_format = "nanovllm: {desc} [{elapsed}]"
        with tqdm(desc=self._text, bar_format=bar_format, leave=False, dynamic_ncols=True) as line:
            line.start_t = self._start
            while not self._has_ended.wait(_REFRESH_SECONDS):
                line.set_description_str(self._text)
