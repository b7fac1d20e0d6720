"""The progress bar of a batch."""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import TqdmWarning

with warnings.catch_warnings():
    # In a notebook without ipywidgets tqdm warns, and shows a bar of plain text, which is good enough.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm


def check_use_tqdm(use_tqdm: object) -> None:
    """Raises TypeError."""
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise TypeError(f"use_tqdm={use_tqdm!r}: must be True, False, or a function that makes a bar, as tqdm does")


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
