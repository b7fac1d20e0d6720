"""Launches kernels, and compiles them ahead of their first launch in parallel.

Triton compiles a variant of a kernel at its first launch, which takes a third of a second or more, and an engine needs
about forty. LLVM and ptxas do most of the work and release the interpreter's lock, so threads compile side by side.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor

from nanovllm.kernels.triton_stub import driver, triton

_MAX_THREADS = 16

_variants: ContextVar[set | None] = ContextVar("nanovllm_compiled_variants", default=None)


def launcher(kernel, grid: tuple[int, ...], pdl: bool | None = None) -> Callable[..., None]:
    """`kernel[grid]`, to be called with the kernel's arguments, constants by name. Inside `compile_ahead` the call
    compiles the variant instead of launching it. pdl: for a kernel with the constant PDL, which this sets: whether to
    use a dependent launch (`dependent_launch`)."""
    variants = _variants.get()
    launch = kernel[grid] if variants is None else partial(_compile, variants, kernel, grid)
    if pdl is None:
        return launch
    return partial(launch, PDL=True, launch_pdl=True) if pdl else partial(launch, PDL=False)


def is_compiling_ahead() -> bool:
    """Whether this thread is inside `compile_ahead`."""
    return _variants.get() is not None


@contextmanager
def compile_ahead(
    tell: Callable[[int, int], None] | None = None, waiting: Callable[[], AbstractContextManager] = nullcontext
) -> Iterator[None]:
    """In this block and this thread, `launcher` compiles kernels instead of launching them; their outputs mean nothing.

    Other threads compile while the block runs. The block ends when all have finished, or, with an exception, when each
    has finished its current variant. A kernel that fails to compile raises at its first launch.

    Args:
        tell: called while the block waits, with the number of compiled variants and of all variants.
        waiting: a block in which, after an exception, the threads are waited for. It should hold Ctrl-C: if the
            interpreter ends while a thread compiles, Triton's bindings (nanobind) write what they have leaked.
    """
    token = _variants.set(set())
    pool = _CompilingPool(min(_MAX_THREADS, os.cpu_count() or 1))
    try:
        with pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            try:
                yield
                pool.await_all(tell)
                # Triton would do it, but a Ctrl-C while it waits would leave it in this mode.
                pool.shutdown()
            except BaseException:
                with waiting():
                    pool.shutdown(cancel_futures=True)
                raise
    finally:
        _variants.reset(token)


class _CompilingPool(ThreadPoolExecutor):
    """Compiles kernels and the C functions that launch them, and counts them."""

    def __init__(self, max_workers: int):
        super().__init__(max_workers)
        self._futures: list[Future] = []

    def submit(self, compile_kernel: Callable, /, *args: Any, **options: Any) -> Future:
        """Triton calls this without further arguments."""
        self._futures.append(future := super().submit(_compile_with_launcher, compile_kernel))
        return future

    def await_all(self, tell: Callable[[int, int], None] | None) -> None:
        for i, future in enumerate(self._futures):
            if tell is not None:
                tell(i, len(self._futures))
            wait([future])


def _compile_with_launcher(compile_kernel: Callable):
    """The kernel. Triton 3.6 compiles a C function for its arguments at the first launch, which takes a tenth of a
    second or more. Doing it here leaves the function on the disk, where the launch finds it."""
    kernel = compile_kernel()
    with suppress(Exception):  # The first launch tries again.
        driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _compile(variants: set, kernel, grid: tuple[int, ...], *args, **options) -> None:
    variant = (kernel, *map(_kind, args), *options.items())
    # Triton has this check too, but it takes a hundred times as long, and a model asks once a layer.
    if variant not in variants:
        variants.add(variant)
        kernel.warmup(*args, grid=grid, **options)


def _kind(arg):
    """What of an argument selects the variant, at least."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, arg.bit_length() > 31
    return type(arg)
