"""Files that a caller of a job names: paths, globs and URLs, and nothing else."""

import os
from collections.abc import Iterable, Mapping
from typing import Any

from nanovllm.utils.checks import quoted

Path = str | os.PathLike[str]


def as_paths(name: str, given: Any) -> list[Path]:
    """One of them or several, as a list. name: of the argument. Raises TypeError."""
    if isinstance(given, str | os.PathLike):
        return [given]
    paths = list(given) if isinstance(given, Iterable) and not isinstance(given, Mapping | bytes) else [given]
    for each in paths:
        if not isinstance(each, str | os.PathLike):
            raise TypeError(f"{name}={quoted(each)}: must be the path of a file, or several{_remedy(each)}")
    return paths


def _remedy(given: Any) -> str:
    if not isinstance(given, Mapping):
        return ""
    return "; write such rows to a file, each as a line of JSON, or give their prompts to LLM.generate_iter"


def check_path(name: str, given: Any) -> None:
    """Raises TypeError if this is not one path."""
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"{name}={quoted(given)}: must be a path")
