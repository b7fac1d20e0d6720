"""--quiet and --verbose of every command: what is logged, and whether progress is shown."""

import argparse
import logging
import os
from typing import Any

QUIET, NORMAL, VERBOSE = -1, 0, 1
_LEVELS = {QUIET: logging.ERROR, NORMAL: logging.WARNING, VERBOSE: logging.INFO}
_OTHERS = ("httpx", "huggingface_hub", "transformers")  # They tell of every request and file.


def add_verbosity(parser: argparse.ArgumentParser, default: object = argparse.SUPPRESS) -> None:
    """default: without either; SUPPRESS leaves what stood before the command."""
    options = parser.add_mutually_exclusive_group()
    for flag, name, value, help in (
        ("-q", "--quiet", QUIET, "show results and errors alone"),
        ("-v", "--verbose", VERBOSE, "tell more, and of an error where it comes from"),
    ):
        store: Any = {"dest": "verbosity", "action": "store_const", "const": value, "default": default}
        options.add_argument(flag, name, **store, help=help)


def set_up_logging(verbosity: int) -> None:
    """Log to standard error. Called once, before a command runs."""
    logging.basicConfig(level=_LEVELS[verbosity], format="%(message)s")
    for name in _OTHERS:
        logging.getLogger(name).setLevel(max(logging.WARNING, _LEVELS[verbosity]))
    if verbosity == QUIET:  # The hub's bars have no other switch before the package is imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
