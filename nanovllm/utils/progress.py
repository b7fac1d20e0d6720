"""What a terminal shows while an engine starts, and while it completes a batch."""

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import Event, Thread
from typing import Any

from tqdm import TqdmWarning
from tqdm import tqdm as plain_tqdm

with warnings.catch_warnings():
    # In a notebook without ipywidgets tqdm warns, and shows a bar of plain text, which is good enough.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm

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


def progress_bar(use_tqdm: bool | Callable[..., tqdm], total: int) -> AbstractContextManager["ProgressBar | None"]:
    """A bar of `total` completions, for a `with` block. True shows one in a terminal or a notebook; elsewhere, and with
    False, it is None."""
    if use_tqdm is False:
        return nullcontext()
    in_notebook = "ipykernel.zmqshell" in sys.modules  # Its stderr is no terminal.
    if use_tqdm is True and not in_notebook and not (sys.stderr is not None and sys.stderr.isatty()):
        return nullcontext()
    make_bar = tqdm if use_tqdm is True else use_tqdm
    return ProgressBar(make_bar(total=total, desc="Generating", dynamic_ncols=True))


class ProgressBar:
    """Shows completions, and the tokens a second of prefills and of decode steps."""

    def __init__(self, bar: Any):
        """bar: tqdm's, or one like it."""
        self._bar = bar
        self._tokens, self._seconds = {"prefill": 0, "decode": 0}, {"prefill": 0.0, "decode": 0.0}
        self._start = time.perf_counter()

    def __enter__(self) -> "ProgressBar":
        self._bar.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._bar.__exit__(*exc_info)

    def __call__(self, num_finished: int, num_tokens: int) -> None:
        """After a step: how many completions it finished, and how many tokens it computed, as `LLMEngine.step` counts
        them."""
        kind, now = "prefill" if num_tokens > 0 else "decode", time.perf_counter()
        self._tokens[kind] += abs(num_tokens)
        self._seconds[kind] += now - self._start
        self._start = now
        rates = {kind: f"{int(self._tokens[kind] / s)}tok/s" for kind, s in self._seconds.items() if s}
        self._bar.set_postfix(rates, refresh=False)
        self._bar.update(num_finished)
