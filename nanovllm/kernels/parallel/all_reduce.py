"""Sum over tensor-parallel GPUs, residual addition and RMS norm in one launch, over memory that all GPUs map.

Every rank reads all partial sums and adds them up itself, in float32 and in the order of ranks. So all ranks get the
same bits. `posted_sums` is faster for few tokens.

It computes `residual += sum of the ranks' parts` and returns `residual / sqrt(mean(residual^2) + eps) * weight`, both
rounded once. All ranks must call it with the same shapes: they wait for each other. Arguments:
    residual: `[num_tokens, hidden]`, contiguous, the same on all ranks; overwritten.
    weight, eps: `[hidden]`, of residual's dtype or float32; and what is added to the mean square.
    abort: int32 `[1]`; a value other than 0 ends all waiting, and the results then mean nothing.
    rank: this rank.
"""

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.triton_stub import tl, triton

# The most programs of a pull. Each one waits for its peers once, and fewer do not use all of NVLink.
MAX_PULL_PROGRAMS = 256


@triton.jit
def _signal(flag, abort):
    """Set a flag of another rank, after its owner has cleared it."""
    old = 1
    while (old != 0) & (tl.load(abort, volatile=True) == 0):
        old = tl.atomic_cas(flag, 0, 1, sem="release", scope="sys")


@triton.jit
def _await(flag, abort):
    """Wait for a flag of this rank, and clear it."""
    old = tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys")
    while (old != 1) & (tl.load(abort, volatile=True) == 0):
        old = tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys")


@triton.jit
def _store_sum_and_norm(total, residual, y, row, mask, scale, eps, HIDDEN: tl.constexpr):
    """Round the sum into the residual stream, and store its RMS norm."""
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual + row, rounded, mask=mask)
    value = rounded.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
    tl.store(y + row, (value * inverse_rms * scale).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
def _pull_kernel(
    buffers, flags, abort, residual, weight, y, num_tokens, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    await_previous(PDL)
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
            _signal(theirs + program * SIZE + RANK, abort)
    own = tl.load(flags + RANK).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(SIZE):
        if peer != RANK:
            _await(own + program * SIZE + peer, abort)
    tl.debug_barrier()

    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    # After an abort the other ranks' memory may be gone.
    reachable = column < tl.where(tl.load(abort, volatile=True) == 0, HIDDEN, 0)
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    stride = tl.full([1], HIDDEN, tl.int64)
    for token in range(program, num_tokens, tl.num_programs(0)):
        row = token * stride + column
        total = tl.load(residual + row, mask=mask, other=0.0).to(tl.float32)
        for rank in tl.static_range(SIZE):
            buffer = tl.load(buffers + rank).to(tl.pointer_type(residual.dtype.element_ty))
            # The compiler does not know that an address from memory is aligned, and would load two bytes at a time.
            buffer = tl.multiple_of(buffer, 16)
            total += tl.load(buffer + row, mask=reachable, other=0.0).to(tl.float32)
        _store_sum_and_norm(total, residual, y, row, mask, scale, eps, HIDDEN)


def pull_add_norm(
    buffers: Tensor, flags: Tensor, abort: Tensor, rank: int, residual: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """The sum of the ranks' buffers. The programs of all ranks wait for each other, then read their rows from each
    other's memory.

    A buffer may be written again once another pull has begun on all ranks, because all ranks have then finished this
    one. So two buffers that take turns are enough.

    Args:
        buffers: int64 `[size]`, addresses of the ranks' partial sums, each like residual.
        flags: int64 `[size]`, addresses of the ranks' flags, int32 `[MAX_PULL_PROGRAMS, size]` each, zero at first.
    """
    num_tokens, hidden = residual.shape
    y = torch.empty_like(residual)
    block = triton.next_power_of_2(hidden)
    launcher(_pull_kernel, (min(num_tokens, MAX_PULL_PROGRAMS),), has_pdl(residual.device))(
        buffers, flags, abort, residual, weight, y, num_tokens, eps,
        RANK=rank, SIZE=len(buffers), HIDDEN=hidden, BLOCK=block, num_warps=min(max(block // 256, 1), 16),
    )  # fmt: skip
    return y


def add_norm_torch(residual: Tensor, partials: list[Tensor], weight: Tensor, eps: float) -> Tensor:
    """The twin, for partial sums in this process."""
    total = residual.float()
    for partial in partials:
        total = total + partial.float()
    return rms_norm.twin(residual.copy_(total), weight, eps)
