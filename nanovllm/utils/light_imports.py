"""Imports of large packages without parts of them that this library never runs (docs/performance.md, start-up)."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch

Result = TypeVar("Result")


def import_without_torch_compile(load: Callable[[], Result]) -> Result:
    """Call `load`, which imports packages, within `without_torch_compile` if that works."""
    try:
        with without_torch_compile():
            return load()
    except (ImportError, AttributeError, TypeError):  # They need more of the compiler than the stand-in has.
        return load()


def _unchanged(function: Any = None, *_args: Any, **_options: Any) -> Any:
    """A decorator, with or without arguments, that does nothing."""
    return _unchanged if function is None else function


@contextmanager
def without_torch_compile() -> Iterator[None]:
    """A block that imports packages which decorate functions for torch.compile, without importing torch's compiler.

    In the block `torch.compile` waits for the first call of its function, and decorators that hide a function from the
    compiler do nothing. Only a caller who compiles such a function within another one would notice.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    stand_in: Any = ModuleType("torch._dynamo")
    stand_in.disable = stand_in.assume_constant_result = _unchanged
    stand_in.config = SimpleNamespace(recompile_limit=0)
    sys.modules["torch._dynamo"] = stand_in
    try:
        with (
            patch.object(torch, "_dynamo", stand_in, create=True),
            patch.object(torch, "compile", _compile_when_called),
        ):
            yield
    finally:
        del sys.modules["torch._dynamo"]


@wraps(torch.compile)  # Its signature tells callers which options there are.
def _compile_when_called(function: Any = None, **options: Any) -> Any:
    if function is None:
        return lambda later: _compile_when_called(later, **options)
    compiled = cache(lambda: torch.compile(function, **options))
    return lambda *args, **kwargs: compiled()(*args, **kwargs)
