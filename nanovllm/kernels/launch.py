"""Launching a kernel, and compiling it before it is needed, together with others.

Triton compiles a variant of a kernel when it is launched for the first time, a third of a second and more each, and
an engine takes about forty: one after the other that is most of a first start. Most of a compilation is LLVM's and
ptxas's, which run without the interpreter's lock, so threads do it side by side.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from functools import partial

import triton
from torch import Tensor
from triton.runtime import driver

_MAX_THREADS = 16

_variants: ContextVar[set | None] = ContextVar("nanovllm_compiled_variants", default=None)


def launcher(kernel, grid: tuple[int, ...], pdl: bool | None = None) -> Callable[..., None]:
    """`kernel[grid]`, to be called with the kernel's arguments. Inside `compile_ahead` the call launches nothing: it
    has the variant compiled that it would have launched.

    pdl: for a kernel with the constant PDL, which this fills in: whether it is launched as `dependent_launch` says.
    """
    launch = kernel[grid] if _variants.get() is None else partial(_compile, kernel, grid)
    if pdl is None:
        return launch
    return partial(launch, PDL=True, launch_pdl=True) if pdl else partial(launch, PDL=False)


def is_compiling_ahead() -> bool:
    """Whether this is within `compile_ahead`, in its thread."""
    return _variants.get() is not None


@contextmanager
def compile_ahead(tell: Callable[[int, int], None] | None = None) -> Iterator[None]:
    """In this block, and in this thread, kernels that go through `launcher` are compiled instead of launched, so their
    outputs hold anything. Other threads compile while the block goes on; it ends when they have finished, or, with an
    exception, when they have finished what they are at. tell: called with how many variants are compiled, and how many
    there are, while the block waits for them.

    A kernel that does not compile is left to its first launch, which says why. Triton before 3.4 does not compile in
    threads: there each call waits for its variant.
    """
    token = _variants.set(set())
    try:
        with _CompilingPool(min(_MAX_THREADS, os.cpu_count() or 1)) as pool, _compiling_in(pool):
            try:
                yield
                pool.await_all(tell)
                # Not left to Triton, which would stay in this mode after a Ctrl-C in its own waiting.
                pool.shutdown()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        _variants.reset(token)


class _CompilingPool(ThreadPoolExecutor):
    """Compiles kernels, and the C functions that launch them, and knows how many it has done."""

    def __init__(self, max_workers: int):
        super().__init__(max_workers)
        self._futures: list[Future] = []

    def submit(self, compile_kernel: Callable) -> Future:
        self._futures.append(future := super().submit(_compile_with_launcher, compile_kernel))
        return future

    def await_all(self, tell: Callable[[int, int], None] | None) -> None:
        for i, future in enumerate(self._futures):
            if tell is not None:
                tell(i, len(self._futures))
            wait([future])


def _compile_with_launcher(compile_kernel: Callable):
    """The kernel. Triton 3.6 has a C compiler make a function for its arguments, a tenth of a second and more, only
    when it is launched for the first time. It keeps that on the disk, where the launch finds it."""
    kernel = compile_kernel()
    with suppress(Exception):  # What could not be made here is made there.
        driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def _compiling_in(pool: ThreadPoolExecutor):
    if hasattr(triton, "AsyncCompileMode"):
        return triton.AsyncCompileMode(pool, ignore_errors=True)
    return nullcontext()


def _compile(kernel, grid: tuple[int, ...], *args, **options) -> None:
    variants = _variants.get()
    variant = (kernel, *map(_kind, args), *options.items())
    # Triton would find out as well, but takes a hundred times as long, and a model asks once a layer.
    if variant not in variants:
        variants.add(variant)
        kernel.warmup(*args, grid=grid, **options)


def _kind(arg):
    """What an argument has to say about the variant, at least."""
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, arg.bit_length() > 31
    return type(arg)
