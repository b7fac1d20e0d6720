"""Sums over tensor-parallel GPUs, residual addition and RMS norm in one launch, over memory that all GPUs map.

There are two ways. In one shot (`pull_add_norm`) every rank reads all parts and adds them up itself. In two shots
(`two_shot_add_norm`) every rank adds up a slice of the columns and writes the result to all ranks. With N ranks and
parts of B bytes, each rank reads (N - 1) B in one shot. In two shots it reads and writes (N - 1) B / N. So two shots
move fewer bytes with more than two ranks, but the ranks wait for each other twice. Both add in float32 and in the order
of ranks, so all ranks get the same bits, whichever way. `posted_sums` is faster for few tokens.

Both compute `residual += sum of the ranks' parts` and return `residual / sqrt(mean(residual^2) + eps) * weight`, both
rounded once. All ranks must call them with the same shapes: they wait for each other. Arguments:
    residual: `[num_tokens, hidden]`, contiguous, the same on all ranks; overwritten.
    weight, eps: `[hidden]`, of residual's dtype or float32; and what is added to the mean square.
    abort: int32 `[1]`; a value other than 0 ends all waiting, and the results then mean nothing.
    rank: this rank.
"""

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import CACHE_LINE, await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.triton_stub import tl, triton

# The most programs of a pull. Each one waits for its peers once, and fewer do not use all of NVLink.
MAX_PULL_PROGRAMS = 256
# The most programs of a sum in two shots. They read slices, which are shorter than the rows of a pull.
MAX_TWO_SHOT_PROGRAMS = 1024


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


@triton.jit
def _meet(theirs, own, number, abort, is_alive, rank, SIZE: tl.constexpr):
    """Tell all ranks that this one has reached the meeting with this number, and wait until all have. What they wrote
    before it can be read after it. Takes and returns whether the other ranks' memory may be used: not after an abort.

    theirs: the places of this rank's number at all ranks, a block like rank. own: those of all ranks' numbers here.
    """
    tl.debug_barrier()
    tl.atomic_xchg(theirs, number, mask=rank < tl.where(is_alive, SIZE, 0), sem="release", scope="sys")
    num_missing = 1
    while (num_missing > 0) & is_alive:
        # Loaded beside the numbers, not after them: both take about as long.
        is_alive = tl.load(abort, volatile=True) == 0
        reached = tl.atomic_add(own, 0, mask=rank < SIZE, sem="acquire", scope="sys")
        # A rank may have reached the next meeting already. The difference is right when numbers wrap around, too.
        num_missing = tl.sum(((reached - number < 0) & (rank < SIZE)).to(tl.int32), axis=0)
    tl.debug_barrier()
    return is_alive


@triton.jit(do_not_specialize=["num_tokens"])
def _two_shot_kernel(
    buffers, flags, abort, residual, weight, y, num_tokens, eps,
    RANK: tl.constexpr, SIZE: tl.constexpr, HIDDEN: tl.constexpr, SLICE: tl.constexpr,
    RANKS_BLOCK: tl.constexpr, SLICE_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    await_previous(PDL)
    rank = tl.arange(0, RANKS_BLOCK)
    tables = tl.load(flags + rank, mask=rank < SIZE, other=0).to(tl.pointer_type(tl.int32))
    theirs = tables + program * SIZE + RANK
    own = tl.load(flags + RANK).to(tl.pointer_type(tl.int32)) + program * SIZE
    parts = ()
    for peer in tl.static_range(SIZE):
        # The compiler does not know that an address from memory is aligned, and would load two bytes at a time.
        part = tl.load(buffers + peer).to(tl.pointer_type(residual.dtype.element_ty))
        parts += (tl.multiple_of(part, 16),)  # type: ignore[assignment]
    # Each program counts its own meetings, in the place of its own number. So the numbers follow each other whatever
    # was launched before, also from a CUDA graph.
    number = tl.load(own + RANK) + 1
    is_alive = tl.load(abort, volatile=True) == 0
    is_alive = _meet(theirs, own + rank, number, abort, is_alive, rank, SIZE)

    stride = tl.full([1], HIDDEN, tl.int64)
    column = RANK * SLICE + tl.arange(0, SLICE_BLOCK)
    mask = column < tl.where(is_alive, min(RANK * SLICE + SLICE, HIDDEN), 0)
    for token in range(program, num_tokens, tl.num_programs(0)):
        place = token * stride + column
        total = tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        for peer in tl.static_range(SIZE):
            total += tl.load(parts[peer] + place, mask=mask, other=0.0).to(tl.float32)
        # Nobody else reads these columns of the parts, so the sum can take their place.
        for i in tl.static_range(SIZE):
            tl.store(parts[(RANK + i) % SIZE] + place, total.to(residual.dtype.element_ty), mask=mask)
    _meet(theirs, own + rank, number + 1, abort, is_alive, rank, SIZE)

    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    for token in range(program, num_tokens, tl.num_programs(0)):
        row = token * stride + column
        total = tl.load(parts[RANK] + row, mask=mask, other=0.0).to(tl.float32)
        _store_sum_and_norm(total, residual, y, row, mask, scale, eps, HIDDEN)


def two_shot_add_norm(
    buffers: Tensor, flags: Tensor, abort: Tensor, rank: int, residual: Tensor, weight: Tensor, eps: float
) -> Tensor:
    """The sum of the ranks' buffers. Each rank adds up its columns of all buffers, and writes those of the new residual
    to all of them. Then each rank has all columns in its own buffer, and computes the norm.

    A buffer may be written again as soon as this sum is done on its own rank: no other rank uses it then.

    Args:
        buffers: int64 `[size]`, addresses of the ranks' partial sums, each like residual. Overwritten.
        flags: int64 `[size]`, addresses of the ranks' flags, int32 `[MAX_TWO_SHOT_PROGRAMS, size]` each, zero at first.
            Only this function may use them.
    """
    num_tokens, hidden = residual.shape
    size, y = len(buffers), torch.empty_like(residual)
    # Of whole cache lines, so that no line is written by two ranks.
    line = CACHE_LINE // residual.itemsize
    width = triton.cdiv(triton.cdiv(hidden, size), line) * line
    slice_block = triton.next_power_of_2(width)
    launcher(_two_shot_kernel, (min(num_tokens, MAX_TWO_SHOT_PROGRAMS),), has_pdl(residual.device))(
        buffers, flags, abort, residual, weight, y, num_tokens, eps,
        RANK=rank, SIZE=size, HIDDEN=hidden, SLICE=width, RANKS_BLOCK=triton.next_power_of_2(size),
        SLICE_BLOCK=slice_block, BLOCK=triton.next_power_of_2(hidden), num_warps=min(max(slice_block // 256, 4), 16),
    )  # fmt: skip
    return y


def add_norm_torch(residual: Tensor, partials: list[Tensor], weight: Tensor, eps: float) -> Tensor:
    """The twin, for partial sums in this process."""
    total = residual.float()
    for partial in partials:
        total = total + partial.float()
    return rms_norm.twin(residual.copy_(total), weight, eps)
