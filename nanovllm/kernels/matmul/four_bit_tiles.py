"""Linear layers of 16 tokens and more with weights of 4 bits, decoded in the registers that tensor cores read.

The weight is the first operand, the only one that tensor cores read from registers. A register holds two 16-bit words
of a row, that is eight weights of which tensor cores want pairs. So a tile is multiplied in four parts, for the four
places in a word, and no number changes its thread or its half of a register. The input has to be in the order of these
parts (`arrange`), which the kernel writes that computes its norm or its activation.

Weights are multiplied by their scales before they are multiplied by x, and rounded: the numbers are those of a weight
that has been dequantized.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.dependent_launch import (
    CACHE_LINE,
    await_previous,
    gdc_launch_dependents,
    gdc_wait,
    has_pdl,
    prefetch_lines,
)
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.four_bit import UNIT, FourBit, check_four_bit, decode, scale_of
from nanovllm.kernels.matmul.linear_checks import check_result
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.shared_memory import fitting_stages
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.kernels.triton_stub import tl, triton

_PLACES = 4  # of numbers in a word


class FourBitTileConfig(NamedTuple):
    """Launch constants, all powers of two except num_stages and prefetch."""

    rows: int  # weight rows of a tile, at least 16
    tokens: int  # of a tile, at least 16
    tile_k: int  # columns of a step, at least 64
    splits: int  # programs among which K is divided
    num_warps: int
    num_stages: int  # of the load pipeline
    prefetch: int = 0  # first columns of its split that a program asks into L2 while it waits; 0 for none

    def fitted(self, device: torch.device) -> "FourBitTileConfig | None":
        """These constants, with as many stages as the card's shared memory holds; None if it does not hold two."""
        num_stages = fitting_stages(self.stage_bytes, self.num_stages, device)
        return self._replace(num_stages=num_stages) if num_stages else None

    @property
    def stage_bytes(self) -> int:
        return self.tile_k // 2 * self.rows + self.tile_k * 2 * self.tokens


@triton.jit
def _arrange_kernel(
    x, norm_weight, order, y, x_stride, eps, K: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """order: None, or of pairs, TOP_K of each row of x."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, 4)[:, None]
    word = tl.arange(0, BLOCK)[None, :]
    # The low byte of a word holds columns 2 i and 2 i + 16 of its 32, the high byte those after them.
    column = word // 8 * 32 + word % 8 * 2 + place // 2 + place % 2 * 16
    inside = word < K // 4
    if order is None:
        x += row * x_stride
    else:
        x += (tl.load(order + row) // TOP_K).to(tl.int64) * x_stride
    value = tl.load(x + column, mask=inside, other=0.0)
    dtype: tl.constexpr = value.dtype
    if norm_weight is not None:
        number = value.to(tl.float32)
        factor = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(tl.sum(number * number, axis=1), axis=0) / K + eps)
        value = (number * inverse_rms * factor).to(dtype)
    if SILU:
        gate = value.to(tl.float32)
        up = tl.load(x + K + column, mask=inside, other=0.0).to(tl.float32)
        value = (gate / (1.0 + tl.exp(-gate)) * up).to(dtype)
    tl.store(y + row * K + place * (K // 4) + word, value, mask=inside)


@kernel_or_twin
def arrange(x: Tensor) -> Tensor:
    """x `[num_tokens, K]`, K a multiple of 32, in the order in which `four_bit_tiles` multiplies it: of each four
    columns that a word of the weight holds, first all that are lowest in their words, then all in the second place,
    and so on. 16-bit floats, rows contiguous."""
    num_tokens, K = x.shape
    # [unit, half of a byte, word, byte of a word]
    return x.reshape(num_tokens, K // UNIT, 2, 8, 2).permute(0, 4, 2, 1, 3).reshape(num_tokens, K)


@kernel_or_twin
def arrange_pairs(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """`arrange(x)` with a row for each pair (`experts` says what a pair is), in their order: `[num_pairs, K]`.

    order: int32 `[num_pairs]`, contiguous, from `experts.sort_by_expert`. top_k: pairs of a token.
    """
    return arrange.twin(x[order.long() // top_k])


@kernel_or_twin
def rms_norm_arrange(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`arrange(rms_norm(x, weight, eps))` (Zhang & Sennrich 2019). weight: `[K]`."""
    return arrange.twin(rms_norm.twin(x, weight, eps))


@kernel_or_twin
def silu_and_mul_arrange(x: Tensor) -> Tensor:
    """`arrange(silu(gate) * up)` of x `[num_tokens, 2 * K]`, gate and up side by side (Shazeer 2020)."""
    return arrange.twin(silu_and_mul.twin(x))


@kernel_of(arrange)
def _launch_arrange(x):
    return _arranged(x, None, 0.0, x.shape[1], False)


@kernel_of(arrange_pairs)
def _launch_arrange_pairs(x, order, top_k):
    return _arranged(x, None, 0.0, x.shape[1], False, order, top_k)


@kernel_of(rms_norm_arrange)
def _launch_rms_norm_arrange(x, weight, eps):
    return _arranged(x, weight, eps, x.shape[1], False)


@kernel_of(silu_and_mul_arrange)
def _launch_silu_and_mul_arrange(x):
    return _arranged(x, None, 0.0, x.shape[1] // 2, True)


def _arranged(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    K: int,
    silu: bool,
    order: Tensor | None = None,
    top_k: int = 1,
) -> Tensor:
    if x.stride(1) != 1 or K % UNIT or (norm_weight is not None and norm_weight.shape != (K,)):
        raise ValueError(f"x must have contiguous rows of a multiple of {UNIT}, not {list(x.shape)} {x.stride()}")
    y = torch.empty(len(x if order is None else order), K, dtype=x.dtype, device=x.device)
    if len(y):
        block = triton.next_power_of_2(K // _PLACES)
        num_warps = min(max(block // 128, 1), 16)
        launcher(_arrange_kernel, (len(y),), has_pdl(x.device))(
            x, norm_weight, order, y, x.stride(0), eps, K=K, TOP_K=top_k, BLOCK=block, SILU=silu, num_warps=num_warps
        )
    return y


@triton.jit
def spread(of_groups, ROWS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr):
    """A number of each word of a tile from one of each group, [ROWS, GROUPS]."""
    return tl.reshape(tl.broadcast_to(of_groups[:, :, None], (ROWS, GROUPS, WORDS // GROUPS)), (ROWS, WORDS))


@triton.jit(do_not_specialize=["M"])
def _four_bit_tile_kernel(
    x, weight, scale, zero, bias, y, partial, arrivals, M, N, x_stride, y_stride,
    K: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, K_TILE: tl.constexpr,
    GROUPS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_K: tl.constexpr, E2M1: tl.constexpr, ADD: tl.constexpr,
    PREFETCH: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [M, N] = x W^T + bias, y += that with ADD. x is arranged. weight: in words of 16 bits. GROUPS: of a row's tile
    that have a scale each."""
    WORDS: tl.constexpr = K_TILE // 4  # of a row's tile
    PLACE: tl.constexpr = K // 4  # columns of x that belong to one place in words
    dtype: tl.constexpr = x.dtype.element_ty
    OFFSET: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
    # Programs with the same weights are neighbours, so that L2 has these for all of them.
    token_tile, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, ROWS)
    # Rows and tokens that do not exist repeat the last one.
    row = tl.minimum(tile * ROWS + lane, N - 1).to(tl.int64)
    token = token_tile * TOKENS + tl.arange(0, TOKENS)
    word = tl.arange(0, WORDS)
    first = split * SPLIT_K
    weights = weight + row[:, None] * PLACE + (first // 4 + word)[None, :]
    values = x + tl.minimum(token, M - 1).to(tl.int64)[:, None] * x_stride + (first // 4 + word)[None, :]
    group = tl.arange(0, GROUPS)[None, :]
    scales = row[:, None] * (K // GROUP) + group
    if PDL:
        gdc_launch_dependents()
    if PREFETCH > 0:
        # In words, of which a cache line has 64.
        lines = tl.minimum(first // 4 + tl.arange(0, PREFETCH) * 64, PLACE - 1)
        prefetch_lines(weight + row[:, None] * PLACE + lines[None, :])
    if PDL:
        gdc_wait()

    acc = tl.zeros([ROWS, TOKENS], tl.float32)
    for start in range(0, SPLIT_K, K_TILE):
        at = start // 4
        before = (first + start) // GROUP
        if SPLITS * SPLIT_K == K:
            packed = tl.load(weights + at)
            of_group = tl.load(scale + scales + before)
            x0 = tl.load(values + at)
            x1 = tl.load(values + at + PLACE)
            x2 = tl.load(values + at + 2 * PLACE)
            x3 = tl.load(values + at + 3 * PLACE)
        else:
            inside = (first // 4 + word < PLACE - at)[None, :]
            packed = tl.load(weights + at, mask=inside, other=0)
            of_group = tl.load(scale + scales + before, mask=group < K // GROUP - before, other=0)
            x0 = tl.load(values + at, mask=inside, other=0.0)
            x1 = tl.load(values + at + PLACE, mask=inside, other=0.0)
            x2 = tl.load(values + at + 2 * PLACE, mask=inside, other=0.0)
            x3 = tl.load(values + at + 3 * PLACE, mask=inside, other=0.0)
        factor = spread(scale_of(of_group, E2M1).to(dtype), ROWS, GROUPS, WORDS)
        w0 = decode(packed, 0, E2M1, dtype, COMPILED)
        w1 = decode(packed, 1, E2M1, dtype, COMPILED)
        w2 = decode(packed, 2, E2M1, dtype, COMPILED)
        w3 = decode(packed, 3, E2M1, dtype, COMPILED)
        if zero is not None:
            of_zero = tl.load(zero + scales + before, mask=group < K // GROUP - before, other=0)
            subtrahend = spread((of_zero.to(tl.float32) + OFFSET).to(dtype), ROWS, GROUPS, WORDS)
            w0 -= subtrahend
            w1 -= subtrahend
            w2 -= subtrahend
            w3 -= subtrahend
        elif not E2M1:
            w0 -= OFFSET + 8
            w1 -= OFFSET + 8
            w2 -= OFFSET + 8
            w3 -= OFFSET + 8
        acc = tl.dot(w0 * factor, x0.T, acc)
        acc = tl.dot(w1 * factor, x1.T, acc)
        acc = tl.dot(w2 * factor, x2.T, acc)
        acc = tl.dot(w3 * factor, x3.T, acc)
    acc = tl.trans(acc)

    is_token = (token < M)[:, None]
    output = tile * ROWS + lane
    if SPLITS > 1:
        number = tile * tl.num_programs(0) + token_tile
        sums = partial + number * (SPLITS * TOKENS * ROWS) + tl.arange(0, TOKENS)[:, None] * ROWS + lane[None, :]
        tl.store(sums + split * (TOKENS * ROWS), acc, mask=is_token)
        # One thread does the atomic: it may release the stores of all only after all have made theirs.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + number, 1, sem="acq_rel") < SPLITS - 1:
            return
        # Everyone has counted, so the counter can go back to zero for the next launch.
        tl.store(arrivals + number, 0)
        # ".cg" goes past L1, which need not know what other multiprocessors wrote.
        acc = tl.load(sums, mask=is_token, other=0.0, cache_modifier=".cg")
        for other in tl.static_range(1, SPLITS):
            acc += tl.load(sums + other * (TOKENS * ROWS), mask=is_token, other=0.0, cache_modifier=".cg")
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[None, :]
    inside_y = is_token & (output < N)[None, :]
    y += token.to(tl.int64)[:, None] * y_stride + output[None, :]
    if ADD:
        acc += tl.load(y, mask=inside_y, other=0.0).to(tl.float32)
    tl.store(y, acc.to(dtype), mask=inside_y)


def four_bit_tiles(
    x: Tensor,
    weight: FourBit,
    y: Tensor,
    bias: Tensor | None,
    config: FourBitTileConfig,
    arrivals: Tensor | None,
    *,
    add: bool = False,
    pdl: bool = False,
) -> None:
    """`y = x W^T + bias` of weights that are rounded to x's dtype, summed in float32 and rounded once.

    Args:
        x: from `arrange`: `[M, K]`, bfloat16 or float16.
        weight: `[N, K]`.
        y: `[M, N]` of x's dtype, any row stride; shares no memory with x.
        bias: `[N]`, any float dtype, or None.
        config: K is not split if the result has more tiles than `arrivals` has counters.
        arrivals: from `split_k.make_arrivals`; None if config has one split.
        add: whether the result is added to y, before it is rounded.
        pdl: programmatic dependent launch (see `dependent_launch`). Before the wait weights are asked into L2 alone.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    check_four_bit(weight, x.dtype)
    (num_rows, K), M = weight.shape, len(x)
    if x.dim() != 2 or x.shape[1] != K or x.stride(1) != 1:
        raise ValueError(f"x must be [M, {K}] with contiguous rows, not {list(x.shape)} with strides {x.stride()}")
    if bias is not None and (bias.shape != (num_rows,) or not bias.is_contiguous()):
        raise ValueError(f"bias must be a contiguous [{num_rows}], not {list(bias.shape)}")
    check_result(y, x, weight.values, False)
    if M == 0:
        return
    rows, tokens, tile_k, splits, num_warps, num_stages, prefetch = config
    row_tiles, token_tiles, partial = triton.cdiv(num_rows, rows), triton.cdiv(M, tokens), None
    tiles = row_tiles * token_tiles
    if tiles > (0 if arrivals is None else arrivals.numel()):
        splits = 1
    if splits > 1:
        partial = torch.empty(tiles * splits * tokens * rows, dtype=torch.float32, device=x.device)
    split_size = triton.cdiv(triton.cdiv(K, tile_k), splits) * tile_k
    has_pdl_here = pdl and has_pdl(x.device)
    lines = triton.next_power_of_2(triton.cdiv(min(prefetch, split_size) // 2, CACHE_LINE))
    launcher(_four_bit_tile_kernel, (token_tiles, row_tiles, splits), has_pdl_here)(
        x, weight.values.view(torch.int16), weight.scale, weight.zero, bias, y, partial,
        arrivals if splits > 1 else None, M, num_rows, x.stride(0), y.stride(0), K=K, GROUP=weight.group,
        TOKENS=tokens, ROWS=rows, K_TILE=tile_k, GROUPS=max(1, tile_k // weight.group), SPLITS=splits,
        SPLIT_K=split_size, E2M1=weight.is_e2m1, ADD=add, PREFETCH=lines if prefetch and has_pdl_here else 0,
        COMPILED=x.is_cuda, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
