"""Sum over tensor-parallel GPUs, residual addition and RMS norm in one launch, over memory that all GPUs map.

Every rank has written its partial sums to its own buffer. A program meets the programs of the same number on the other
ranks, then reads the rows that are its share from all buffers, its own and the others' through NVLink, and adds them up
in float32. Each rank reads all and sends nothing ("one shot"): the least latency there is, and for two ranks also the
least traffic. All ranks add in the same order, so that they come to the same bits.

A buffer may be written again once another reduction has begun on all ranks, because then all have ended this one: two
buffers in turn are enough, and one meeting a launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs of a launch at most: each costs a meeting, and few keep NVLink busy.
MAX_PROGRAMS = 128


@triton.jit
def _signal(flag, abort):
    """Raise a flag of another rank, once its owner has taken down the last one."""
    old = tl.atomic_cas(flag, 0, 1, sem="release", scope="sys")
    while (old != 0) & (tl.load(abort, volatile=True) == 0):
        old = tl.atomic_cas(flag, 0, 1, sem="release", scope="sys")


@triton.jit
def _await(flag, abort):
    """Wait for an own flag, and take it down."""
    old = tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys")
    while (old != 1) & (tl.load(abort, volatile=True) == 0):
        old = tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys")


@triton.jit(do_not_specialize=["num_tokens"])
def _all_reduce_add_norm_kernel(
    buffers,
    flags,
    abort,
    residual,
    weight,
    y,
    num_tokens,
    eps,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
            _signal(theirs + program * SIZE + RANK, abort)
    own = tl.load(flags + RANK).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            _await(own + program * SIZE + peer, abort)
    tl.debug_barrier()

    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    for token in range(program, num_tokens, tl.num_programs(0)):
        row = token.to(tl.int64) * HIDDEN + columns
        total = tl.load(residual + row, mask=mask, other=0.0).to(tl.float32)
        for rank in tl.static_range(SIZE):
            # An address from memory could be odd, as far as the compiler knows: then it would load two bytes at a time.
            buffer = tl.load(buffers + rank).to(tl.pointer_type(residual.dtype.element_ty))
            buffer = tl.multiple_of(buffer, 16)
            total += tl.load(buffer + row, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        rounded = total.to(residual.dtype.element_ty)
        tl.store(residual + row, rounded, mask=mask)
        value = rounded.to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
        tl.store(y + row, (value * inverse_rms * scale).to(y.dtype.element_ty), mask=mask)


def all_reduce_add_norm(
    buffers: Tensor, flags: Tensor, abort: Tensor, rank: int, residual: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """`residual += sum of the buffers`, then `residual / sqrt(mean(residual^2) + eps) * weight`.

    Args:
        buffers: int64 `[size]`, addresses of the ranks' partial sums, each like residual, contiguous.
        flags: int64 `[size]`, addresses of the ranks' flags, int32 `[MAX_PROGRAMS, size]` each, zero to begin with.
        abort: int32 `[1]`; other than 0, it ends all waiting, and the results mean nothing.
        rank: this one's.
        residual: `[num_tokens, hidden]`, contiguous, the same on all ranks; overwritten.
        weight: `[hidden]`.
        eps: added to the mean square.

    Returns:
        Like residual. All ranks must call this with the same shapes, and wait for each other on their devices.
    """
    num_tokens, hidden = residual.shape
    y = torch.empty_like(residual)
    block = triton.next_power_of_2(hidden)
    _all_reduce_add_norm_kernel[(min(num_tokens, MAX_PROGRAMS),)](
        buffers,
        flags,
        abort,
        residual,
        weight,
        y,
        num_tokens,
        eps,
        RANK=rank,
        SIZE=len(buffers),
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),
    )
    return y
