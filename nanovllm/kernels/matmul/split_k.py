"""Linear layers of a decode batch, with the activation or the residual addition that follows.

Such a product takes a few microseconds, in which the weights are read. So the weights must be requested early, and all
multiprocessors must read equal shares of them. A program computes a tile of tokens with some rows of the weight and one
split of K. It prefetches its weights into L2 while the kernel before it still runs.

Products of e4m3 numbers may have any number of tokens. Their first factor is the weight, because the tensor cores
multiply at least 64 rows of the first factor, and as few as 8 columns of the second.

Splits are combined without a second launch. Each program writes its sum in float32 and counts itself as arrived. The
last one adds all sums, always in the order of the splits, so equal calls give equal bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import CACHE_LINE, gdc_launch_dependents, gdc_wait, has_pdl, prefetch_lines
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.linear_checks import BLOCK, check_layer, check_result, check_scaled_layer
from nanovllm.kernels.shared_memory import fitting_stages
from nanovllm.kernels.triton_stub import tl, triton

DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT = 16  # columns; other rows are read two bytes at a time
# The rows of Hopper's tensor-core instruction. Fewer tokens are padded.
TILE_TOKENS = 64
MAX_TOKENS = 2 * TILE_TOKENS  # of x and weights that are not in e4m3; see `max_tokens`
_FEW_ROWS, _MAX_TOKENS_OF_FEW_ROWS = 64, 1024  # such as those of a router
# Counters for launches with splits, one a tile of results.
_MAX_SPLIT_TILES = 1024
_MIN_TILE_ROWS = 16
# So many rows of a weight have counters at every number of tokens and in the smallest tiles.
MAX_ROWS = _MAX_SPLIT_TILES * _MIN_TILE_ROWS * TILE_TOKENS // MAX_TOKENS


class SplitKConfig(NamedTuple):
    """Launch constants, all but the prefetch and the stages powers of two."""

    tile_rows: int  # weight rows of a program, at least 16; with `silu` two make one output column
    tile_k: int  # columns of a step, at least 16
    splits: int  # programs among which K is divided
    num_stages: (
        int  # of the load pipeline; each holds tile_k columns of tile_tokens of x and of tile_rows of the weight
    )
    prefetch: int  # first columns of its split that a program prefetches into L2 while it waits; 0 for none
    tile_tokens: int = TILE_TOKENS  # at least 16
    num_warps: int = 4

    def fitted(self, itemsize: int, device: torch.device) -> "SplitKConfig | None":
        """These constants, with as many stages as the card's shared memory holds; None if it does not hold two.
        itemsize: bytes of a number of x and of the weight."""
        stage_bytes = itemsize * self.tile_k * (self.tile_rows + self.tile_tokens)
        num_stages = fitting_stages(stage_bytes, self.num_stages, device)
        return self._replace(num_stages=num_stages) if num_stages else None


def max_tokens(num_rows: int) -> int:
    """Of x and a weight with so many rows that are not in e4m3. A weight with few rows is few tiles, which most
    multiprocessors would have no part of without splits, whatever the number of tokens."""
    return _MAX_TOKENS_OF_FEW_ROWS if num_rows <= _FEW_ROWS else MAX_TOKENS


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


@triton.jit
def _load_scales(of_rows, of_tokens, k, group_stride, K: tl.constexpr, BLOCK: tl.constexpr):
    """The scales of column k's block. of_rows, of_tokens: pointers to the first block's. Columns beyond K are zeros, so
    any scale does for them."""
    block = tl.minimum(k // BLOCK, K // BLOCK - 1)
    return tl.load(of_rows + block), tl.load(of_tokens + block * group_stride)


# Every batch has another number of tokens; specialising on it would compile the kernel again.
@triton.jit(do_not_specialize=["M", "group_stride"])
def split_k_kernel(
    x, x_scale, weight, weight_scale, bias, y, partial, arrivals, M, N, x_stride, scale_stride, group_stride, y_stride,
    K: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, K_TILE: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_K: tl.constexpr, PREFETCH: tl.constexpr, LINE: tl.constexpr,
    BLOCK: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [M, N] = x W^T + bias, y += that with ADD, or silu(gate) * up of it with SILU. BLOCK: columns and rows of W
    that share a scale, as do as many columns of a token, a multiple of K_TILE; 0 if rows and tokens have one each.
    scale_stride, group_stride: between tokens' scales, and between those of a token."""
    if PDL:
        gdc_launch_dependents()
    if x_scale is None:
        tile, split, token_tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    else:
        # Programs with the same weights are neighbours, so that L2 has these for all of them.
        token_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, ROWS)
    if SILU:
        # Even rows of the tile are gates, from the weight's first N rows, odd ones the ups that belong to them: a
        # thread's results are pairs.
        OUTPUTS: tl.constexpr = ROWS // 2
        column = tile * OUTPUTS + row // 2
        weight_row = column + row % 2 * N
    else:
        OUTPUTS: tl.constexpr = ROWS  # type: ignore[no-redef]
        column = tile * OUTPUTS + row
        weight_row = column
    inside_rows = column < N
    first_k = split * SPLIT_K
    if PDL and PREFETCH > 0:
        _prefetch(weight, weight_row, inside_rows, tile * OUTPUTS, first_k, K, PREFETCH, LINE)
    if BLOCK > 0:
        # Those of rows and tokens that do not exist are never stored, so any scale does for them too.
        row_scales = weight_scale + tl.where(inside_rows, weight_row, 0) // BLOCK * (K // BLOCK)
    elif weight_scale is not None:
        row_scale = tl.load(weight_scale + weight_row, mask=inside_rows, other=0.0)
    if bias is not None:
        shift = tl.load(bias + weight_row, mask=inside_rows, other=0.0).to(tl.float32)
    # Above this line nothing may be read that a kernel writes, and nothing may be written (see dependent_launch).
    if PDL:
        gdc_wait()

    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    if x_scale is not None:
        token_scales = x_scale + tl.minimum(token, M - 1) * scale_stride
        token = token.to(tl.int64)  # A long prefill's y may have more than 2^31 elements.
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
    acc = tl.zeros([TOKENS, ROWS] if x_scale is None else [ROWS, TOKENS], dtype=tl.float32)
    if BLOCK > 0:
        scales = _load_scales(row_scales, token_scales, first_k, group_stride, K, BLOCK)
    for start in range(0, SPLIT_K, K_TILE):
        if SPLITS * SPLIT_K == K:
            x_mask, weight_mask = inside_tokens, inside_rows
        else:
            inside_k = (k < K - start)[None, :]
            x_mask, weight_mask = inside_tokens & inside_k, inside_rows & inside_k
        values = tl.load(x_tile + start, mask=x_mask, other=0.0)
        weights = tl.load(weight_tile + start, mask=weight_mask, other=0.0)
        if BLOCK > 0:
            of_rows, of_tokens = scales
            # The pipeline loads early only what is multiplied, so the next step's scales are requested here.
            scales = _load_scales(row_scales, token_scales, first_k + start + K_TILE, group_stride, K, BLOCK)
            acc += tl.dot(weights, tl.trans(values)) * of_rows[:, None] * of_tokens[None, :]
        elif x_scale is not None:
            # Tensor cores add up e4m3 products with 14 bits, as in torch's products with fast accumulation.
            acc = tl.dot(weights, tl.trans(values), acc)
        else:
            acc = tl.dot(values, tl.trans(weights), acc)
    if x_scale is not None:
        acc = tl.trans(acc)

    if SPLITS > 1:
        # Of the results: its number among all.
        if x_scale is None:
            tile += token_tile * tl.num_programs(0)
        else:
            tile = tile * tl.num_programs(0) + token_tile
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
    if BLOCK == 0 and x_scale is not None:
        acc = acc * tl.load(token_scales)[:, None] * row_scale[None, :]
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
    arrivals: Tensor | None,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    silu: bool = False,
    add: bool = False,
    pdl: bool = False,
) -> None:
    """`y = x W^T + bias`, summed in float32 and rounded once.

    Rows of x don't influence each other. Another number of tokens may round differently.

    Args:
        x: `[M, K]`, M in 1..max_tokens(N), bfloat16 or float16, any row stride; or of any M, in e4m3. Rows of a
            multiple of 16 bytes, 16 bytes apart and aligned to as many, are read fast.
        weight: `[N, K]`, contiguous, of x's dtype.
        y: `[M, N]`, bfloat16 or float16, as x if that is neither in e4m3; any row stride; shares no memory with x.
        bias: `[N]`, any float dtype, or None.
        config: with scales, K is not split if the result has more tiles than `arrivals` has counters.
        arrivals: from `make_arrivals`; None if config has one split.
        x_scale, weight_scale: of x and weight in e4m3: float32 `[M, 1]` and `[N, 1]`; or `[M, K / 128]` of any strides
            and `[N / 128, K / 128]` of blocks, with a tile_k of at most 128. Else None.
        silu: whether y `[M, N / 2]` becomes `silu(gate) * up` (Shazeer 2020) instead. The weight holds the gate's N / 2
            rows and then the up's. Both results are rounded to y's dtype in between.
        add: whether the result is added to y, before it is rounded.
        pdl: programmatic dependent launch (see `dependent_launch`). Weights and biases are read before the wait.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    if weight_scale is None:
        check_layer(x, weight, bias, max_tokens(len(weight)))
        if x_scale is not None:
            raise ValueError("weight_scale must be given if x_scale is")
        dtype = x.dtype
    else:
        check_scaled_layer(x, x_scale, weight, weight_scale, bias)
        dtype = y.dtype
    if dtype not in DTYPES:
        raise ValueError(f"{'x' if weight_scale is None else 'y'} must be bfloat16 or float16, not {dtype}")
    check_result(y, x, weight, silu, dtype)
    (M, N), (num_rows, K) = y.shape, weight.shape
    rows, k_tile, splits, num_stages, prefetch, tokens, num_warps = config
    row_tiles, token_tiles, partial = triton.cdiv(num_rows, rows), triton.cdiv(M, tokens), None
    tiles = row_tiles * token_tiles
    num_counters = 0 if arrivals is None else arrivals.numel()
    if weight_scale is not None and tiles > num_counters:
        splits = 1
    if splits > 1:
        if tiles > num_counters:
            raise ValueError(f"arrivals must hold the counters of {tiles} tiles, not {num_counters}")
        partial = torch.empty(tiles * splits * tokens * rows, dtype=torch.float32, device=x.device)
    split_size = triton.cdiv(triton.cdiv(K, k_tile), splits) * k_tile
    line = CACHE_LINE // weight.element_size()
    block = 0 if weight_scale is None or weight_scale.shape == (num_rows, 1) else BLOCK
    if block and k_tile > block:
        raise ValueError(f"config must have a tile_k of at most {block} for a weight in blocks, not {k_tile}")
    grid = (row_tiles, splits, token_tiles) if weight_scale is None else (token_tiles, row_tiles, splits)
    scale_strides = (None, None) if x_scale is None else x_scale.stride()
    launcher(split_k_kernel, grid, pdl and has_pdl(x.device))(
        x, x_scale, weight, weight_scale, bias, y, partial, arrivals if splits > 1 else None, M, N, x.stride(0),
        *scale_strides, y.stride(0), K=K, TOKENS=tokens, ROWS=rows, K_TILE=k_tile, SPLITS=splits, SPLIT_K=split_size,
        PREFETCH=triton.cdiv(min(prefetch, split_size), line) * line, LINE=line, BLOCK=block,
        SILU=silu, ADD=add, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
