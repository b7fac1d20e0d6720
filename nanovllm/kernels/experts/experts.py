"""The experts of a mixture (Shazeer et al. 2017) as grouped products: each expert multiplies the tokens routed to it.

A pair is a token with one of its experts: pair t * top_k + s is token t with its s-th expert. Five launches compute the
experts of a layer, none of which needs the host to know where the tokens went:

1. `route`: softmax of the router's logits, and each token's experts with their weights.
2. `sort_by_expert`: the pairs in the order of their experts.
3. `gate_up`: gate and up projection of the sorted pairs with SwiGLU.
4. `down`: down projection, times the router's weights, back in the order of the pairs.
5. `add_pairs`: the sum of each token's pairs.

Other grouped products may stand in place of 3 and 4 (`layers.matmul.candidates`). Their results stay in the order of
the experts, and `add_pairs` weights them.

The grids of 3 and 4 are as large as the most tiles that this number of pairs may need. A program finds its tile from
the experts' starts, and ends at once if there is none. Pairs of one expert that fill several tiles read its weights
from L2.

A tile of results is [columns, tokens]: the weights are the first operand of the product. So tiles of 16 tokens waste
nothing, while tensor cores take 64 rows of a first operand at a time. The weights come by the tensor memory accelerator
where there is one.

Weights may be in e4m3, and the inputs of their products then are too.

The weights may be those of some experts alone, a tensor-parallel rank's. `route` gives these the numbers from 0 on.
Pairs with other experts get the number of none: they come last in the order, no tile is theirs, and `add_pairs` leaves
them out.

All five are dependent launches (see `dependent_launch`). Arguments of both products:
    order, starts: from `sort_by_expert`.
    weight: `[num_experts, rows, columns]`, contiguous, of x's dtype.
    config: launch constants; None for some that work.
    weight_scale, x_scale: of a weight and an x in e4m3, else None. The weight's: float32, contiguous, `[num_experts,
        rows, 1]`, or of blocks `[num_experts, rows / 128, columns / 128]`. x's: float32, any strides, a number for each
        row of x, `[len(x), 1]`, or with a weight in blocks `[len(x), columns / 128]`.
    dtype: of the result; None: x's.
    bias: of each expert, `[num_experts, rows]`, contiguous, any float dtype; None for none.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.linear_checks import BLOCK
from nanovllm.kernels.shared_memory import fits, fitting_stages
from nanovllm.kernels.silu_and_mul import SWIGLU, Activation, gated, gated_torch
from nanovllm.kernels.triton_stub import TensorDescriptor, tl, triton

_E4M3 = torch.float8_e4m3fn
MAX_EXPERTS = 1024  # What one program sorts and compares at once.
_ROUTE_ELEMENTS = 512  # logits of a program of `route`, which is one warp: rows of several pass through shared memory
_PLACES = tl.constexpr(2**16 - 1)  # more than MAX_EXPERTS
# Pairs that a program of `sort_by_expert` reads at once at most, and those that a warp reads.
_SORT_BLOCK, _SORT_WARP = 4096, 512


class TileConfig(NamedTuple):
    """Launch constants of `gate_up` or `down`, all powers of two except num_stages."""

    tokens: int  # pairs of a tile, at least 16
    columns: int  # output columns of a tile, of `gate_up` as many of the gate and of the up projection; at least 16
    k: int  # input columns of a step, at least 16
    num_warps: int
    num_stages: int  # of the load pipeline

    def fitted(self, num_weights: int, itemsize: int, device: torch.device) -> "TileConfig | None":
        """These constants, with as many stages as the card's shared memory holds; None if it does not hold two, or the
        tile's result, which passes through it at the end.

        num_weights: rows of the weight for each output column: 2 of `gate_up`, 1 of `down`. itemsize: bytes of a number
        of x and of the weight.
        """
        num_stages = fitting_stages(self.stage_bytes(num_weights, itemsize), self.num_stages, device)
        is_fitting = num_stages and fits(self.result_bytes(itemsize), device)
        return self._replace(num_stages=num_stages) if is_fitting else None

    def result_bytes(self, itemsize: int) -> int:
        return self.tokens * self.columns * itemsize

    def stage_bytes(self, num_weights: int, itemsize: int) -> int:
        return self.k * itemsize * (self.tokens + num_weights * self.columns)


def default_config(num_pairs: int, num_experts: int, itemsize: int) -> TileConfig:
    """Launch constants that work for both products on every card; those of the tuned table are faster."""
    tokens = 16
    while tokens < 128 and tokens * num_experts < num_pairs:
        tokens *= 2
    return TileConfig(tokens, 64, 128 // itemsize, 4, 3)


# Every batch has another number of tokens; specialising on it would compile the kernel again.
@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    logits, scales, context_lens, experts, weights, num_tokens, logits_stride, num_experts, first_mine, num_mine,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr, TOKENS: tl.constexpr,
    NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, PADDED_EXPERTS)[None, :]
    slot = tl.arange(0, SLOTS)[None, :]
    inside = (token < num_tokens)[:, None]
    offset = token.to(tl.int64)[:, None] * logits_stride + column
    is_expert = column < num_experts
    logit = tl.load(logits + offset, mask=inside & is_expert, other=0.0)
    logit = tl.where(logit == 0, tl.zeros_like(logit), logit)  # No zero is below another.
    # A logit and its place in one integer: of equal logits, the first has the highest. With integers the highest of a
    # warp is one instruction, if they have 32 bits.
    BITS: tl.constexpr = tl.int16 if logit.dtype.primitive_bitwidth == 16 else tl.int32
    KEY: tl.constexpr = tl.int32 if logit.dtype.primitive_bitwidth == 16 else tl.int64
    MASK: tl.constexpr = 2 ** (logit.dtype.primitive_bitwidth - 1) - 1
    bits = logit.to(BITS, bitcast=True).to(KEY)
    left = (tl.where(bits < 0, bits ^ MASK, bits) << 16) + (_PLACES - column)
    LOWEST: tl.constexpr = -(2 ** (logit.dtype.primitive_bitwidth + 15))
    left = tl.where(is_expert, left, LOWEST)
    highest = tl.zeros([TOKENS, 1], tl.float32)
    chosen = tl.zeros([TOKENS, SLOTS], tl.int32)
    weight = tl.zeros([TOKENS, SLOTS], tl.float32)
    for s in tl.static_range(TOP_K):
        best = tl.max(left, axis=1, keep_dims=True)
        left = tl.where(left == best, LOWEST, left)
        bits = best >> 16
        value = tl.where(bits < 0, bits ^ MASK, bits).to(BITS).to(logit.dtype, bitcast=True).to(tl.float32)
        if s == 0:
            highest = value
        chosen = tl.where(slot == s, _PLACES - (best & _PLACES).to(tl.int32), chosen)
        weight = tl.where(slot == s, tl.exp(value - highest), weight)
    total = tl.sum(tl.where(is_expert, tl.exp(logit.to(tl.float32) - highest), 0.0), axis=1, keep_dims=True)
    if NORMALIZE:
        total = tl.sum(weight, axis=1, keep_dims=True)
    weight /= total
    if scales is not None:
        weight *= tl.load(scales + chosen).to(tl.float32)
    chosen -= first_mine
    chosen = tl.where((chosen >= 0) & (chosen < num_mine), chosen, num_mine)
    if context_lens is not None:
        is_padding = tl.load(context_lens + token, mask=token < num_tokens, other=0) == 0
        chosen = tl.where(is_padding[:, None], num_mine, chosen)
    pair = token.to(tl.int64)[:, None] * TOP_K + slot
    inside = inside & (slot < TOP_K)
    tl.store(experts + pair, chosen.to(experts.dtype.element_ty), mask=inside)
    tl.store(weights + pair, weight, mask=inside)


def route(
    logits: Tensor,
    top_k: int,
    normalize: bool,
    context_lens: Tensor | None = None,
    scales: Tensor | None = None,
    mine: range | None = None,
) -> tuple[Tensor, Tensor]:
    """Each token's experts, the most probable first, and their probabilities, which weight them.

    Args:
        logits: of the router, `[num_tokens, num_experts]`, bfloat16, float16 or float32; rows contiguous, at most
            MAX_EXPERTS.
        normalize: whether a token's weights are divided by their sum.
        context_lens: int32 [num_tokens]; a token with 0 is padding and gets no expert. None: no token is padding.
        scales: `[num_experts]`, any float dtype, which then multiply the weights; None for ones.
        mine: the experts whose weights are here; None: all.

    Returns:
        experts: int16 `[num_tokens, top_k]`, numbers within `mine`; len(mine) means none. Of equal probabilities, the
            lower number is first.
        weights: float32 `[num_tokens, top_k]`; also of experts that are not here.
    """
    num_tokens, num_experts = logits.shape
    if num_experts > MAX_EXPERTS or not 1 <= top_k <= num_experts or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be [num_tokens, top_k={top_k}..{MAX_EXPERTS}] with contiguous rows, not {list(logits.shape)}"
        )
    experts = torch.empty(num_tokens, top_k, dtype=torch.int16, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens == 0:
        return experts, weights
    padded = triton.next_power_of_2(num_experts)
    tokens = max(1, _ROUTE_ELEMENTS // padded)
    launcher(_route_kernel, (triton.cdiv(num_tokens, tokens),), has_pdl(logits.device))(
        logits, scales, context_lens, experts, weights, num_tokens, logits.stride(0), num_experts,
        *first_and_number(mine, num_experts), TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k), PADDED_EXPERTS=padded,
        TOKENS=tokens, NORMALIZE=normalize, num_warps=1,
    )  # fmt: skip
    return experts, weights


def first_and_number(mine: range | None, num_experts: int) -> tuple[int, int]:
    """Of the experts whose weights are here. Raises ValueError unless they are among num_experts."""
    mine = range(num_experts) if mine is None else mine
    if not 0 <= mine.start < mine.stop <= num_experts or mine.step != 1:
        raise ValueError(f"mine must be a range within {num_experts} experts, not {mine}")
    return mine.start, len(mine)


def route_torch(
    logits: Tensor,
    top_k: int,
    normalize: bool,
    context_lens: Tensor | None = None,
    scales: Tensor | None = None,
    mine: range | None = None,
) -> tuple[Tensor, Tensor]:
    """The twin of `route`."""
    probabilities = logits.float().softmax(-1)
    experts = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = probabilities.gather(1, experts)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    if scales is not None:
        weights = weights * scales.float()[experts]
    first, number = first_and_number(mine, logits.shape[1])
    experts = experts - first
    experts = experts.masked_fill((experts < 0) | (experts >= number), number)
    if context_lens is not None:
        experts = experts.masked_fill((context_lens == 0)[:, None], number)
    return experts.short(), weights


@triton.jit(do_not_specialize=["num_tokens"])
def _sort_kernel(
    experts, order, starts, positions, num_tokens, num_experts, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A program lists the pairs of one expert, or of none. It reads all pairs, to count those that are listed before
    its own."""
    await_previous(PDL)
    mine = tl.program_id(0)
    num_pairs = num_tokens * TOP_K  # known to be a multiple of top_k, so that several are loaded at once
    pair = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_pairs, BLOCK):
        expert = tl.load(experts + first + pair, mask=first + pair < num_pairs, other=num_experts + 1)
        before += (expert < mine).to(tl.int32)
    start = tl.sum(before)
    end = start
    for first in range(0, num_pairs, BLOCK):
        inside = first + pair < num_pairs
        expert = tl.load(experts + first + pair, mask=inside, other=num_experts)
        is_mine = (inside & (expert == mine)).to(tl.int32)
        position = end + tl.cumsum(is_mine) - 1
        tl.store(order + position, first + pair, mask=is_mine != 0)
        if positions is not None:
            tl.store(positions + first + pair, position, mask=is_mine != 0)
        end += tl.sum(is_mine)
    tl.store(starts + mine, start)


def sort_by_expert(experts: Tensor, num_experts: int, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The pairs in the order of their experts, those of one expert in their own order.

    Args:
        experts: int16 `[num_tokens, top_k]`, contiguous, from `route`.
        positions: int32 `[num_tokens * top_k]`, contiguous: becomes each pair's place in `order`; None if not needed.

    Returns:
        order: int32 `[num_tokens * top_k]`, the pairs; last those without an expert.
        starts: int32 `[num_experts + 1]`, where each expert's pairs begin in `order`, and where the last ones end.
    """
    num_pairs = experts.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    block = min(max(triton.next_power_of_2(num_pairs), 1024), _SORT_BLOCK)
    launcher(_sort_kernel, (num_experts + 1,), has_pdl(experts.device))(
        experts, order, starts, positions, len(experts), num_experts, TOP_K=experts.shape[1], BLOCK=block,
        num_warps=min(block // _SORT_WARP, 32),
    )  # fmt: skip
    return order, starts


@triton.jit
def _add_product(acc, tile_weights, values, scales, x_scales, is_column, start_k, group_stride, BLOCK: tl.constexpr):
    """acc + tile_weights values; with BLOCK the product times the scales of its weights and of x."""
    if BLOCK == 0:
        acc = tl.dot(tile_weights, values, acc, input_precision="ieee")
    else:
        group = start_k // BLOCK
        product = tl.dot(tile_weights, values, input_precision="ieee")
        product *= tl.load(scales + group, mask=is_column, other=0.0)[:, None]
        acc += product * tl.load(x_scales + group * group_stride)[None, :]
    return acc


# The stride between groups is the number of tokens.
@triton.jit(do_not_specialize=["group_stride"])
def _experts_kernel(
    x, x_scale, weight, weight_scale, bias, order, starts, weights, y, x_stride, scale_stride, group_stride,
    num_experts, num_columns, K: tl.constexpr, TOP_K: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, K_TILE: tl.constexpr, BLOCK: tl.constexpr,
    SILU: tl.constexpr, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, TMA: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """SILU: y [sorted pairs, num_columns] of x [tokens, K], `gated`. Otherwise y [pairs,
    num_columns] of x [sorted pairs, K], times the weights. weight: a pointer, or with TMA a descriptor of [all experts'
    rows, K]. BLOCK: its columns and rows that share a scale, a multiple of K_TILE; 0 if rows do. scale_stride,
    group_stride: of x_scale."""
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

    row = first + tl.arange(0, TOKENS)
    is_row = row < end_of_expert
    # Rows that are no pair's repeat the first one, so that loads need no mask.
    pair = tl.load(order + tl.where(is_row, row, first))
    if SILU:
        x_row, y_row = pair // TOP_K, row
        first_row = expert * 2 * num_columns + first_column
    else:
        x_row, y_row = tl.where(is_row, row, first), pair
        first_row = expert * num_columns + first_column
    k = tl.arange(0, K_TILE)
    x_tile = x + x_row.to(tl.int64)[:, None] * x_stride + k[None, :]
    column = tl.arange(0, COLUMNS)
    is_column = first_column + column < num_columns
    if not TMA:
        weight_tile = weight + (first_row + column).to(tl.int64)[:, None] * K + k[None, :]
        up_tile = weight + (first_row + num_columns + column).to(tl.int64)[:, None] * K + k[None, :]

    x_scales, scales, up_scales = x_scale, weight_scale, weight_scale
    if x_scale is not None:
        x_scales += x_row.to(tl.int64) * scale_stride
    if BLOCK > 0:
        scales += (first_row + column) // BLOCK * (K // BLOCK)
        up_scales += (first_row + num_columns + column) // BLOCK * (K // BLOCK)

    acc = tl.zeros([COLUMNS, TOKENS], tl.float32)
    if SILU:
        up = tl.zeros([COLUMNS, TOKENS], tl.float32)
    for start_k in range(0, K, K_TILE):
        if K % K_TILE == 0:
            values = tl.load(x_tile + start_k)
        else:
            values = tl.load(x_tile + start_k, mask=(k < K - start_k)[None, :], other=0.0)
        values = values.T
        if TMA:
            tile_weights = weight.load([first_row, start_k])
        else:
            inside = is_column[:, None] & (k < K - start_k)[None, :]
            tile_weights = tl.load(weight_tile + start_k, mask=inside, other=0.0)
        acc = _add_product(acc, tile_weights, values, scales, x_scales, is_column, start_k, group_stride, BLOCK)
        if SILU:
            if TMA:
                tile_weights = weight.load([first_row + num_columns, start_k])
            else:
                tile_weights = tl.load(up_tile + start_k, mask=inside, other=0.0)
            up = _add_product(up, tile_weights, values, up_scales, x_scales, is_column, start_k, group_stride, BLOCK)

    if BLOCK == 0 and weight_scale is not None:
        scales += first_row + column
        acc *= tl.load(scales, mask=is_column, other=0.0)[:, None]
        if SILU:
            up *= tl.load(scales + num_columns, mask=is_column, other=0.0)[:, None]
        factor = tl.load(x_scales)[None, :]
        acc *= factor
        if SILU:
            up *= factor
    if bias is not None:
        bias += first_row + column
        acc += tl.load(bias, mask=is_column, other=0.0).to(tl.float32)[:, None]
        if SILU:
            up += tl.load(bias + num_columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    if SILU:
        acc = gated(acc, up, GELU, ALPHA, LIMIT)
    else:
        acc *= tl.load(weights + pair)[None, :]
    y_tile = y + y_row.to(tl.int64)[:, None] * num_columns + (first_column + column)[None, :]
    tl.store(y_tile, acc.T.to(y.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def gate_up(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    weight: Tensor,
    config: TileConfig | None = None,
    *,
    weight_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    activation: Activation = SWIGLU,
) -> Tensor:
    """`silu(x Wg^T) * (x Wu^T)` (Shazeer 2020) of each pair's token with its expert's weights, in the order of the
    experts; summed in float32, rounded once.

    x: `[num_tokens, hidden_size]`, rows contiguous.
    weight: `[num_experts, 2 * intermediate, hidden_size]`, of each expert Wg, then Wu. The bias likewise.
    activation: what is computed of gate and up.

    Returns: `[num_pairs, intermediate]`, row i for pair order[i]; rows of pairs without an expert mean nothing.
    """
    rows, hidden_size = weight.shape[1:]
    if x.dim() != 2 or x.shape[1] != hidden_size or x.stride(1) != 1 or rows % 2:
        raise ValueError(
            f"x must be a [num_tokens, {hidden_size}] with contiguous rows for weight {list(weight.shape)}, not "
            f"{list(x.shape)} with strides {x.stride()}"
        )
    y = torch.empty(len(order), rows // 2, dtype=dtype or x.dtype, device=x.device)
    top_k = len(order) // max(len(x), 1)
    return _launch(x, order, starts, None, weight, config, weight_scale, x_scale, bias, y, top_k, activation)


def down(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    weights: Tensor,
    weight: Tensor,
    config: TileConfig | None = None,
    *,
    weight_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """`x W^T + bias` of each pair with its expert's weight, times the router's weight, in the order of the pairs;
    summed in float32, rounded once.

    x: `[num_pairs, intermediate]`, contiguous, from `gate_up`.
    weights: float32 `[num_tokens, top_k]`, contiguous, from `route`.
    weight: `[num_experts, hidden_size, intermediate]`.

    Returns: `[num_tokens, top_k, hidden_size]`; rows of pairs without an expert mean nothing.
    """
    hidden_size, intermediate = weight.shape[1:]
    if x.shape != (len(order), intermediate) or not x.is_contiguous():
        raise ValueError(
            f"x must be a contiguous [{len(order)}, {intermediate}] for weight {list(weight.shape)}, "
            f"not {list(x.shape)}"
        )
    y = torch.empty(*weights.shape, hidden_size, dtype=dtype or x.dtype, device=x.device)
    return _launch(x, order, starts, weights, weight, config, weight_scale, x_scale, bias, y, weights.shape[1])


def check_scales(x: Tensor, weight: Tensor, weight_scale: Tensor | None, x_scale: Tensor | None = None) -> None:
    """Raise ValueError unless there are scales for what is in e4m3, and none for anything else."""
    num_experts, rows, K = weight.shape
    if weight_scale is None:
        if weight.dtype != x.dtype or x.dtype == _E4M3:
            raise ValueError(f"weight must have x's dtype {x.dtype}, or be in e4m3 with a weight_scale")
        return
    in_blocks = weight_scale.shape[1:] != (rows, 1)
    unit = (num_experts, rows // BLOCK, K // BLOCK) if in_blocks else (num_experts, rows, 1)
    if weight.dtype != _E4M3 or weight_scale.dtype != torch.float32 or not weight_scale.is_contiguous():
        raise ValueError(f"weight_scale must be a contiguous float32 of a weight in e4m3, not of {weight.dtype}")
    if weight_scale.shape != unit or (in_blocks and (rows % BLOCK or K % BLOCK)):
        raise ValueError(
            f"weight_scale must be [{num_experts}, {rows}, 1] or of blocks of {BLOCK}, not {list(weight_scale.shape)}"
        )
    needed = (len(x), K // BLOCK if in_blocks else 1)
    if (x.dtype == _E4M3) != (x_scale is not None) or (x_scale is not None and x_scale.shape != needed):
        raise ValueError(f"x_scale must be {list(needed)} for an x in e4m3, else None; x is in {x.dtype}")


def check_bias(bias: Tensor | None, weight: Tensor) -> None:
    """Raise ValueError unless there is none, or one of a weight `[num_experts, rows, columns]`."""
    if bias is not None and (bias.shape != weight.shape[:2] or not bias.is_contiguous()):
        raise ValueError(f"bias must be a contiguous {list(weight.shape[:2])}, not {list(bias.shape)}")


def _launch(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    weights: Tensor | None,
    weight: Tensor,
    config: TileConfig | None,
    weight_scale: Tensor | None,
    x_scale: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    top_k: int,
    activation: Activation = SWIGLU,
) -> Tensor:
    """y. weights: None for `gate_up`."""
    check_scales(x, weight, weight_scale, x_scale)
    check_bias(bias, weight)
    if weight_scale is not None and x_scale is None:
        raise ValueError(f"x must be in e4m3 with an x_scale for a weight in e4m3, not in {x.dtype}")
    num_experts, num_rows, K = weight.shape
    if not weight.is_contiguous():
        raise ValueError(f"weight must be contiguous, not {list(weight.shape)} with strides {weight.stride()}")
    num_columns = y.shape[-1]
    num_pairs = len(order)
    if num_pairs == 0:
        return y
    tokens, columns, k_tile, num_warps, num_stages = config or default_config(num_pairs, num_experts, x.element_size())
    # Of n pairs with e experts, at most e tiles are not full.
    num_tiles = (num_pairs + min(num_experts, num_pairs) * (tokens - 1)) // tokens
    block = 0 if weight_scale is None or weight_scale.shape[1] == num_rows else BLOCK
    if block and k_tile > block:
        raise ValueError(f"config must have a k of at most {block} for a weight in blocks, not {k_tile}")
    x_scale_strides = (0, 0) if x_scale is None else x_scale.stride()
    has_tma = GpuFacts.of(x.device).has_tma and K * weight.element_size() % 16 == 0
    if has_tma:
        rows = weight.view(num_experts * num_rows, K)
        weight = TensorDescriptor.from_tensor(rows, [columns, k_tile])
    launcher(_experts_kernel, (num_tiles * triton.cdiv(num_columns, columns),), has_pdl(x.device))(
        x, x_scale, weight, weight_scale, bias, order, starts, weights, y, x.stride(0), *x_scale_strides, num_experts,
        num_columns, K=K, TOP_K=top_k, PADDED_EXPERTS=triton.next_power_of_2(num_experts),
        TOKENS=tokens, COLUMNS=columns, K_TILE=k_tile, BLOCK=block, SILU=weights is None,
        **activation.constants, TMA=has_tma, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return y


@triton.jit
def _add_pairs_kernel(
    y, positions, weights, experts, context_lens, more, out, more_stride, out_stride, num_columns, num_experts,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    if context_lens is not None and tl.load(context_lens + token) == 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    total = tl.zeros([BLOCK], tl.float32)
    out += token * out_stride + column
    if ADD:
        total += tl.load(out, mask=inside, other=0.0).to(tl.float32)
    if more is not None:
        total += tl.load(more + token * more_stride + column, mask=inside, other=0.0).to(tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        row = pair
        if positions is not None:
            row = tl.load(positions + pair).to(tl.int64)
        is_there = inside
        if experts is not None:
            is_there = column < tl.where(tl.load(experts + pair) < num_experts, num_columns, 0)
        value = tl.load(y + row * num_columns + column, mask=is_there, other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + pair)
        total += value
    tl.store(out, total.to(out.dtype.element_ty), mask=inside)


def add_pairs(
    y: Tensor,
    out: Tensor,
    add: bool,
    context_lens: Tensor | None = None,
    positions: Tensor | None = None,
    weights: Tensor | None = None,
    experts: Tensor | None = None,
    num_experts: int = 0,
    more: Tensor | None = None,
) -> Tensor:
    """The sum of each token's pairs in float32, rounded once: added to `out`, or into it.

    Args:
        y: `[num_tokens, top_k, hidden_size]`, contiguous: from `down`, or in the order of the experts and without the
            router's weights.
        out: `[num_tokens, hidden_size]` of y's dtype, rows contiguous. Returned.
        context_lens: as in `route`. Rows of padding stay as they are.
        positions, weights: of a y in the order of the experts: from `sort_by_expert` and `route`.
        experts, num_experts: from `route`, whose pairs with num_experts, none, count nothing; None if only those of
            padding have it.
        more: like out, a further tensor that is added; None for none.
    """
    num_tokens, top_k, hidden_size = y.shape
    if out.shape != (num_tokens, hidden_size) or out.stride(1) != 1 or out.dtype != y.dtype:
        raise ValueError(
            f"out must be [{num_tokens}, {hidden_size}] {y.dtype} with contiguous rows, not {list(out.shape)} "
            f"{out.dtype} with strides {out.stride()}"
        )
    if more is not None and (more.shape != out.shape or more.stride(1) != 1):
        raise ValueError(f"more must be {list(out.shape)} with contiguous rows, not {list(more.shape)}")
    if num_tokens:
        block = min(1024, triton.next_power_of_2(hidden_size))
        launcher(_add_pairs_kernel, (num_tokens, triton.cdiv(hidden_size, block)), has_pdl(y.device))(
            y, positions, weights, experts, context_lens, more, out, 0 if more is None else more.stride(0),
            out.stride(0), hidden_size, num_experts, TOP_K=top_k, BLOCK=block, ADD=add, num_warps=4,
        )  # fmt: skip
    return out


def experts_torch(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    num_experts: int,
    gate_up: Callable[[Tensor, int], Tensor],
    down: Callable[[Tensor, int], Tensor],
    activation: Activation = SWIGLU,
) -> Tensor:
    """The twin of `gate_up`, `down` and `add_pairs`: the weighted sum of each token's experts, float32 `[num_tokens,
    hidden_size]`, added in the order of their numbers. experts, weights: from `route_torch`. gate_up, down: the product
    of rows by an expert's weight, its bias included. activation: as in `gate_up`."""
    total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in experts.unique().tolist():
        if expert == num_experts:  # of padding, or on another rank
            continue
        token, slot = (experts == expert).nonzero(as_tuple=True)
        y = down(gated_torch(gate_up(x[token], expert), activation), expert).float()
        total.index_add_(0, token, y * weights[token, slot, None])
    return total
