"""Linear layers of a decode batch of up to 128 tokens, with the activation or the residual addition that follows.

Such a product takes a few microseconds, in which the weights are read. So the weights must be requested early, and all
multiprocessors must read equal shares of them. A program computes up to 64 tokens with some rows of the weight and one
split of K. It prefetches its weights into L2 while the kernel before it still runs.

Weights in e4m3 are converted to x's dtype on their way to the tensor cores. There they are the first factor, which may
come from registers.

Splits are combined without a second launch. Each program writes its sum in float32 and counts itself as arrived. The
last one adds all sums, always in the order of the splits, so equal calls give equal bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.dependent_launch import CACHE_LINE, gdc_launch_dependents, gdc_wait, has_pdl, prefetch_lines
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.linear_checks import BLOCK, check_layer, check_result

DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT = 16  # columns; other rows are read two bytes at a time
# The rows of Hopper's tensor-core instruction. Fewer tokens are padded.
TILE_TOKENS = 64
MAX_TOKENS = 2 * TILE_TOKENS
_NUM_WARPS = 4
# Counters for launches with splits, one a tile of results.
_MAX_SPLIT_TILES = 1024
_MIN_TILE_ROWS = 16
# So many rows of a weight have counters at every number of tokens and in the smallest tiles.
MAX_ROWS = _MAX_SPLIT_TILES * _MIN_TILE_ROWS * TILE_TOKENS // MAX_TOKENS


class SplitKConfig(NamedTuple):
    """Launch constants, the first three powers of two."""

    tile_rows: int  # weight rows of a program, at least 16; with `silu` two make one output column
    tile_k: int  # columns of a step, at least 16
    splits: int  # programs among which K is divided
    # Of the load pipeline. A stage holds tile_k columns of TILE_TOKENS of x and of tile_rows of the weight; all must
    # fit in 227 KiB.
    num_stages: int
    prefetch: int  # first columns of its split that a program prefetches into L2 while it waits; 0 for none


def make_arrivals(device: torch.device | str | None = None) -> Tensor:
    """The counters that launches with splits share: int32, zero, as every launch leaves them. Allocate once, outside
    any CUDA graph; launches that may run at the same time (other streams, other engines) need their own."""
    return torch.zeros(_MAX_SPLIT_TILES, dtype=torch.int32, device=device)


@triton.jit
def _prefetch(weight, row, inside, first_row, first_k, K: tl.constexpr, COLUMNS: tl.constexpr, LINE: tl.constexpr):
    """Ask COLUMNS of the given rows into L2, from first_k on, a cache line of LINE elements at a time."""
    # Columns come in the largest power of two that divides them.
    CHUNK: tl.constexpr = COLUMNS & -COLUMNS
    column = tl.arange(0, CHUNK // LINE) * LINE
    for start in tl.static_range(0, COLUMNS, CHUNK):
        offset = row.to(tl.int64)[:, None] * K + (first_k + start + column)[None, :]
        # The instruction has no mask: instead of what lies outside, the tile's first line is asked for.
        within = inside[:, None] & (first_k + start + column < K)[None, :]
        prefetch_lines(weight + tl.where(within, offset, first_row.to(tl.int64) * K))


# Every batch has another number of tokens; specialising on it would compile the kernel again.
@triton.jit(do_not_specialize=["M"])
def split_k_kernel(
    x, weight, weight_scale, bias, y, partial, arrivals, M, N, x_stride, y_stride,
    K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, K_TILE: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_K: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr,
    BLOCK: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [M, N] = x W^T + bias, y += that with ADD, or silu(gate) * up of it with SILU. BLOCK: columns and rows of W
    that share a scale, a multiple of K_TILE; 0 if rows do."""
    if PDL:
        gdc_launch_dependents()
    tile, split, token_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, ROWS)
    if SILU:
        # Even rows of the tile are gates, from the weight's first N rows, odd ones the ups that belong to them: a
        # thread's results are pairs.
        OUTPUTS: tl.constexpr = ROWS // 2
        column = tile * OUTPUTS + row // 2
        weight_row = column + row % 2 * N
    else:
        OUTPUTS: tl.constexpr = ROWS
        column = tile * OUTPUTS + row
        weight_row = column
    inside_rows = column < N
    first_k = split * SPLIT_K
    if PDL and PREFETCH > 0:
        _prefetch(weight, weight_row, inside_rows, tile * OUTPUTS, first_k, K, PREFETCH, LINE)
    if BLOCK > 0:
        block_row = weight_scale + weight_row // BLOCK * (K // BLOCK)
    elif weight_scale is not None:
        row_scale = tl.load(weight_scale + weight_row, mask=inside_rows, other=0.0)
    if bias is not None:
        shift = tl.load(bias + weight_row, mask=inside_rows, other=0.0).to(tl.float32)
    # Above this line nothing may be read that a kernel writes, and nothing may be written (see dependent_launch).
    if PDL:
        gdc_wait()

    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    inside_y = (token < M)[:, None] & (output < N)[None, :]
    y_tile = y + token[:, None] * y_stride + output[None, :]
    if ADD and SPLITS == 1:
        residual = tl.load(y_tile, mask=inside_y, other=0.0)

    k = first_k + tl.arange(0, K_TILE)
    x_tile = x + token[:, None] * x_stride + k[None, :]
    weight_tile = weight + weight_row.to(tl.int64)[:, None] * K + k[None, :]
    inside_tokens = (token < M)[:, None]
    inside_rows = inside_rows[:, None]
    if weight_scale is not None:
        acc = tl.zeros([ROWS, TOKENS], dtype=tl.float32)
    else:
        acc = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
    for start in range(0, SPLIT_K, K_TILE):
        if SPLITS * SPLIT_K == K:
            x_mask, weight_mask = inside_tokens, inside_rows
        else:
            inside_k = (k < K - start)[None, :]
            x_mask, weight_mask = inside_tokens & inside_k, inside_rows & inside_k
        values = tl.load(x_tile + start, mask=x_mask, other=0.0)
        weights = tl.load(weight_tile + start, mask=weight_mask, other=0.0)
        if BLOCK > 0:
            # The last split may end beyond K, in no block.
            block = tl.minimum((first_k + start) // BLOCK, K // BLOCK - 1)
            block_scale = tl.load(block_row + block, mask=column < N, other=0.0)
            acc += tl.dot(weights.to(values.dtype), tl.trans(values)) * block_scale[:, None]
        elif weight_scale is not None:
            acc = tl.dot(weights.to(values.dtype), tl.trans(values), acc)
        else:
            acc = tl.dot(values, tl.trans(weights), acc)
    if weight_scale is not None:
        acc = tl.trans(acc)

    if SPLITS > 1:
        tile += token_tile * tl.num_programs(0)  # of the results: its number among all
        sums = partial + tile * (SPLITS * TOKENS * ROWS) + tl.arange(0, TOKENS)[:, None] * ROWS + row[None, :]
        tl.store(sums + split * (TOKENS * ROWS), acc, mask=inside_tokens)
        # One thread does the atomic: it may release the stores of all only after all have made theirs.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        # Everyone has counted, so the counter can go back to zero for the next launch.
        tl.store(arrivals + tile, 0)
        if ADD:
            residual = tl.load(y_tile, mask=inside_y, other=0.0)
        # ".cg" goes past L1, which need not know what other multiprocessors wrote.
        acc = tl.load(sums, mask=inside_tokens, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            acc += tl.load(sums + other * (TOKENS * ROWS), mask=inside_tokens, other=0.0, cache_modifier=".cg")
    if BLOCK == 0 and weight_scale is not None:
        acc *= row_scale[None, :]
    if bias is not None:
        acc += shift[None, :]
    if SILU:
        # Rounded, as it would be between two kernels.
        acc = acc.to(y.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.reshape(acc, (TOKENS, OUTPUTS, 2)))
        acc = gate / (1.0 + tl.exp(-gate)) * up
    if ADD:
        acc += residual.to(tl.float32)
    tl.store(y_tile, acc.to(y.dtype.element_ty), mask=inside_y)


def split_k(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    bias: Tensor | None,
    config: SplitKConfig,
    arrivals: Tensor,
    *,
    weight_scale: Tensor | None = None,
    silu: bool = False,
    add: bool = False,
    pdl: bool = False,
) -> None:
    """`y = x W^T + bias`, summed in float32 and rounded once.

    Rows of x don't influence each other. Another number of tokens may round differently.

    Args:
        x: `[M, K]`, M in 1..MAX_TOKENS, bfloat16 or float16, any row stride. Rows of a multiple of 8 elements, 8
            elements apart and aligned to 16 bytes, are read fast.
        weight: `[N, K]`, contiguous, of x's dtype, or of e4m3.
        y: `[M, N]` of x's dtype, any row stride; shares no memory with x.
        bias: `[N]`, any float dtype, or None.
        arrivals: from `make_arrivals`.
        weight_scale: of a weight in e4m3: float32 `[N, 1]`, or `[N / 128, K / 128]` of blocks, with a tile_k of at most
            128; else None.
        silu: whether y `[M, N / 2]` becomes `silu(gate) * up` (Shazeer 2020) instead. The weight holds the gate's N / 2
            rows and then the up's. Both results are rounded to x's dtype in between.
        add: whether the result is added to y, before it is rounded.
        pdl: programmatic dependent launch (see `dependent_launch`). Weights and biases are read before the wait.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    check_layer(x, weight, bias, MAX_TOKENS, weight_scale)
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be bfloat16 or float16, not {x.dtype}")
    check_result(y, x, weight, silu)
    (M, N), (num_rows, K) = y.shape, weight.shape
    token_tiles = triton.cdiv(M, TILE_TOKENS)
    rows, k_tile, splits, num_stages, prefetch = config
    row_tiles, partial = triton.cdiv(num_rows, rows), None
    if splits > 1:
        tiles = row_tiles * token_tiles
        if arrivals.numel() < tiles:
            raise ValueError(f"arrivals must hold the counters of {tiles} tiles, not {arrivals.numel()}")
        partial = torch.empty(tiles * splits * TILE_TOKENS * rows, dtype=torch.float32, device=x.device)
    split_size = triton.cdiv(triton.cdiv(K, k_tile), splits) * k_tile
    line = CACHE_LINE // weight.element_size()
    block = 0 if weight_scale is None or weight_scale.shape == (num_rows, 1) else BLOCK
    if block and k_tile > block:
        raise ValueError(f"config must have a tile_k of at most {block} for a weight in blocks, not {k_tile}")
    launcher(split_k_kernel, (row_tiles, splits, token_tiles), pdl and has_pdl(x.device))(
        x, weight, weight_scale, bias, y, partial, arrivals if splits > 1 else None, M, N, x.stride(0), y.stride(0),
        K=K, TOKENS=TILE_TOKENS, ROWS=rows, K_TILE=k_tile, SPLITS=splits, SPLIT_K=split_size,
        PREFETCH=triton.cdiv(min(prefetch, split_size), line) * line, LINE=line, BLOCK=block,
        SILU=silu, ADD=add, num_warps=_NUM_WARPS, num_stages=num_stages,
    )  # fmt: skip
