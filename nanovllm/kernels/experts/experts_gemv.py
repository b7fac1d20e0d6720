"""The experts of a mixture for a few tokens, where each expert multiplies one token: two launches, routing included.

Such a layer takes as long as reading its experts. A program of `gate_up` computes a few columns of one token with one
of its experts. A program of `down` computes a few columns of one token with all of its experts and adds them up, so
that nothing is combined between programs. Both find the experts in the router's logits, which takes less time than a
launch that finds them for both. See `gemv` for the products themselves.

Arguments of both functions:
    logits: of the router, `[num_tokens, num_experts]`, any float dtype, rows contiguous.
    weight: contiguous, of x's dtype, or with a scale of e4m3, `[num_experts, rows, columns]`.
    context_lens: int32 [num_tokens]; a token with 0 is padding, whose row is left as it is. None: no token is padding.
    mine: the experts whose weights these are, a tensor-parallel rank's, which then has `[len(mine), rows, columns]`;
        None: all. Others are neither read nor computed, and add nothing.
    config: launch constants.
    weight_scale: of a weight in e4m3: float32, contiguous, `[num_experts, rows, 1]`, or of blocks
        `[num_experts, rows / 128, columns / 128]`; else None.
    bias: of each expert, `[num_experts, rows]`, contiguous, any float dtype; None for none.

Both are dependent launches (see `dependent_launch`). `gate_up` lets `down` start after its own wait. So `down` may read
the logits, and the weights of their experts, before it waits for `gate_up`. It has to be the next launch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, has_pdl
from nanovllm.kernels.experts.experts import check_bias, check_scales, first_and_number
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.gemv import unroll_factor
from nanovllm.kernels.matmul.linear_checks import BLOCK, MAX_NORM_SIZE
from nanovllm.kernels.silu_and_mul import SWIGLU, Activation, gated
from nanovllm.kernels.triton_stub import tl, triton

MAX_TOKENS = 16


class ExpertsGemvConfig(NamedTuple):
    """Launch constants of `gate_up` or `down`, all powers of two."""

    rows: int  # weight rows of a program, of each of its experts; in `gate_up` two make one column of the result
    k_tile: int  # columns of a weight tile, at least 16; a program loads two tiles at once, or one that spans a row
    num_warps: int


@triton.jit
def _gate_up_kernel(
    x, norm_weight, logits, weight, weight_scale, bias, context_lens, y, x_stride, logits_stride, num_experts,
    first_mine, num_mine, N, eps, K: tl.constexpr, TOP_K: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, K_TILE: tl.constexpr, VECTOR: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
    GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [tokens * TOP_K, N] = gate and up of norm(x), `gated`. BLOCK: columns and rows that share a
    scale; 0 if rows do."""
    token, slot = tl.program_id(1) // TOP_K, tl.program_id(1) % TOP_K
    k = tl.arange(0, K_TILE)
    if norm_weight is not None:
        scale = tl.load(norm_weight + k, mask=k < K, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if context_lens is not None and tl.load(context_lens + token) == 0:
        return

    number = tl.arange(0, PADDED_EXPERTS)
    left = tl.load(logits + token * logits_stride + number, mask=number < num_experts, other=-float("inf")).to(
        tl.float32
    )
    expert = 0
    for _ in range(slot + 1):
        _, expert = tl.max(left, axis=0, return_indices=True)
        left = tl.where(number == expert, -float("inf"), left)
    expert = tl.minimum(expert, num_experts - 1)  # Rows that are not finite may choose any number.
    expert -= first_mine
    if (expert < 0) | (expert >= num_mine):
        return

    # Even rows of the tile are gates, from the expert's first N rows, odd ones the ups that belong to them.
    OUTPUTS: tl.constexpr = ROWS // 2
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * OUTPUTS + row // 2
    weight_row = (expert * 2 * N + column + row % 2 * N).to(tl.int64)
    inside = (column < N)[:, None]
    # A thread loads as many weights in e4m3 at once as numbers of x, or the weights would have to change threads.
    weight_k = k[None, :] if weight_scale is None else tl.max_contiguous(k[None, :], [1, VECTOR])
    weight += weight_row[:, None] * K + weight_k
    w = tl.load(weight, mask=inside & (k < K)[None, :], other=0.0)
    if BLOCK > 0:
        vector = tl.arange(0, K_TILE // VECTOR)[None, :] * VECTOR
        block_row = weight_scale + (weight_row // BLOCK * (K // BLOCK))[:, None]
    elif weight_scale is not None:
        row_scale = tl.load(weight_scale + weight_row, mask=column < N, other=0.0)
    x += token * x_stride + k
    if norm_weight is not None:
        squares = tl.zeros([K_TILE], dtype=tl.float32)
        for start in range(0, K, K_TILE):
            value = tl.load(x + start, mask=k < K - start, other=0.0).to(tl.float32)
            squares += value * value
        inverse_rms = tl.rsqrt(tl.sum(squares) / K + eps)

    acc = tl.zeros([ROWS, K_TILE // VECTOR], dtype=tl.float32)
    for start in tl.range(0, K, K_TILE, loop_unroll_factor=UNROLL):
        value = tl.load(x + start, mask=k < K - start, other=0.0)
        left_k = K - K_TILE - start
        next_w = tl.load(weight + K_TILE + start, mask=inside & (k < left_k)[None, :], other=0.0)
        if norm_weight is not None:
            value = (value.to(tl.float32) * inverse_rms * scale.to(tl.float32)).to(value.dtype)
            scale = tl.load(norm_weight + K_TILE + start + k, mask=k < left_k, other=0.0)
        # A vector is what one thread loaded at once, so this sum needs no other thread.
        product = value.to(tl.float32)[None, :] * w.to(tl.float32)
        part = tl.sum(tl.reshape(product, (ROWS, K_TILE // VECTOR, VECTOR)), axis=2)
        if BLOCK > 0:
            part *= tl.load(block_row + (start + vector) // BLOCK, mask=inside & (vector < K - start), other=0.0)
        acc += part
        w = next_w
    result = tl.sum(acc, axis=1)
    if BLOCK == 0 and weight_scale is not None:
        result *= row_scale
    if bias is not None:
        result += tl.load(bias + weight_row, mask=column < N, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(result, (OUTPUTS, 2)))
    result = gated(gate, up, GELU, ALPHA, LIMIT)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(y + tl.program_id(1) * N + output, result.to(y.dtype.element_ty), mask=output < N)


def gate_up(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    logits: Tensor,
    weight: Tensor,
    top_k: int,
    context_lens: Tensor | None,
    config: ExpertsGemvConfig,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    activation: Activation = SWIGLU,
    mine: range | None = None,
) -> Tensor:
    """`silu(x Wg^T) * (x Wu^T)` (Shazeer 2020) of each token with each of its experts, summed in float32.

    x: `[num_tokens, hidden_size]`, 1 to MAX_TOKENS tokens, rows contiguous; the products' input is its RMS norm
        (Zhang & Sennrich 2019) with this weight and eps, rounded to x's dtype. norm_weight None: x itself.
    weight: of each expert Wg, then Wu: `[num_experts, 2 * intermediate, hidden_size]`. The bias likewise.
    activation: what is computed of gate and up.

    Returns: `[num_tokens * top_k, intermediate]`; rows of padding, and of experts that are not here, mean nothing.
    """
    num_tokens, K = x.shape
    counts = _check(x, logits, weight, weight_scale, bias, top_k, mine)
    if weight.shape[1] % 2 or (norm_weight is not None and (norm_weight.shape != (K,) or K > MAX_NORM_SIZE)):
        raise ValueError(f"weight must have an even number of rows, norm_weight {K} of at most {MAX_NORM_SIZE} numbers")
    N = weight.shape[1] // 2
    y = torch.empty(num_tokens * top_k, N, dtype=x.dtype, device=x.device)
    rows, k_tile, num_warps = config
    launcher(_gate_up_kernel, (triton.cdiv(2 * N, rows), num_tokens * top_k), has_pdl(x.device))(
        x, norm_weight, logits, weight, weight_scale, bias, context_lens, y, x.stride(0), logits.stride(0),
        *counts, N, eps, K=K, TOP_K=top_k, PADDED_EXPERTS=triton.next_power_of_2(counts[0]), ROWS=rows,
        K_TILE=k_tile, VECTOR=16 // x.element_size(), UNROLL=_unroll_factor(weight, k_tile),
        BLOCK=_block(weight, weight_scale), **activation.constants, num_warps=num_warps,
    )  # fmt: skip
    return y


@triton.jit
def _down_kernel(
    x, logits, scales, weight, weight_scale, bias, context_lens, out, logits_stride, out_stride, num_experts,
    first_mine, num_mine, N, K: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, PADDED_EXPERTS: tl.constexpr,
    ROWS: tl.constexpr, K_TILE: tl.constexpr, VECTOR: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr,
    NORMALIZE: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, N] = the weighted sum of x [tokens, TOP_K, K] by the experts, added to it with ADD. BLOCK: as in
    `_gate_up_kernel`."""
    token = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    number, slot = tl.arange(0, PADDED_EXPERTS), tl.arange(0, SLOTS)
    left = tl.load(logits + token * logits_stride + number, mask=number < num_experts, other=-float("inf")).to(
        tl.float32
    )
    highest = tl.max(left, axis=0)
    total = tl.sum(tl.exp(left - highest), axis=0)
    experts = tl.zeros([SLOTS], tl.int32)
    share = tl.zeros([SLOTS], tl.float32)
    for s in tl.static_range(TOP_K):
        logit, expert = tl.max(left, axis=0, return_indices=True)
        experts = tl.where(slot == s, expert, experts)
        share = tl.where(slot == s, tl.exp(logit - highest), share)
        left = tl.where(number == expert, -float("inf"), left)
    if NORMALIZE:
        total = tl.sum(share, axis=0)
    experts = tl.minimum(experts, num_experts - 1)  # Rows that are not finite may choose any number.
    share /= total
    if scales is not None:
        share *= tl.load(scales + experts).to(tl.float32)
    experts -= first_mine
    is_mine = (slot < TOP_K) & (experts >= 0) & (experts < num_mine)
    share = tl.where(is_mine, share, 0.0)

    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, K_TILE)[None, None, :]
    weight_row = experts[:, None] * N + row[None, :]
    weight_k = k if weight_scale is None else tl.max_contiguous(k, [1, 1, VECTOR])
    weight += weight_row.to(tl.int64)[:, :, None] * K + weight_k
    inside_rows = is_mine[:, None] & (row < N)[None, :]
    inside = inside_rows[:, :, None]
    w = tl.load(weight, mask=inside & (k < K), other=0.0)
    if BLOCK > 0:
        vector = tl.arange(0, K_TILE // VECTOR)[None, None, :] * VECTOR
        block_row = weight_scale + (weight_row // BLOCK * (K // BLOCK))[:, :, None]
    elif weight_scale is not None:
        row_scale = tl.load(weight_scale + weight_row, mask=inside_rows, other=0.0)
    if PDL:
        gdc_wait()
    if context_lens is not None and tl.load(context_lens + token) == 0:
        return

    out += token * out_stride + row
    if ADD:
        before = tl.load(out, mask=row < N, other=0.0).to(tl.float32)
    x += (token * TOP_K + slot)[:, None, None] * K + k
    acc = tl.zeros([SLOTS, ROWS, K_TILE // VECTOR], dtype=tl.float32)
    for start in tl.range(0, K, K_TILE, loop_unroll_factor=UNROLL):
        value = tl.load(x + start, mask=is_mine[:, None, None] & (k < K - start), other=0.0)
        next_w = tl.load(weight + K_TILE + start, mask=inside & (k < K - K_TILE - start), other=0.0)
        # A vector is what one thread loaded at once, so this sum needs no other thread.
        product = value.to(tl.float32) * w.to(tl.float32)
        part = tl.sum(tl.reshape(product, (SLOTS, ROWS, K_TILE // VECTOR, VECTOR)), axis=3)
        if BLOCK > 0:
            part *= tl.load(block_row + (start + vector) // BLOCK, mask=inside & (vector < K - start), other=0.0)
        acc += part
        w = next_w
    of_experts = tl.sum(acc, axis=2)
    if BLOCK == 0 and weight_scale is not None:
        of_experts *= row_scale
    if bias is not None:
        of_experts += tl.load(bias + weight_row, mask=inside_rows, other=0.0).to(tl.float32)
    result = tl.sum(of_experts * share[:, None], axis=0)
    if ADD:
        result += before
    tl.store(out, result.to(out.dtype.element_ty), mask=row < N)


def down(
    x: Tensor,
    logits: Tensor,
    weight: Tensor,
    top_k: int,
    normalize: bool,
    out: Tensor,
    add: bool,
    context_lens: Tensor | None,
    config: ExpertsGemvConfig,
    weight_scale: Tensor | None = None,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    mine: range | None = None,
) -> Tensor:
    """The sum over each token's experts of `x W^T + bias`, times the expert's probability, in float32 and rounded
    once: added to `out`, or into it.

    x: `[num_tokens * top_k, intermediate]`, contiguous, from `gate_up`.
    weight: `[num_experts, hidden_size, intermediate]`.
    normalize: whether a token's probabilities are divided by their sum.
    scales: `[num_experts]`, any float dtype, which then multiply the probabilities; None for ones.
    out: `[num_tokens, hidden_size]` of x's dtype, rows contiguous. Returned.
    """
    _, N, K = weight.shape
    counts = _check(x, logits, weight, weight_scale, bias, top_k, mine)
    if x.shape != (len(logits) * top_k, K) or not x.is_contiguous():
        raise ValueError(f"x must be a contiguous [{len(logits) * top_k}, {K}], not {list(x.shape)}")
    if out.shape != (len(logits), N) or out.stride(1) != 1 or out.dtype != x.dtype:
        raise ValueError(f"out must be [{len(logits)}, {N}] {x.dtype} with contiguous rows, not {list(out.shape)}")
    rows, k_tile, num_warps = config
    launcher(_down_kernel, (triton.cdiv(N, rows), len(logits)), has_pdl(x.device))(
        x, logits, scales, weight, weight_scale, bias, context_lens, out, logits.stride(0), out.stride(0), *counts, N,
        K=K, TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k), PADDED_EXPERTS=triton.next_power_of_2(counts[0]),
        ROWS=rows, K_TILE=k_tile, VECTOR=16 // x.element_size(), UNROLL=_unroll_factor(weight, k_tile),
        BLOCK=_block(weight, weight_scale), NORMALIZE=normalize, ADD=add, num_warps=num_warps,
    )  # fmt: skip
    return out


def _unroll_factor(weight: Tensor, k_tile: int) -> int:
    """Only for e4m3: of 16 bits, the next tile is handed on as it is, and a loop takes fewer registers."""
    return unroll_factor(weight.shape[2], k_tile) if weight.element_size() == 1 else 1


def _block(weight: Tensor, weight_scale: Tensor | None) -> int:
    return 0 if weight_scale is None or weight_scale.shape[1] == weight.shape[1] else BLOCK


def _check(
    x: Tensor,
    logits: Tensor,
    weight: Tensor,
    weight_scale: Tensor | None,
    bias: Tensor | None,
    top_k: int,
    mine: range | None,
) -> tuple[int, int, int]:
    """The number of experts, and of those whose weights these are the first and their number. Raises ValueError unless
    the arguments fit together."""
    num_tokens, num_experts = logits.shape
    first, num_mine = first_and_number(mine, num_experts)
    if not 1 <= num_tokens <= MAX_TOKENS or not 1 <= top_k <= num_experts or logits.stride(1) != 1:
        raise ValueError(
            f"logits must be [1..{MAX_TOKENS}, at least top_k={top_k}] with contiguous rows, not {list(logits.shape)}"
        )
    if weight.dim() != 3 or len(weight) != num_mine or weight.shape[2] != x.shape[1] or not weight.is_contiguous():
        raise ValueError(
            f"weight must be a contiguous [{num_mine}, rows, {x.shape[1]}], not {list(weight.shape)} with strides "
            f"{weight.stride()}"
        )
    if x.stride(1) != 1:
        raise ValueError(f"x must have contiguous rows, not {list(x.shape)} with strides {x.stride()}")
    check_scales(x, weight, weight_scale)
    check_bias(bias, weight)
    return num_experts, first, num_mine
