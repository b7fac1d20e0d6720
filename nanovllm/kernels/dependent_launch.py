"""Programmatic dependent launch: a kernel that starts while the previous one on the stream still runs.

`gdc_launch_dependents` allows the next kernel's programs to start as soon as there is room for them. `gdc_wait` blocks
a program until the previous launch has finished and its writes are visible.

So every kernel that is launched this way follows a rule. In each program gdc_wait comes before the first write, and
before the first read of anything that an unfinished launch may write. Programs with nothing to do may return without
waiting, if at least one program waits. Then a launch ends only after the previous one has ended, so waiting for the
previous launch is waiting for all earlier ones. Ordinary launches may come in between; they wait for everything.

Before its wait a kernel may read weights, what the host sent before the step, and what was written before an ordinary
launch that came in between. It may also read messages that carry their own number (`posted_sums`). A kernel that reads
nothing early still saves one to two microseconds of launch time.
"""

import torch

from nanovllm.kernels import HAS_TRITON
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.triton_stub import gdc_launch_dependents, gdc_wait, tl, triton

CACHE_LINE = 128  # bytes


@triton.jit
def prefetch_lines(pointers):
    """Request the cache lines of these pointers into L2. Not in Triton's interpreter."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def await_previous(PDL: tl.constexpr):
    """Allow the next kernel to start, and wait for the previous one: for kernels that read nothing early."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


_IS_COMPILED = HAS_TRITON and isinstance(await_previous, triton.JITFunction)


def has_pdl(device: torch.device) -> bool:
    """Whether dependent launches are available: on Hopper or newer, not interpreted."""
    return _IS_COMPILED and GpuFacts.of(device).has_pdl
