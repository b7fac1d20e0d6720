"""The kernel behind `decode_linear`: y = x W^T for the tokens of a decode batch, up to 256.

Such a product is short: reading the weights takes one to three microseconds, so what counts is how soon they are asked
for and how evenly the multiprocessors share the reading. A program takes a tile of tokens, some rows of the weight and,
where rows are few, one split of K; it asks its weights into L2 while the kernel before still runs.

Splits are combined without a second launch: each leaves its sum in float32 and counts itself in; the one that finds
all others there adds them up, always in the order of the splits, so equal calls give equal bits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.dependent_launch import (
    CACHE_LINE,
    gdc_launch_dependents,
    gdc_wait,
    has_pdl,
    prefetch_bulk,
    prefetch_lines,
)
from nanovllm.kernels.launch import launcher

MAX_TOKENS = 256
# Tiles of a launch with splits: more would keep every multiprocessor busy without.
MAX_SPLIT_TILES = 1024


class DecodeLinearConfig(NamedTuple):
    """Launch constants, all but num_stages powers of two.

    Attributes:
        tile_tokens: tokens of a program, at least 16; Hopper's own tensor-core instruction needs 64.
        tile_rows: weight rows of a program, at least 16; two make one output column of `linear_silu`.
        tile_k: columns of a step, at least 16.
        splits: programs among which K is divided.
        num_warps: warps a program, 4 or 8.
        num_stages: stages of the load pipeline; one holds (tile_tokens + tile_rows) * tile_k elements of 227 KiB.
        prefetch: bytes that the programs of a dependent launch ask of their weights at once while they wait: 128, a
            cache line, or more, if that divides a row's split; 0 for none.
    """

    tile_tokens: int
    tile_rows: int
    tile_k: int
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3
    prefetch: int = CACHE_LINE


def choose_config(M: int, N: int, K: int) -> DecodeLinearConfig:
    """The launch constants for M tokens and a weight [N, K]."""
    tile_tokens = 16 if M <= 16 else 32 if M <= 32 else 64
    tile_rows = 32 if M <= 64 else 64
    programs = triton.cdiv(M, tile_tokens) * triton.cdiv(N, tile_rows)
    splits = 1
    # An H200 has 132 multiprocessors; a split should be worth its keeping.
    while programs * splits * 2 <= 160 and splits * 1024 <= K:
        splits *= 2
    return DecodeLinearConfig(tile_tokens, tile_rows, min(128, max(16, triton.next_power_of_2(K))), splits)


def make_arrivals(device: torch.device | str) -> Tensor:
    """The counters that launches with splits share: int32, zero, as every launch leaves them. Allocate once, outside
    any CUDA graph; launches that may run at the same time (other streams, other engines) need their own."""
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)


@triton.jit
def _prefetch(
    weight,
    row,
    inside,
    first_row,
    first_k,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    BULK: tl.constexpr,
):
    """Ask COLUMNS of the given rows into L2, from first_k on, PIECE elements at a time: a cache line, or with BULK any
    number that divides K."""
    # Columns come in the largest power of two that divides them.
    CHUNK: tl.constexpr = COLUMNS & -COLUMNS
    column = tl.arange(0, CHUNK // PIECE) * PIECE
    for start in tl.static_range(0, COLUMNS, CHUNK):
        offset = row.to(tl.int64)[:, None] * K + (first_k + start + column)[None, :]
        # The instruction has no mask: instead of what lies outside, the tile's first piece is asked for.
        within = inside[:, None] & (first_k + start + column < K)[None, :]
        pointers = weight + tl.where(within, offset, first_row.to(tl.int64) * K)
        if BULK:
            prefetch_bulk(pointers, PIECE * weight.dtype.element_ty.primitive_bitwidth // 8)
        else:
            prefetch_lines(pointers)


@triton.jit
def _finish(
    acc,
    shift,
    residual,
    y,
    y_stride,
    token,
    first_output,
    M,
    N,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
):
    """Store the complete sums of a tile, with what comes after them."""
    if HAS_BIAS:
        acc += shift[None, :]
    if SILU:
        # Rounded, as it would be between two kernels.
        acc = acc.to(y.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.reshape(acc, (TOKENS, OUTPUTS, 2)))
        acc = gate / (1.0 + tl.exp(-gate)) * up
    if ADD:
        acc += residual.to(tl.float32)
    output = first_output + tl.arange(0, OUTPUTS)
    inside = (token < M)[:, None] & (output < N)[None, :]
    tl.store(y + token[:, None] * y_stride + output[None, :], acc.to(y.dtype.element_ty), mask=inside)


# Every batch has another number of tokens; specialising on it would compile the kernel again.
@triton.jit(do_not_specialize=["M"])
def decode_linear_kernel(
    x,
    weight,
    bias,
    y,
    partial,
    arrivals,
    M,
    N,
    x_stride,
    y_stride,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    K_TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PREFETCH: tl.constexpr,
    PIECE: tl.constexpr,
    BULK: tl.constexpr,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """y [M, N] = x W^T + bias, y += that with ADD, or silu(gate) * up of it with SILU."""
    if PDL:
        gdc_launch_dependents()
    # Programs that share weights are neighbours, and run at the same time.
    token_tile, row_tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, ROWS)
    if SILU:
        # Even rows of the tile are gates, from the weight's first N rows, odd ones the ups that belong to them: a
        # thread's results are pairs.
        OUTPUTS: tl.constexpr = ROWS // 2
        column = row_tile * OUTPUTS + row // 2
        weight_row = column + row % 2 * N
    else:
        OUTPUTS: tl.constexpr = ROWS
        column = row_tile * OUTPUTS + row
        weight_row = column
    inside_rows = column < N
    first_k = split * SPLIT_K
    asks = token_tile == 0
    if PDL and PREFETCH > 0 and asks:
        _prefetch(weight, weight_row, inside_rows, row_tile * OUTPUTS, first_k, K, PREFETCH, PIECE, BULK)
    shift = row
    if bias is not None:
        shift = tl.load(bias + weight_row, mask=inside_rows, other=0.0).to(tl.float32)
    # Above this line nothing may be read that a kernel writes, and nothing may be written (see dependent_launch).
    if PDL:
        gdc_wait()

    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    output = row_tile * OUTPUTS + tl.arange(0, OUTPUTS)
    inside_y = (token < M)[:, None] & (output < N)[None, :]
    y_tile = y + token[:, None] * y_stride + output[None, :]
    residual = token
    if ADD and SPLITS == 1:
        residual = tl.load(y_tile, mask=inside_y, other=0.0)

    k = first_k + tl.arange(0, K_TILE)
    x_tile = x + token[:, None] * x_stride + k[None, :]
    weight_tile = weight + weight_row.to(tl.int64)[:, None] * K + k[None, :]
    inside_tokens = (token < M)[:, None]
    inside_rows = inside_rows[:, None]
    acc = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
    for start in range(0, SPLIT_K, K_TILE):
        if SPLITS * SPLIT_K == K:
            x_mask, weight_mask = inside_tokens, inside_rows
        else:
            inside_k = (k < K - start)[None, :]
            x_mask, weight_mask = inside_tokens & inside_k, inside_rows & inside_k
        values = tl.load(x_tile + start, mask=x_mask, other=0.0)
        weights = tl.load(weight_tile + start, mask=weight_mask, other=0.0)
        acc = tl.dot(values, tl.trans(weights), acc)

    HAS_BIAS: tl.constexpr = bias is not None
    first_output = row_tile * OUTPUTS
    if SPLITS == 1:
        _finish(acc, shift, residual, y, y_stride, token, first_output, M, N, TOKENS, OUTPUTS, HAS_BIAS, SILU, ADD)
    else:
        tile = row_tile * tl.num_programs(0) + token_tile
        sums = partial + tile * (SPLITS * TOKENS * ROWS) + tl.arange(0, TOKENS)[:, None] * ROWS + row[None, :]
        tl.store(sums + split * (TOKENS * ROWS), acc, mask=inside_tokens)
        # One thread does the atomic: it may release the stores of all only after all have made theirs.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals + tile, 1, sem="acq_rel")
        if arrived == SPLITS - 1:
            # Everyone has counted, so the counter can go back to zero for the next launch.
            tl.store(arrivals + tile, 0)
            late_residual = token
            if ADD:
                late_residual = tl.load(y_tile, mask=inside_y, other=0.0)
            # ".cg" goes past L1, which need not know what other multiprocessors wrote.
            total = tl.load(sums, mask=inside_tokens, other=0.0, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                total += tl.load(sums + other * (TOKENS * ROWS), mask=inside_tokens, other=0.0, cache_modifier=".cg")
            _finish(
                total,
                shift,
                late_residual,
                y,
                y_stride,
                token,
                first_output,
                M,
                N,
                TOKENS,
                OUTPUTS,
                HAS_BIAS,
                SILU,
                ADD,
            )


def launch(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    config: DecodeLinearConfig | None,
    arrivals: Tensor | None,
    pdl: bool,
    bias: Tensor | None = None,
    silu: bool = False,
    add: bool = False,
) -> None:
    """Run the kernel on arguments that have been checked; what each means is said in `decode_linear`."""
    (M, N), (num_rows, K) = y.shape, weight.shape
    tokens, rows, k_tile, splits, num_warps, num_stages, prefetch = config or choose_config(M, num_rows, K)
    grid = (triton.cdiv(M, tokens), triton.cdiv(num_rows, rows), splits)
    tiles = grid[0] * grid[1]
    partial = None
    if splits > 1:
        if arrivals is None:
            arrivals = torch.zeros(tiles, dtype=torch.int32, device=x.device)
        elif arrivals.numel() < tiles:
            raise ValueError(f"arrivals must hold the counters of {tiles} tiles, not {arrivals.numel()}")
        partial = torch.empty(tiles * splits * tokens * rows, dtype=torch.float32, device=x.device)
    split_k = triton.cdiv(triton.cdiv(K, k_tile), splits) * k_tile
    # Where rows are no whole number of pieces, whose ends would lie elsewhere, lines.
    piece = min(prefetch, split_k * x.element_size())
    if piece > CACHE_LINE and (splits * split_k != K or split_k * x.element_size() % piece):
        piece = CACHE_LINE
    piece_size = piece // x.element_size()
    launcher(decode_linear_kernel, grid, pdl and has_pdl(x.device))(
        x,
        weight,
        bias,
        y,
        partial,
        arrivals if splits > 1 else None,
        M,
        N,
        x.stride(0),
        y.stride(0),
        K=K,
        TOKENS=tokens,
        ROWS=rows,
        K_TILE=k_tile,
        SPLITS=splits,
        SPLIT_K=split_k,
        PREFETCH=triton.cdiv(split_k, piece_size) * piece_size if piece else 0,
        PIECE=piece_size,
        BULK=piece > CACHE_LINE,
        SILU=silu,
        ADD=add,
        num_warps=num_warps,
        num_stages=num_stages,
    )
