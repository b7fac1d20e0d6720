"""The progress bar of a batch."""

import sys
import warnings
from collections.abc import Callable

from tqdm import TqdmWarning

with warnings.catch_warnings():
    # In a notebook without ipywidgets tqdm warns, and shows a bar of plain text, which is good enough.
    warnings.simplefilter("ignore", TqdmWarning)
    from tqdm.auto import tqdm


def check_use_tqdm(use_tqdm: object) -> None:
    """Raises TypeError."""
    if not isinstance(use_tqdm, bool) and not callable(use_tqdm):
        raise TypeError(f"use_tqdm={use_tqdm!r}: must be True, False, or a function that makes a bar, as tqdm does")


def progress_bar(use_tqdm: bool | Callable[..., tqdm], total: int) -> tqdm:
    """A bar of `total` completions. True shows one in a terminal or a notebook, and nothing elsewhere."""
    options = {"total": total, "desc": "Generating", "dynamic_ncols": True}
    if callable(use_tqdm):
        return use_tqdm(**options)
    in_notebook = "ipykernel.zmqshell" in sys.modules  # Its stderr is no terminal.
    # disable=None: unless stderr is a terminal.
    return tqdm(**options, disable=(False if in_notebook else None) if use_tqdm else True)
