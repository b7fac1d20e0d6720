"""Triton kernels and their plain-torch twins: tensors in, tensors out. A test compares the two.

A file imports Triton from `triton_stub`, so it can be imported where Triton is not installed. An operation is written
so:

    @kernel_or_twin
    def double(x: Tensor) -> Tensor:
        \"\"\"The documentation of both.\"\"\"
        return 2 * x  # the twin

    @kernel_of(double)
    def _launch_double(x):  # The types of the arguments are the twin's.
        ...

`double(x)` runs the kernel for a CUDA tensor, and the twin for any other. `double.kernel` and `double.twin` run one of
them whatever the tensor.
"""

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any, ParamSpec, Protocol, TypeVar, cast

from torch import Tensor

HAS_TRITON: bool = find_spec("triton") is not None

P = ParamSpec("P")
R = TypeVar("R")


def use_kernels(x: Tensor) -> bool:
    """True if an operation on `x` runs its Triton kernel (on CUDA), False for its plain-torch twin (elsewhere)."""
    return HAS_TRITON and x.is_cuda


class KernelOrTwin(Protocol[P, R]):
    """An operation: what `kernel_or_twin` returns."""

    twin: Callable[P, R]
    kernel: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


def kernel_or_twin(twin: Callable[P, R]) -> KernelOrTwin[P, R]:
    """Decorates a twin. The result runs the kernel or the twin: its first argument, given by position, decides."""

    @wraps(twin)
    def run(*args: Any, **kwargs: Any) -> R:
        # `use_kernels` without its call, because a step comes here hundreds of times.
        return (operation.kernel if HAS_TRITON and args[0].is_cuda else twin)(*args, **kwargs)

    operation = cast(KernelOrTwin[P, R], run)
    operation.twin = twin
    return operation


def kernel_of(operation: KernelOrTwin[P, R]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates the function that launches the kernel of an operation. It has the arguments of the twin."""

    def register(launch: Callable[P, R]) -> Callable[P, R]:
        operation.kernel = launch
        return launch

    return register
