"""The bar that a terminal or a notebook shows while a batch is completed."""

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tqdm import TqdmWarning

with warnings.catch_warnings():
    # In a notebook without ipywidgets tqdm warns, and shows a bar of plain text, which is good enough.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm


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
