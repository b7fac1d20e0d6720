"""The experts of many tokens on Hopper: grouped products whose operands come by the tensor memory accelerator.

Rows of x are copied first, one for each pair (`experts` says what a pair is), so that an expert's are neighbours. Then
tiles of x and of the weight are boxes, which the accelerator loads without a thread's help. A program stays for many
tiles, and loads the next one's first columns while it writes the last one's results. `experts.gate_up` and `down` load
rows from where they are, a pointer each: with few rows of an expert the copy costs more than it saves.

1. `plan_tiles`: how many pairs each expert has, and the tiles of both products.
2. `group_rows`: the copy, and where each pair went.
3. `grouped_product`: gate and up projection with its activation, then the down projection.
4. `experts.add_pairs`: each token's sum, with the router's weights.

An expert's pairs are in no particular order, and the next run may have another one. No row's product depends on its
place, so results do not change.

Arguments that several share:
    experts: int16 `[num_tokens, top_k]`, contiguous, from `experts.route`; num_experts, that of the weight, means none.
    plan: from `plan_tiles`, of these experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.experts.experts import check_bias, check_scales
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.linear_checks import BLOCK
from nanovllm.kernels.shared_memory import fits
from nanovllm.kernels.silu_and_mul import SWIGLU, Activation, gated
from nanovllm.kernels.triton_stub import TensorDescriptor, tl, triton

_COUNTED = 1024  # pairs of a program that counts them
_LISTED = 64  # tiles that a program lists at once
_RESULT_BYTES = 2  # of a number
_ALIGNED = 4  # numbers of 32 bits in 16 bytes


class GroupedTile(NamedTuple):
    """Launch constants of `grouped_product`, the first four powers of two."""

    tokens: int  # rows of a tile, at least 64
    columns: int  # output columns of a tile; with an activation as many of the gate and of the up projection
    k: int  # input columns of a step
    num_warps: int
    num_stages: int  # of the load pipeline
    num_programs: int = 1  # of a multiprocessor

    def shared_bytes(self, num_weights: int, itemsize: int) -> int:
        """What a program needs. num_weights: rows of the weight for each output column: 2 with an activation, else 1.
        itemsize: bytes of a number of x and of the weight."""
        stage = self.k * itemsize * (self.tokens + num_weights * self.columns)
        return stage * self.num_stages + self.tokens * self.columns * _RESULT_BYTES

    def is_fitting(self, num_weights: int, itemsize: int, device: torch.device) -> bool:
        return fits(self.shared_bytes(num_weights, itemsize), device)


class TilePlan(NamedTuple):
    """The tiles of a product, all in int32. The rows of expert 0 come first, then those of expert 1, and so on."""

    num_tiles: Tensor  # [1]
    ends: Tensor  # [num_experts], where each expert's rows end
    next_rows: Tensor  # [num_experts], the first row of each expert that `group_rows` has not filled yet
    experts: Tensor  # [most tiles], of each tile
    first_rows: Tensor  # [most tiles], of each tile


# Every step has another number of pairs; specialising on it would compile the kernel again.
@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    experts, counts, num_pairs, num_experts, PADDED_EXPERTS: tl.constexpr, COUNTED: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    pair = tl.program_id(0) * COUNTED + tl.arange(0, COUNTED)
    expert = tl.load(experts + pair, mask=pair < num_pairs, other=num_experts).to(tl.int32)
    number = tl.arange(0, PADDED_EXPERTS)
    count = tl.histogram(expert, PADDED_EXPERTS)
    tl.atomic_add(counts + number, count, mask=(number < num_experts) & (count > 0), sem="relaxed")


@triton.jit
def _plan_kernel(
    counts, num_tiles, ends, next_rows, tile_experts, first_rows, num_experts,
    PADDED_EXPERTS: tl.constexpr, TOKENS: tl.constexpr, LISTED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program lists the tiles of one expert."""
    await_previous(PDL)
    expert = tl.program_id(0)
    number = tl.arange(0, PADDED_EXPERTS)
    count = tl.load(counts + number, mask=number < num_experts, other=0)
    tiles = (count + TOKENS - 1) // TOKENS
    first_row = tl.sum(tl.where(number < expert, count, 0))
    first_tile = tl.sum(tl.where(number < expert, tiles, 0))
    own_tiles = tl.sum(tl.where(number == expert, tiles, 0))
    tl.store(next_rows + expert, first_row)
    tl.store(ends + expert, first_row + tl.sum(tl.where(number == expert, count, 0)))
    if expert == 0:
        tl.store(num_tiles, tl.sum(tiles))
    for start in range(0, own_tiles, LISTED):
        tile = start + tl.arange(0, LISTED)
        tl.store(tile_experts + first_tile + tile, tl.full([LISTED], expert, tl.int32), mask=tile < own_tiles)
        tl.store(first_rows + first_tile + tile, first_row + tile * TOKENS, mask=tile < own_tiles)


def plan_tiles(experts: Tensor, num_experts: int, tokens: int) -> TilePlan:
    """Tiles of `tokens` rows for all pairs that have an expert; at least one pair."""
    num_pairs, device = experts.numel(), experts.device
    counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
    # Of n pairs with e experts, at most e tiles are not full.
    most = (num_pairs + min(num_experts, num_pairs) * (tokens - 1)) // tokens
    sizes = 1, num_experts, num_experts, most, most
    # Each begins at a multiple of 16 bytes. Triton compiles a kernel again where an argument that did no longer does.
    padded_sizes = [triton.cdiv(size, _ALIGNED) * _ALIGNED for size in sizes]
    parts = torch.empty(sum(padded_sizes), dtype=torch.int32, device=device).split(padded_sizes)
    plan = TilePlan(*(part[:size] for part, size in zip(parts, sizes, strict=True)))
    padded, pdl = triton.next_power_of_2(num_experts + 1), has_pdl(device)
    launcher(_count_kernel, (triton.cdiv(num_pairs, _COUNTED),), pdl)(
        experts, counts, num_pairs, num_experts, PADDED_EXPERTS=padded, COUNTED=_COUNTED, num_warps=4
    )
    launcher(_plan_kernel, (num_experts,), pdl)(
        counts, *plan, num_experts, PADDED_EXPERTS=padded, TOKENS=tokens, LISTED=_LISTED, num_warps=1
    )
    return plan


# Among these strides is the number of pairs.
@triton.jit(do_not_specialize=["group_stride", "num_pairs"])
def _group_rows_kernel(
    x, x_scale, experts, next_rows, positions, y, y_scale, x_stride, scale_stride, group_stride, num_pairs,
    num_experts, K: tl.constexpr, GROUPS: tl.constexpr, PADDED_GROUPS: tl.constexpr, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program copies one token's row to the places of its pairs."""
    await_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + token * x_stride + column, mask=column < K, other=0)
    if x_scale is not None:
        group = tl.arange(0, PADDED_GROUPS)
        scale = tl.load(x_scale + token * scale_stride + group * group_stride, mask=group < GROUPS, other=0.0)
    slot = tl.arange(0, SLOTS)
    pair = token * TOP_K + slot
    expert = tl.load(experts + pair, mask=slot < TOP_K, other=num_experts).to(tl.int32)
    has_row = (slot < TOP_K) & (expert < num_experts)
    # One request for all pairs: a loop would wait for each.
    rows = tl.atomic_add(next_rows + expert, 1, mask=has_row, sem="relaxed")
    tl.store(positions + pair, rows, mask=has_row)
    rows = tl.where(has_row, rows, -1)
    for s in tl.static_range(TOP_K):
        row = tl.sum(tl.where(slot == s, rows, 0)).to(tl.int64)
        tl.store(y + row * K + column, value, mask=column < tl.where(row >= 0, K, 0))
        if x_scale is not None:
            tl.store(y_scale + group * num_pairs + row, scale, mask=group < tl.where(row >= 0, GROUPS, 0))


def group_rows(
    x: Tensor, x_scale: Tensor | None, experts: Tensor, plan: TilePlan
) -> tuple[Tensor, Tensor | None, Tensor]:
    """A row of x for each pair, in the order of the plan, whose `next_rows` are used up.

    x: `[num_tokens, K]`, rows contiguous. x_scale: float32 `[num_tokens, groups]`, any strides, or None.

    Returns:
        rows: `[num_pairs, K]` of x's dtype. Those behind the last expert's mean nothing.
        scales: float32 `[num_pairs, groups]`, rows side by side in memory; None without x_scale.
        positions: int32 `[num_pairs]`, the row of each pair; of pairs without an expert it means nothing.
    """
    (num_tokens, K), top_k, num_pairs = x.shape, experts.shape[1], experts.numel()
    if len(experts) != num_tokens or x.stride(1) != 1:
        raise ValueError(f"x must be a [{len(experts)}, K] with contiguous rows, not {list(x.shape)}")
    rows = torch.empty(num_pairs, K, dtype=x.dtype, device=x.device)
    positions = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    groups, strides, scales = 1, (0, 0), None
    if x_scale is not None:
        groups, strides = x_scale.shape[1], (x_scale.stride(0), x_scale.stride(1))
        scales = torch.empty(groups, num_pairs, dtype=torch.float32, device=x.device)
    # As integers, since not all of Triton's copies know e4m3.
    source, target = (each.view(torch.uint8 if x.itemsize == 1 else torch.int16) for each in (x, rows))
    block = triton.next_power_of_2(K)
    launcher(_group_rows_kernel, (num_tokens,), has_pdl(x.device))(
        source, x_scale, experts, plan.next_rows, positions, target, scales, x.stride(0), *strides, num_pairs,
        len(plan.ends), K=K, GROUPS=groups, PADDED_GROUPS=triton.next_power_of_2(groups), TOP_K=top_k,
        SLOTS=triton.next_power_of_2(top_k), BLOCK=block, num_warps=min(8, max(1, block * x.itemsize // 512)),
    )  # fmt: skip
    return rows, None if scales is None else scales.t(), positions


@triton.jit(do_not_specialize=["group_stride", "num_programs"])
def _grouped_kernel(
    x_desc, x_scale, weight_desc, weight_scale, bias, y, num_tiles, ends, tile_experts, first_rows, num_columns, K,
    scale_stride, group_stride, num_programs, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, K_TILE: tl.constexpr,
    BLOCK: tl.constexpr, SILU: tl.constexpr, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """weight_desc: of boxes [1 or 2, COLUMNS, K_TILE]: with SILU those columns of the gate and of the up projection,
    whose product is one, because tensor cores take 256 columns at once. BLOCK: as in `experts`."""
    await_previous(PDL)
    PARTS: tl.constexpr = 2 if SILU else 1
    column_tiles = tl.cdiv(num_columns, COLUMNS)
    for i in tl.range(tl.program_id(0), tl.load(num_tiles) * column_tiles, num_programs, flatten=True):
        expert = tl.load(tile_experts + i // column_tiles)
        first = tl.load(first_rows + i // column_tiles)
        column = i % column_tiles * COLUMNS
        row = first + tl.arange(0, TOKENS)
        is_row = row < tl.load(ends + expert)
        # Of the weight's rows for the product's columns; columns that do not exist repeat the last one.
        part = tl.arange(0, PARTS * COLUMNS) // COLUMNS
        columns = tl.minimum(column + tl.arange(0, PARTS * COLUMNS) % COLUMNS, num_columns - 1)
        weight_row = (expert * PARTS + part) * num_columns + columns
        acc = tl.zeros([TOKENS, PARTS * COLUMNS], tl.float32)
        for k in range(0, K, K_TILE):  # What lies outside is zeros.
            values = x_desc.load([first, k])
            weight = weight_desc.load([expert * PARTS, column, k]).reshape([PARTS * COLUMNS, K_TILE]).T
            if BLOCK == 0:
                acc = tl.dot(values, weight, acc)
            else:
                group = k // BLOCK
                factor = tl.load(x_scale + row * scale_stride + group * group_stride, mask=is_row, other=0.0)
                first_row = expert * PARTS * num_columns + column
                of_columns = tl.load(weight_scale + first_row // BLOCK * (K // BLOCK) + group)
                if SILU:
                    of_up = tl.load(weight_scale + (first_row + num_columns) // BLOCK * (K // BLOCK) + group)
                    of_columns = tl.where(part == 0, of_columns, of_up)[None, :]
                acc += tl.dot(values, weight) * (factor[:, None] * of_columns)
        if BLOCK == 0 and weight_scale is not None:
            acc *= tl.load(x_scale + row * scale_stride, mask=is_row, other=0.0)[:, None]
            acc *= tl.load(weight_scale + weight_row)[None, :]
        if bias is not None:
            acc += tl.load(bias + weight_row).to(tl.float32)[None, :]
        if SILU:
            gate, up = acc.reshape([TOKENS, 2, COLUMNS]).permute([0, 2, 1]).split()
            acc = gated(gate, up, GELU, ALPHA, LIMIT)
        y_column = column + tl.arange(0, COLUMNS)
        y_tile = y + row.to(tl.int64)[:, None] * num_columns + y_column[None, :]
        tl.store(y_tile, acc.to(y.dtype.element_ty), mask=is_row[:, None] & (y_column < num_columns)[None, :])


def grouped_product(
    x: Tensor,
    weight: Tensor,
    plan: TilePlan,
    tile: GroupedTile,
    *,
    x_scale: Tensor | None = None,
    weight_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    bias: Tensor | None = None,
    activation: Activation | None = None,
) -> Tensor:
    """`x W^T + bias` of each row with its expert's weight; summed in float32, rounded once.

    Args:
        x: `[num_rows, K]`, contiguous, in the order of the plan, whose tiles have this one's tokens.
        weight: `[num_experts, N, K]`, contiguous, of x's dtype; with an activation of each expert the gate's N / 2
            rows, then those of up. A row has a multiple of 16 bytes.
        x_scale, weight_scale: of an x and a weight in e4m3, as in `experts`.
        dtype: of the result, 16 bits; None: x's.
        bias: `[num_experts, N]`, contiguous, any float dtype.
        activation: computed of gate and up, within the kernel.

    Returns: `[num_rows, N]`, or with an activation `[num_rows, N / 2]`; rows behind the last expert's mean nothing.
    """
    _, num_rows, K = weight.shape
    check_scales(x, weight, weight_scale, x_scale)
    check_bias(bias, weight)
    if x.shape[1:] != (K,) or not x.is_contiguous() or not weight.is_contiguous() or K * x.itemsize % 16:
        raise ValueError(
            f"x must be a contiguous [num_rows, {K}] in rows of a multiple of 16 bytes, as weight, not {list(x.shape)}"
        )
    parts = 1 if activation is None else 2
    num_columns = num_rows // parts
    y = torch.empty(len(x), num_columns, dtype=dtype or x.dtype, device=x.device)
    block = 0 if weight_scale is None or weight_scale.shape[1] == num_rows else BLOCK
    if block and (max(tile.k, tile.columns) > block or num_columns % tile.columns):
        raise ValueError(
            f"tile must have at most {block} for k and columns, a divisor of {num_columns}, for a weight in blocks, "
            f"not {tile.k} and {tile.columns}"
        )
    num_programs = GpuFacts.of(x.device).num_multiprocessors * tile.num_programs
    launcher(_grouped_kernel, (num_programs,), has_pdl(x.device))(
        TensorDescriptor.from_tensor(x, [tile.tokens, tile.k]), x_scale,
        TensorDescriptor.from_tensor(weight.view(-1, num_columns, K), [parts, tile.columns, tile.k]), weight_scale,
        bias, y, plan.num_tiles, plan.ends, plan.experts, plan.first_rows, num_columns, K,
        *((0, 0) if x_scale is None else x_scale.stride()), num_programs, TOKENS=tile.tokens, COLUMNS=tile.columns,
        K_TILE=tile.k, BLOCK=block, SILU=activation is not None, **(activation or SWIGLU).constants,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return y
