"""Linear layers of 1 to 32 tokens with weights of 4 bits, fused with the norm, the activation or the sum beside them.

Such a layer takes as long as reading its weights, if each weight takes few instructions. Plain cores need three a
weight at least. So tensor cores multiply, of whose columns one token fills one of eight. Weights are their first
operand: they come to shared memory by asynchronous copies, and are decoded in the registers that tensor cores read.

The warps of a program multiply the same rows of the weight by different chunks of K, so that a warp has many rows for
each number of x that it loads. Their sums are added at the end; those of several programs as in `split_k`.

Scales multiply the sums of a group, in float32, so that tensor cores multiply small integers exactly. Where a chunk has
several groups, each has a column of the second operand for itself, with zeros in the other groups' rows. Zeros of
groups are subtracted from these sums too: the sum of the group's x, times the difference from the zero of 8.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import CACHE_LINE, gdc_launch_dependents, gdc_wait, has_pdl, prefetch_lines
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.four_bit import (
    CHUNK,
    FourBit,
    check_few_tokens,
    check_four_bit,
    decode,
    ones_like,
    scale_of,
)
from nanovllm.kernels.matmul.linear_checks import MAX_NORM_SIZE, check_result
from nanovllm.kernels.shared_memory import fitting_stages
from nanovllm.kernels.triton_stub import tl, triton

# Columns of the second operand, which are tokens times groups in a chunk: those of tensor cores' instruction, and as
# many as a program has registers for, times its rows.
_MIN_COLUMNS, _MAX_TILE = 8, 512
_NORM_TILE = 1024


class FourBitGemvConfig(NamedTuple):
    """Launch constants, all numbers powers of two except num_stages."""

    rows: int  # weight rows of a program, at least 16; two make one output column with `silu`
    splits: int  # programs among which K is divided
    num_warps: int  # chunks of K that are multiplied side by side
    num_stages: int  # of the load pipeline
    prefetch: int = 0  # first columns of its split that a program asks into L2 while it waits; 0 for none

    @property
    def columns(self) -> int:
        """The most columns of the second operand."""
        return max(_MIN_COLUMNS, _MAX_TILE // self.rows)

    def max_tokens(self, weight: FourBit) -> int:
        return self.columns // groups_of_chunk(weight)

    def fitted(self, device: torch.device) -> "FourBitGemvConfig | None":
        """These constants, with as many stages as the card's shared memory holds; None if it does not hold two."""
        num_stages = fitting_stages(self.stage_bytes, self.num_stages, device)
        return self._replace(num_stages=num_stages) if num_stages else None

    @property
    def stage_bytes(self) -> int:
        """With four bytes for the norm's weight."""
        return self.num_warps * CHUNK * (self.rows // 2 + 2 * self.columns + 4)


@triton.jit
def _load_scales(scale, zero, row, chunk, column, is_chunk, K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """The scales of [chunk, row, column], and their zeros, or the scales again. One for all columns if GROUPS is 1."""
    if GROUPS == 1:
        index = row[:, :, None] * (K // GROUP) + (chunk * 128 // GROUP)[:, None, None]
        mask = is_chunk[:, None, None]
    else:
        group = chunk[:, None, None] * GROUPS + (column % GROUPS)[None, None, :]
        index = row[:, :, None] * (K // GROUP) + group
        mask = is_chunk[:, None, None] & (group < K // GROUP)
    found = tl.load(scale + index, mask=mask, other=0)
    of_zero = found
    if zero is not None:
        of_zero = tl.load(zero + index, mask=mask, other=0)
    return found, of_zero


@triton.jit
def sums_of_chunks(
    x, norm_weight, weight, scale, zero, row, first, is_there, is_token, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNKS: tl.constexpr, STEPS: tl.constexpr, STRIDE: tl.constexpr, IS_WHOLE: tl.constexpr, K: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, E2M1: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The products of rows of a weight and columns of x, [CHUNKS, ROWS, COLUMNS] in float32, each of other chunks.

    x: pointers to the rows of x, [CHUNKS or 1, 1, COLUMNS]. row: of the weight, [CHUNKS or 1, ROWS], int64. first:
    [CHUNKS], the first of STEPS chunks, each STRIDE after the one before. is_there: [CHUNKS], whether it has any.
    is_token: [COLUMNS]. IS_WHOLE: whether all those chunks are whole. GROUPS: of a chunk of 128 columns. With PDL
    weights and scales are read before the wait for the previous launch, which this contains."""
    BYTES: tl.constexpr = 64  # of a row's chunk
    ALL_CHUNKS: tl.constexpr = (K + 127) // 128
    dtype: tl.constexpr = x.dtype.element_ty
    OFFSET: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
    column = tl.arange(0, COLUMNS)
    byte = tl.arange(0, BYTES)
    found, of_zero = _load_scales(scale, zero, row, first, column, is_there & (first < ALL_CHUNKS), K, GROUP, GROUPS)
    # Above this line nothing may be read that a kernel writes, and nothing may be written (see dependent_launch).
    if PDL:
        gdc_wait()

    weights = weight + row[:, :, None] * (K // 2) + (first * BYTES)[:, None, None] + byte[None, None, :]
    k = first[:, None, None] * 128 + (byte // 16 * 32 + byte % 16)[None, :, None]
    values = x + k
    is_value = is_token[None, None, :]
    if GROUPS > 1:
        # A group's own columns are zero in the rows of the others.
        is_value = is_value & ((byte // (64 // GROUPS))[None, :, None] == (column % GROUPS)[None, None, :])
    if norm_weight is not None:
        factors = norm_weight + k
    total = tl.zeros([CHUNKS, ROWS, COLUMNS], tl.float32)
    for step in range(0, STEPS):
        start = step * STRIDE
        if IS_WHOLE:
            packed = tl.load(weights + start * BYTES)
            low = tl.load(values + start * 128, mask=is_value, other=0.0)
            high = tl.load(values + start * 128 + 16, mask=is_value, other=0.0)
        else:
            is_byte = (first * BYTES)[:, None, None] + byte[None, None, :] < K // 2 - start * BYTES
            packed = tl.load(weights + start * BYTES, mask=is_byte & is_there[:, None, None], other=0)
            is_inside = is_value & (k < K - start * 128) & is_there[:, None, None]
            low = tl.load(values + start * 128, mask=is_inside, other=0.0)
            high = tl.load(values + start * 128 + 16, mask=is_inside, other=0.0)
        if norm_weight is not None:
            factor = tl.load(factors + start * 128, mask=k < K - start * 128, other=0.0)
            low = (low.to(tl.float32) * factor.to(tl.float32)).to(dtype)
            factor = tl.load(factors + start * 128 + 16, mask=k < K - start * 128, other=0.0)
            high = (high.to(tl.float32) * factor.to(tl.float32)).to(dtype)
        # The pipeline loads early only what is multiplied by tensor cores.
        later = first + (start + STRIDE)
        is_later = is_there & (later < ALL_CHUNKS)
        next_found, next_zero = _load_scales(scale, zero, row, later, column, is_later, K, GROUP, GROUPS)
        low_weights = decode(packed, 0, E2M1, dtype, COMPILED)
        high_weights = decode(packed, 1, E2M1, dtype, COMPILED)
        if not E2M1:
            low_weights = low_weights - (OFFSET + 8)
            high_weights = high_weights - (OFFSET + 8)
        sums = tl.dot(low_weights, low, out_dtype=tl.float32)
        sums = tl.dot(high_weights, high, sums)
        if zero is not None:
            ones = ones_like(packed, dtype, COMPILED)
            of_ones = tl.dot(ones, low, out_dtype=tl.float32)
            of_ones = tl.dot(ones, high, of_ones)
            sums += of_ones * (8 - of_zero.to(tl.float32))
        total += sums * scale_of(found, E2M1)
        found, of_zero = next_found, next_zero
    return total


@triton.jit
def inverse_rms(x, is_token, eps, TOKENS: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr):
    """[TOKENS, 1]. x: pointers to rows, of the same shape."""
    part = tl.arange(0, TILE)[None, :]
    squares = tl.zeros([TOKENS, TILE], tl.float32)
    for start in range(0, K, TILE):
        value = tl.load(x + start + part, mask=is_token & (part < K - start), other=0.0)
        squares += value.to(tl.float32) * value.to(tl.float32)
    return tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]


@triton.jit(do_not_specialize=["M"])
def _four_bit_gemv_kernel(
    x, norm_weight, weight, scale, zero, bias, y, partial, arrivals, M, N, x_stride, y_stride, eps,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr,
    CHUNKS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_CHUNKS: tl.constexpr, NORM_TOKENS: tl.constexpr,
    NORM_TILE: tl.constexpr, E2M1: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, PREFETCH: tl.constexpr,
    COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [M, N] = f(x) W^T + bias, y += that with ADD, or silu(gate) * up of it with SILU; f: norm or none. GROUPS: of a
    chunk of 128 columns. COLUMNS: of the second operand. CHUNKS: multiplied side by side."""
    TOKENS: tl.constexpr = COLUMNS // GROUPS
    if PDL:
        gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, ROWS)
    if SILU:
        # Even rows of the tile are gates, from the weight's first N rows, odd ones the ups that belong to them.
        OUTPUTS: tl.constexpr = ROWS // 2
        output = tile * OUTPUTS + lane // 2
        row = tl.minimum(output, N - 1) + lane % 2 * N
    else:
        OUTPUTS: tl.constexpr = ROWS  # type: ignore[no-redef]
        output = tile * OUTPUTS + lane
        # Rows that do not exist repeat the last one.
        row = tl.minimum(output, N - 1)
    row = row.to(tl.int64)
    first = split * SPLIT_CHUNKS
    if PREFETCH > 0:
        lines = tl.arange(0, PREFETCH) * 128
        within = tl.minimum(first * 64 + lines, K // 2 - 1)
        prefetch_lines(weight + row[:, None] * (K // 2) + within[None, :])
    index = tl.arange(0, CHUNKS)
    token = tl.arange(0, COLUMNS) // GROUPS
    tokens = x + (token * x_stride)[None, None, :]
    total = sums_of_chunks(
        tokens, norm_weight, weight, scale, zero, row[None, :], first + index, index >= 0,
        token < M, ROWS, COLUMNS, CHUNKS, SPLIT_CHUNKS // CHUNKS, CHUNKS, SPLITS * SPLIT_CHUNKS * 128 == K, K, GROUP,
        GROUPS, E2M1, COMPILED, PDL,
    )  # fmt: skip

    dtype: tl.constexpr = x.dtype.element_ty
    acc = tl.sum(total, axis=0)
    if GROUPS > 1:
        acc = tl.sum(tl.reshape(acc, (ROWS, TOKENS, GROUPS)), axis=2)
    acc = tl.trans(acc)
    token = tl.arange(0, TOKENS)
    is_token = (token < M)[:, None]
    if SPLITS > 1:
        partials = partial + tile * (SPLITS * TOKENS * ROWS) + token[:, None] * ROWS + lane[None, :]
        tl.store(partials + split * (TOKENS * ROWS), acc, mask=is_token)
        # One thread does the atomic: it may release the stores of all only after all have made theirs.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        # Everyone has counted, so the counter can go back to zero for the next launch.
        tl.store(arrivals + tile, 0)
        # ".cg" goes past L1, which need not know what other multiprocessors wrote.
        acc = tl.load(partials, mask=is_token, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            acc += tl.load(partials + other * (TOKENS * ROWS), mask=is_token, other=0.0, cache_modifier=".cg")
    if norm_weight is not None:
        # Only now, so that no product waits for the sum of squares. One token's is for all rows, of which one counts.
        of_token = tl.arange(0, NORM_TOKENS)[:, None]
        acc *= inverse_rms(x + of_token * x_stride, of_token < M, eps, NORM_TOKENS, K, NORM_TILE)
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[None, :]
    result = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    if SILU:
        # Rounded, as it would be between two kernels.
        acc = acc.to(dtype).to(tl.float32)
        gate, up = tl.split(tl.reshape(acc, (TOKENS, OUTPUTS, 2)))
        acc = gate / (1.0 + tl.exp(-gate)) * up
    inside = is_token & (result < N)[None, :]
    y += token[:, None] * y_stride + result[None, :]
    if ADD:
        acc += tl.load(y, mask=inside, other=0.0).to(tl.float32)
    tl.store(y, acc.to(dtype), mask=inside)


def norm_tile(K: int, num_tokens: int) -> int:
    """How many columns of x a program adds the squares of at once: of one token as many as its registers hold, so that
    it waits for x once."""
    return min(_NORM_TILE * (4 if num_tokens == 1 else 1), triton.next_power_of_2(K))


def groups_of_chunk(weight: FourBit) -> int:
    """How many groups of columns have a scale of their own in a chunk."""
    return max(1, CHUNK // weight.group) if weight.scale.shape[-1] > 1 else 1


def four_bit_gemv(
    x: Tensor,
    weight: FourBit,
    y: Tensor,
    bias: Tensor | None,
    config: FourBitGemvConfig,
    arrivals: Tensor | None,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    silu: bool = False,
    add: bool = False,
    pdl: bool = False,
) -> None:
    """`y = f(x) W^T + bias`, summed in float32 and rounded once, where f is the RMS norm or nothing.

    Rows of x don't influence each other. Equal calls give equal bits; another number of tokens may round differently.

    Args:
        x: `[M, K]`, M in 1..config.max_tokens(weight), bfloat16 or float16, any row stride.
        weight: `[N, K]`.
        y: `[M, N]` of x's dtype, any row stride; shares no memory with x.
        bias: `[N]`, any float dtype, or None.
        config: launch constants.
        arrivals: from `split_k.make_arrivals`; None if config has one split. K is not split if the result has more
            tiles than this has counters.
        norm_weight, eps: of the norm (Zhang & Sennrich 2019), and what is added to the mean square: `[K]`, any float
            dtype, K at most MAX_NORM_SIZE. x times its weight is rounded to x's dtype, before the factor of its mean
            square; so float16 has no norm, which could overflow.
        silu: whether y `[M, N / 2]` becomes `silu(gate) * up` (Shazeer 2020) instead. The weight holds the gate's N / 2
            rows and then the up's. Both results are rounded to x's dtype in between.
        add: whether the result is added to y, before it is rounded.
        pdl: programmatic dependent launch (see `dependent_launch`). Weights are read before the wait.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    check_four_bit(weight, x.dtype)
    check_few_tokens(x, weight, bias, config.max_tokens(weight))
    M, (num_rows, K) = len(x), weight.shape
    if norm_weight is not None and (norm_weight.shape != (K,) or K > MAX_NORM_SIZE or x.dtype != torch.bfloat16):
        raise ValueError(
            f"norm_weight must be [{K}] of at most {MAX_NORM_SIZE} for an x in bfloat16, not {list(norm_weight.shape)} "
            f"for {x.dtype}"
        )
    check_result(y, x, weight.values, silu)
    rows, splits, num_warps, num_stages, prefetch = config
    tiles, partial = triton.cdiv(num_rows, rows), None
    groups = groups_of_chunk(weight)
    columns = max(_MIN_COLUMNS, triton.next_power_of_2(M) * groups)
    if tiles > (0 if arrivals is None else arrivals.numel()):
        splits = 1
    if splits > 1:
        partial = torch.empty(tiles * splits * columns // groups * rows, dtype=torch.float32, device=x.device)
    split_chunks = triton.cdiv(triton.cdiv(K, CHUNK), splits * num_warps) * num_warps
    has_pdl_here = pdl and has_pdl(x.device)
    lines = triton.next_power_of_2(triton.cdiv(min(prefetch, split_chunks * CHUNK) // 2, CACHE_LINE))
    norm_tokens = columns // groups if norm_weight is not None and M > 1 else 1
    launcher(_four_bit_gemv_kernel, (tiles, splits), has_pdl_here)(
        x, norm_weight, *weight, bias, y, partial, arrivals if splits > 1 else None, M, y.shape[1], x.stride(0),
        y.stride(0), eps, K=K, GROUP=weight.group, GROUPS=groups, COLUMNS=columns, ROWS=rows, CHUNKS=num_warps,
        SPLITS=splits, SPLIT_CHUNKS=split_chunks, NORM_TOKENS=norm_tokens, NORM_TILE=norm_tile(K, norm_tokens),
        E2M1=weight.is_e2m1, SILU=silu, ADD=add, PREFETCH=lines if prefetch and has_pdl_here else 0,
        COMPILED=x.is_cuda, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
