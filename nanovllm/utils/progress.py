"""What a terminal shows while an engine starts, and while it completes a batch."""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

from tqdm import TqdmWarning
from tqdm import tqdm as plain_tqdm

with warnings.catch_warnings():
    # In a notebook without ipywidgets tqdm warns, and shows a bar of plain text, which is good enough.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

from nanovllm.utils.checks import quoted

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
        with plain_tqdm(desc=self._text, bar_format=bar_format, leave=False, dynamic_ncols=True) as line:
            line.start_t = self._start
            while not self._has_ended.wait(_REFRESH_SECONDS):
                line.set_description_str(self._text)


def check_use_tqdm(use_tqdm: object) -> None:
    """Raises TypeError."""
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise TypeError(
            f"use_tqdm={quoted(use_tqdm)}: must be True, False, or a function that makes a bar, as tqdm does"
        )


@contextmanager
def progress_bar(use_tqdm: bool | Callable[..., tqdm], total: int) -> Iterator[Callable[[int, int], None]]:
    """A bar of `total` completions, as a function to call after each step with how many it finished and how many tokens
    it computed, as `LLMEngine.step` counts them. True shows one in a terminal or a notebook, and nothing elsewhere."""
    with _make_bar(use_tqdm, total) as bar:
        tokens, seconds = {"prefill": 0, "decode": 0}, {"prefill": 0.0, "decode": 0.0}
        start = time.perf_counter()

        def show(num_finished: int, num_tokens: int) -> None:
            nonlocal start
            kind, now = "prefill" if num_tokens > 0 else "decode", time.perf_counter()
            tokens[kind] += abs(num_tokens)
            seconds[kind] += now - start
            start = now
            rates = {kind: f"{int(tokens[kind] / seconds[kind])}tok/s" for kind in tokens if seconds[kind]}
            bar.set_postfix(rates, refresh=False)
            bar.update(num_finished)

        yield (lambda *args: None) if getattr(bar, "disable", False) else show


def _make_bar(use_tqdm: bool | Callable[..., tqdm], total: int) -> tqdm:
    options = {"total": total, "desc": "Generating", "dynamic_ncols": True}
    if callable(use_tqdm):
        return use_tqdm(**options)
    in_notebook = "ipykernel.zmqshell" in sys.modules  # Its stderr is no terminal.
    # disable=None: unless stderr is a terminal.
    return tqdm(**options, disable=(False if in_notebook else None) if use_tqdm else True)
