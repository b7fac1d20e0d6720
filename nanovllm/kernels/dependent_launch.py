"""Programmatic dependent launch: a kernel that starts while the one before it on the stream still runs.

`gdc_launch_dependents` lets the next kernel's programs in as soon as there is room for them; `gdc_wait` holds a program
until all of the preceding launch has finished and what that wrote is visible. Hence the rule for every kernel that is
launched so: in each of its programs, gdc_wait comes before the first read of anything that a launch still under way may
write, and before the first write; programs with nothing to do may leave without it, if one waits. Then a launch ends
only after the one before it has, which ended after the one before that: waiting for the neighbour is waiting for all.
Ordinary launches may stand in between, they wait for everything.

What a kernel reads before its wait it gets for nothing: weights, what the host sent before the step, and what a kernel
wrote before an ordinary launch that came in between. Messages that say themselves whether they are there
(`posted_sums`) may be read at any time. Kernels that read nothing early save the launch itself, one to two
microseconds, and need no such care.
"""

from functools import cache

import torch
import triton
import triton.language as tl

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

    HAS_GDC = True
except ImportError:  # older Triton; the compiler looks the names up even in a branch that it won't take
    gdc_launch_dependents = gdc_wait = tl.debug_barrier
    HAS_GDC = False


CACHE_LINE = 128  # bytes


@triton.jit
def prefetch_lines(pointers):
    """Ask the cache lines that the pointers lie in into L2. Not in Triton's interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Let the next kernel in, and wait for the one before: the beginning of a kernel that reads nothing early."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@cache
def has_pdl(device: torch.device) -> bool:
    """Whether dependent launches exist: on Hopper or newer, if Triton has them, not in its interpreter."""
    return (
        device.type == "cuda"
        and HAS_GDC
        and isinstance(await_previous, triton.JITFunction)
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )
