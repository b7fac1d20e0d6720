"""The experts of a mixture as grouped products of weights in 4 bits: `gate_up` and `down` of `experts`, in other terms.

Weights are decoded in the registers of tensor cores, as in `four_bit_tiles`. So inputs have to be in the order of
`four_bit_tiles.arrange`, and `gate_up` writes its result in this order.

Arguments of both products:
    order, starts: from `experts.sort_by_expert`.
    weight: `[num_experts, rows, columns]`.
    bias: `[num_experts, rows]`, any float dtype, contiguous, or None.
    config: launch constants; None for some that work.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.four_bit import (
    UNIT,
    FourBit,
    check_four_bit,
    decode,
    decode_small,
    scale_of,
    small_scale_of,
)
from nanovllm.kernels.matmul.four_bit_tiles import spread
from nanovllm.kernels.shared_memory import fitting_stages
from nanovllm.kernels.silu_and_mul import SWIGLU, Activation, gated
from nanovllm.kernels.triton_stub import TensorDescriptor, tl, triton


class FourBitExpertTiles(NamedTuple):
    """Launch constants of `gate_up` or `down`, all powers of two except num_stages."""

    tokens: int  # pairs of a tile, at least 16
    columns: int  # output columns of a tile, of `gate_up` as many of the gate and of the up projection; at least 16
    k: int  # input columns of a step, at least 64
    num_warps: int
    num_stages: int  # of the load pipeline

    def fitted(self, num_weights: int, device: torch.device) -> "FourBitExpertTiles | None":
        """These constants, with as many stages as the card's shared memory holds; None if it does not hold two.
        num_weights: rows of the weight for each output column: 2 of `gate_up`, 1 of `down`."""
        num_stages = fitting_stages(self.stage_bytes(num_weights), self.num_stages, device)
        return self._replace(num_stages=num_stages) if num_stages else None

    def stage_bytes(self, num_weights: int) -> int:
        return self.k * 2 * self.tokens + self.k // 2 * num_weights * self.columns


def default_config(num_pairs: int, num_experts: int) -> FourBitExpertTiles:
    """Launch constants that work for both products on every card; those of the tuned table are faster."""
    tokens = 16
    while tokens < 64 and tokens * num_experts < num_pairs:
        tokens *= 2
    return FourBitExpertTiles(tokens, 64, 128, 4, 3)


@triton.jit
def _scaled(
    packed, PLACE: tl.constexpr, factor, of_zero, HAS_ZERO: tl.constexpr, E2M1: tl.constexpr, SMALL: tl.constexpr,
    COMPILED: tl.constexpr,
):  # fmt: skip
    """The weights at one place of a tile's words, rounded to factor's dtype; with SMALL times 2^-64."""
    number = decode_small(packed, PLACE) if SMALL else decode(packed, PLACE, E2M1, factor.dtype, COMPILED)
    OFFSET: tl.constexpr = 128 if factor.dtype == tl.bfloat16 else 1024
    if HAS_ZERO:
        number -= of_zero
    elif not E2M1:
        number -= OFFSET + 8
    return number * factor


@triton.jit
def _of_groups(
    scale, zero, at, mask, ROWS: tl.constexpr, GROUPS: tl.constexpr, WORDS: tl.constexpr, E2M1: tl.constexpr,
    SMALL: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Scales of a tile's words, and what is subtracted from its numbers, if groups have zeros."""
    OFFSET: tl.constexpr = 128 if dtype == tl.bfloat16 else 1024
    found = tl.load(scale + at, mask=mask, other=0)
    factor = small_scale_of(found) if SMALL else scale_of(found, E2M1).to(dtype)
    factor = spread(factor, ROWS, GROUPS, WORDS)
    of_zero = factor
    if zero is not None:
        number = tl.load(zero + at, mask=mask, other=0).to(tl.float32) + OFFSET
        of_zero = spread(number.to(dtype), ROWS, GROUPS, WORDS)
    return factor, of_zero


@triton.jit
def _four_bit_experts_kernel(
    x, weight, scale, zero, bias, order, starts, weights, y, x_stride, num_experts, num_columns,
    K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, TOP_K: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, K_TILE: tl.constexpr, E2M1: tl.constexpr, SILU: tl.constexpr,
    GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, TMA: tl.constexpr, COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """SILU: y [sorted pairs, num_columns], arranged, of x [tokens, K], `gated`. Otherwise y [pairs,
    num_columns] of x [sorted pairs, K], times the weights. weight: in words of 16 bits: a pointer, or with TMA a
    descriptor of [all experts' rows, K / 4]."""
    await_previous(PDL)
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    tile = tl.program_id(0) // column_tiles
    first_column = tl.program_id(0) % column_tiles * COLUMNS

    number = tl.arange(0, PADDED_EXPERTS)
    start = tl.load(starts + number, mask=number < num_experts, other=0)
    end = tl.load(starts + number + 1, mask=number < num_experts, other=0)
    tiles = tl.cumsum((end - start + TOKENS - 1) // TOKENS)  # of the experts up to this one
    expert = tl.sum((tiles <= tile).to(tl.int32))
    if expert >= num_experts:
        return
    tile -= tl.max(tl.where(tiles <= tile, tiles, 0))
    first = tl.load(starts + expert) + tile * TOKENS
    end_of_expert = tl.load(starts + expert + 1)

    pair_row = first + tl.arange(0, TOKENS)
    is_row = pair_row < end_of_expert
    # Rows that are no pair's repeat the first one, so that loads need no mask.
    pair = tl.load(order + tl.where(is_row, pair_row, first))
    if SILU:
        x_row, y_row = pair // TOP_K, pair_row
        first_row = expert.to(tl.int64) * 2 * num_columns
    else:
        x_row, y_row = tl.where(is_row, pair_row, first), pair
        first_row = expert.to(tl.int64) * num_columns
    WORDS: tl.constexpr = K_TILE // 4  # of a row's tile
    PLACE: tl.constexpr = K // 4  # columns of x that belong to one place in words
    HAS_ZERO: tl.constexpr = zero is not None
    dtype: tl.constexpr = x.dtype.element_ty
    SMALL: tl.constexpr = E2M1 and COMPILED and dtype == tl.bfloat16
    word = tl.arange(0, WORDS)[None, :]
    group = tl.arange(0, GROUPS)[None, :]
    column = first_column + tl.arange(0, COLUMNS)
    # Columns that do not exist repeat the last one.
    row = first_row + tl.minimum(column, num_columns - 1)
    first_row = first_row.to(tl.int32) + first_column
    if not TMA:
        weight_tile = weight + row[:, None] * PLACE + word
    scales = row[:, None] * (K // GROUP) + group
    values = x + x_row.to(tl.int64)[:, None] * x_stride + word
    acc = tl.zeros([COLUMNS, TOKENS], tl.float32)
    if SILU:
        up = tl.zeros([COLUMNS, TOKENS], tl.float32)
        if not TMA:
            up_tile = weight_tile + num_columns * PLACE
        up_scales = scales + num_columns * (K // GROUP)
    for start_k in range(0, K, K_TILE):
        at = start_k // 4
        before = start_k // GROUP
        is_group = group < K // GROUP - before
        if TMA:
            packed = weight.load([first_row, at])
        if K % K_TILE == 0:
            if not TMA:
                packed = tl.load(weight_tile + at)
            x0 = tl.load(values + at)
            x1 = tl.load(values + at + PLACE)
            x2 = tl.load(values + at + 2 * PLACE)
            x3 = tl.load(values + at + 3 * PLACE)
        else:
            inside = word < PLACE - at
            if not TMA:
                packed = tl.load(weight_tile + at, mask=inside, other=0)
            x0 = tl.load(values + at, mask=inside, other=0.0)
            x1 = tl.load(values + at + PLACE, mask=inside, other=0.0)
            x2 = tl.load(values + at + 2 * PLACE, mask=inside, other=0.0)
            x3 = tl.load(values + at + 3 * PLACE, mask=inside, other=0.0)
        factor, of_zero = _of_groups(scale, zero, scales + before, is_group, COLUMNS, GROUPS, WORDS, E2M1, SMALL, dtype)
        acc = tl.dot(_scaled(packed, 0, factor, of_zero, HAS_ZERO, E2M1, SMALL, COMPILED), x0.T, acc)
        acc = tl.dot(_scaled(packed, 1, factor, of_zero, HAS_ZERO, E2M1, SMALL, COMPILED), x1.T, acc)
        acc = tl.dot(_scaled(packed, 2, factor, of_zero, HAS_ZERO, E2M1, SMALL, COMPILED), x2.T, acc)
        acc = tl.dot(_scaled(packed, 3, factor, of_zero, HAS_ZERO, E2M1, SMALL, COMPILED), x3.T, acc)
        if SILU:
            if TMA:
                packed = weight.load([first_row + num_columns, at])
            else:
                packed = tl.load(up_tile + at) if K % K_TILE == 0 else tl.load(up_tile + at, mask=inside, other=0)
            factor, of_zero = _of_groups(
                scale, zero, up_scales + before, is_group, COLUMNS, GROUPS, WORDS, E2M1, SMALL, dtype
            )
            up = tl.dot(_scaled(packed, 0, factor, of_zero, HAS_ZERO, E2M1, SMALL, COMPILED), x0.T, up)
            up = tl.dot(_scaled(packed, 1, factor, of_zero, HAS_ZERO, E2M1, SMALL, COMPILED), x1.T, up)
            up = tl.dot(_scaled(packed, 2, factor, of_zero, HAS_ZERO, E2M1, SMALL, COMPILED), x2.T, up)
            up = tl.dot(_scaled(packed, 3, factor, of_zero, HAS_ZERO, E2M1, SMALL, COMPILED), x3.T, up)
    if SMALL:
        acc *= 18446744073709551616.0  # 2^64
        if SILU:
            up *= 18446744073709551616.0
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)[:, None]
        if SILU:
            up += tl.load(bias + row + num_columns).to(tl.float32)[:, None]
    if SILU:
        acc = gated(acc, up, GELU, ALPHA, LIMIT)
        within = column % 32
        y_column = (within % 2 * 2 + within // 16) * (num_columns // 4) + column // 32 * 8 + within % 16 // 2
    else:
        acc *= tl.load(weights + pair)[None, :]
        y_column = column
    y_tile = y + y_row.to(tl.int64)[:, None] * num_columns + y_column[None, :]
    tl.store(y_tile, acc.T.to(dtype), mask=is_row[:, None] & (column < num_columns)[None, :])


def gate_up(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    weight: FourBit,
    bias: Tensor | None,
    config: FourBitExpertTiles | None,
    activation: Activation = SWIGLU,
) -> Tensor:
    """`silu(x Wg^T) * (x Wu^T)` (Shazeer 2020) of each pair's token with its expert's weights, in the order of the
    experts; summed in float32, rounded once.

    x: `[num_tokens, hidden_size]`, from `arrange`.
    weight: `[num_experts, 2 * intermediate, hidden_size]`, of each expert Wg, then Wu; intermediate a multiple of 32.
    activation: what is computed of gate and up.

    Returns: `[num_pairs, intermediate]`, arranged, row i for pair order[i]; rows of pairs without an expert mean
    nothing.
    """
    _, rows, K = weight.shape
    if x.dim() != 2 or x.shape[1] != K or x.stride(1) != 1 or rows % (2 * UNIT):
        raise ValueError(
            f"x must be a [num_tokens, {K}] with contiguous rows, and weight have a multiple of {2 * UNIT} rows, not "
            f"{list(x.shape)} and {rows}"
        )
    y = torch.empty(len(order), rows // 2, dtype=x.dtype, device=x.device)
    return _launch(x, order, starts, None, weight, bias, config, y, len(order) // max(len(x), 1), activation)


def down(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    weights: Tensor,
    weight: FourBit,
    bias: Tensor | None,
    config: FourBitExpertTiles | None,
) -> Tensor:
    """`x W^T + bias` of each pair with its expert's weight, times the router's weight, in the order of the pairs;
    summed in float32, rounded once.

    x: `[num_pairs, intermediate]`, from `gate_up`.
    weights: float32 `[num_tokens, top_k]`, contiguous, from `route`.
    weight: `[num_experts, hidden_size, intermediate]`.

    Returns: `[num_tokens, top_k, hidden_size]`; rows of pairs without an expert mean nothing.
    """
    _, hidden_size, K = weight.shape
    if x.shape != (len(order), K) or not x.is_contiguous():
        raise ValueError(f"x must be a contiguous [{len(order)}, {K}], not {list(x.shape)}")
    y = torch.empty(*weights.shape, hidden_size, dtype=x.dtype, device=x.device)
    return _launch(x, order, starts, weights, weight, bias, config, y, weights.shape[1])


def _launch(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    weights: Tensor | None,
    weight: FourBit,
    bias: Tensor | None,
    config: FourBitExpertTiles | None,
    y: Tensor,
    top_k: int,
    activation: Activation = SWIGLU,
) -> Tensor:
    """y. weights: None for `gate_up`."""
    check_four_bit(weight, x.dtype)
    num_experts, num_rows, K = weight.shape
    if bias is not None and (bias.shape != (num_experts, num_rows) or not bias.is_contiguous()):
        raise ValueError(f"bias must be a contiguous [{num_experts}, {num_rows}], not {list(bias.shape)}")
    num_columns, num_pairs = y.shape[-1], len(order)
    if num_pairs == 0:
        return y
    tokens, columns, k_tile, num_warps, num_stages = config or default_config(num_pairs, num_experts)
    # Of n pairs with e experts, at most e tiles are not full.
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (tokens - 1)) // tokens
    words = weight.values.view(torch.int16)
    has_tma = GpuFacts.of(x.device).has_tma
    if has_tma:
        words = TensorDescriptor.from_tensor(words.view(-1, K // 4), [columns, k_tile // 4])
    launcher(_four_bit_experts_kernel, (num_tiles * triton.cdiv(num_columns, columns),), has_pdl(x.device))(
        x, words, weight.scale, weight.zero, bias, order, starts, weights, y, x.stride(0),
        num_experts, num_columns, K=K, GROUP=weight.group, GROUPS=max(1, k_tile // weight.group), TOP_K=top_k,
        PADDED_EXPERTS=triton.next_power_of_2(num_experts), TOKENS=tokens, COLUMNS=columns, K_TILE=k_tile,
        E2M1=weight.is_e2m1, SILU=weights is None, **activation.constants, TMA=has_tma, COMPILED=x.is_cuda,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return y
