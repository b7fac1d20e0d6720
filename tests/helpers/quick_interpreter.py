"""Triton's interpreter, without its search of triton.language for what it replaces at each launch and at each call of
one function by another, which takes a third of the time of a test. A plugin of pytest."""

from types import ModuleType
from typing import Any

import torch


def _remember_builtins(interpreter: ModuleType) -> None:
    search, set_one = interpreter._patch_builtin, interpreter._patch_attr
    found: dict[Any, list[tuple[str, Any]]] = {}

    def replace(place: Any, builder: Any, scope: Any) -> None:
        if place not in found:
            first = len(scope._changes)
            search(place, builder, scope)
            found[place] = [(name, member) for _, name, member in scope._changes[first:]]
        for name, member in found[place]:
            if getattr(place, name) is member:
                set_one(place, name, member, builder, scope)

    interpreter._patch_builtin = replace


def _add_bfloat16(builder: Any) -> None:
    """Constants in bfloat16, which kernels have and the interpreters of some releases of Triton (3.7) lack."""
    from triton.language import bfloat16

    if not hasattr(builder, "get_bf16"):
        builder.get_bf16 = lambda self, value: self.create_fp_trunc(self.get_fp32(value), bfloat16)


if not torch.cuda.is_available():
    try:
        from triton.runtime import interpreter
    except ImportError:
        pass
    else:
        _remember_builtins(interpreter)
        _add_bfloat16(interpreter.InterpreterBuilder)
