"""The experts of a mixture for a few tokens, of weights in 4 bits: two launches after `route`.

As in `experts_gemv` an expert multiplies one token, and a program of `down` adds up all experts of one token. As in
`four_bit_gemv` tensor cores multiply. In `down` the warps of a program have different experts, and several share one if
there are more warps.

Arguments of both functions:
    experts: int16 `[num_tokens, top_k]`, contiguous, from `route`; num_experts, that of the weight, means none.
    weight: `[num_experts, rows, columns]`.
    bias: `[num_experts, rows]`, any float dtype, contiguous, or None.
    config: launch constants.

Both are dependent launches (see `dependent_launch`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.four_bit import CHUNK, FourBit, check_four_bit
from nanovllm.kernels.matmul.four_bit_gemv import (
    groups_of_chunk,
    inverse_rms,
    norm_tile,
    sums_of_chunks,
)
from nanovllm.kernels.matmul.linear_checks import MAX_NORM_SIZE
from nanovllm.kernels.shared_memory import fitting_stages
from nanovllm.kernels.silu_and_mul import SWIGLU, Activation, gated
from nanovllm.kernels.triton_stub import tl, triton

MAX_TOKENS = 16
_COLUMNS = 8  # the fewest that tensor cores multiply


class FourBitExpertsConfig(NamedTuple):
    """Launch constants of `gate_up` or `down`, all numbers powers of two except num_stages."""

    rows: int  # weight rows of a program, at least 16; in `gate_up` two make one column of the result
    num_warps: int  # chunks of K, or in `down` of all experts' K, that are multiplied side by side
    num_stages: int  # of the load pipeline

    def fitted(self, device: torch.device) -> "FourBitExpertsConfig | None":
        """These constants, with as many stages as the card's shared memory holds; None if it does not hold two."""
        num_stages = fitting_stages(self.stage_bytes, self.num_stages, device)
        return self._replace(num_stages=num_stages) if num_stages else None

    @property
    def stage_bytes(self) -> int:
        """With four bytes for the norm's weight."""
        return self.num_warps * CHUNK * (self.rows // 2 + 2 * _COLUMNS + 4)


@triton.jit
def _four_bit_gate_up_kernel(
    x, norm_weight, experts, weight, scale, zero, bias, y, x_stride, num_experts, N, eps,
    K: tl.constexpr, TOP_K: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr, NORM_TILE: tl.constexpr,
    E2M1: tl.constexpr, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [tokens * TOP_K, N] = gate and up of norm(x), `gated`."""
    await_previous(PDL)
    pair = tl.program_id(1)
    expert = tl.load(experts + pair).to(tl.int64)
    if expert >= num_experts:
        return
    OUTPUTS: tl.constexpr = ROWS // 2
    # Even rows of the tile are gates, from the expert's first N rows, odd ones the ups that belong to them. Rows that
    # do not exist repeat the last one.
    lane = tl.arange(0, ROWS)
    row = expert * 2 * N + tl.minimum(tl.program_id(0) * OUTPUTS + lane // 2, N - 1) + lane % 2 * N
    column = tl.arange(0, COLUMNS)
    index = tl.arange(0, CHUNKS)
    x += pair // TOP_K * x_stride
    total = sums_of_chunks(
        x + (column * 0)[None, None, :], norm_weight, weight, scale, zero, row[None, :], index, index >= 0,
        column < GROUPS, ROWS, COLUMNS, CHUNKS, STEPS, CHUNKS, STEPS * CHUNKS * 128 == K, K, GROUP, GROUPS,
        E2M1, COMPILED, False,
    )  # fmt: skip
    dtype: tl.constexpr = x.dtype.element_ty
    acc = tl.sum(tl.sum(total, axis=0), axis=1)
    if norm_weight is not None:
        one = tl.zeros([1, 1], tl.int32)
        # All its rows have the same number.
        acc *= tl.sum(inverse_rms(x + one, one == 0, eps, 1, K, NORM_TILE))
    if bias is not None:
        acc += tl.load(bias + row).to(tl.float32)
    gate, up = tl.split(tl.reshape(acc, (OUTPUTS, 2)))
    result = gated(gate, up, GELU, ALPHA, LIMIT)
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(y + pair * N + output, result.to(dtype), mask=output < N)


def gate_up(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    experts: Tensor,
    weight: FourBit,
    bias: Tensor | None,
    config: FourBitExpertsConfig,
    activation: Activation = SWIGLU,
) -> Tensor:
    """`silu(x Wg^T) * (x Wu^T)` (Shazeer 2020) of each token with each of its experts, summed in float32.

    x: `[num_tokens, hidden_size]`, 1 to MAX_TOKENS tokens, rows contiguous; the products' input is its RMS norm
        (Zhang & Sennrich 2019) with this weight and eps, as in `four_bit_gemv`. norm_weight None: x itself.
    weight: of each expert Wg, then Wu: `[num_experts, 2 * intermediate, hidden_size]`.
    activation: what is computed of gate and up.

    Returns: `[num_tokens * top_k, intermediate]`; rows of pairs without an expert mean nothing.
    """
    check_gate_up(x, norm_weight, experts, weight, bias)
    num_experts, num_rows, K = weight.shape
    N = num_rows // 2
    rows, num_warps, num_stages = config
    y = torch.empty(experts.numel(), N, dtype=x.dtype, device=x.device)
    launcher(_four_bit_gate_up_kernel, (triton.cdiv(num_rows, rows), experts.numel()), has_pdl(x.device))(
        x, norm_weight, experts, *weight, bias, y, x.stride(0), num_experts, N, eps, K=K, TOP_K=experts.shape[1],
        GROUP=weight.group, GROUPS=groups_of_chunk(weight), COLUMNS=_COLUMNS, ROWS=rows, CHUNKS=num_warps,
        STEPS=triton.cdiv(triton.cdiv(K, CHUNK), num_warps), NORM_TILE=norm_tile(K, 1),
        E2M1=weight.is_e2m1, **activation.constants,
        COMPILED=x.is_cuda, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return y


@triton.jit
def _four_bit_down_kernel(
    x, experts, weights, weight, scale, zero, bias, out, out_stride, num_experts, N,
    K: tl.constexpr, TOP_K: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, CHUNKS: tl.constexpr, STEPS: tl.constexpr,
    E2M1: tl.constexpr, ADD: tl.constexpr, SHARD: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, N] = the weighted sum of x [tokens, TOP_K, K] by the experts, added to it with ADD. SHARD: whether
    some of a token's experts may be none; otherwise all of them are, or no one."""
    PARTS: tl.constexpr = CHUNKS // SLOTS  # warps of an expert
    await_previous(PDL)
    pair = tl.program_id(1) * TOP_K
    if not SHARD and tl.load(experts + pair) >= num_experts:
        return
    index = tl.arange(0, CHUNKS)
    slot, part = index // PARTS, index % PARTS
    is_slot = slot < TOP_K
    expert = tl.load(experts + pair + slot, mask=is_slot, other=0).to(tl.int64)
    if SHARD:
        is_slot = is_slot & (expert < num_experts)
    share = tl.load(weights + pair + slot, mask=is_slot, other=0.0)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Rows that do not exist repeat the last one.
    row = expert[:, None] * N + tl.minimum(output, N - 1)[None, :]
    column = tl.arange(0, COLUMNS)
    x_row = x + tl.where(is_slot, pair + slot, pair).to(tl.int64)[:, None, None] * K
    total = sums_of_chunks(
        x_row + (column * 0)[None, None, :], None, weight, scale, zero, row, part, is_slot, column < GROUPS,
        ROWS, COLUMNS, CHUNKS, STEPS, PARTS, SLOTS == TOP_K and STEPS * PARTS * 128 == K and not SHARD, K, GROUP,
        GROUPS, E2M1, COMPILED, False,
    )  # fmt: skip
    of_experts = tl.sum(total, axis=2)
    if bias is not None:
        shift = tl.load(bias + row, mask=(is_slot & (part == 0))[:, None], other=0.0)
        of_experts += shift.to(tl.float32)
    acc = tl.sum(of_experts * share[:, None], axis=0)
    out += tl.program_id(1) * out_stride + output
    if ADD:
        acc += tl.load(out, mask=output < N, other=0.0).to(tl.float32)
    tl.store(out, acc.to(x.dtype.element_ty), mask=output < N)


def down(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    weight: FourBit,
    bias: Tensor | None,
    out: Tensor,
    add: bool,
    config: FourBitExpertsConfig,
    is_shard: bool = False,
) -> Tensor:
    """The sum over each token's experts of `x W^T + bias`, times the expert's weight, in float32 and rounded once:
    added to `out`, or into it.

    is_shard: whether the weight is that of a rank's experts, so that any of a token's may be none: those add nothing.
        Otherwise a token has all of its experts or none, and rows of the latter stay as they are.

    x: `[num_tokens * top_k, intermediate]`, contiguous, from `gate_up`.
    weights: float32 `[num_tokens, top_k]`, contiguous, from `route`.
    weight: `[num_experts, hidden_size, intermediate]`.
    out: `[num_tokens, hidden_size]` of x's dtype, rows contiguous. Returned.
    """
    check_down(x, experts, weights, weight, bias, out)
    num_experts, N, K = weight.shape
    num_tokens, top_k = experts.shape
    rows, num_warps, num_stages = config
    slots = triton.next_power_of_2(top_k)
    num_warps = max(num_warps, slots)
    launcher(_four_bit_down_kernel, (triton.cdiv(N, rows), num_tokens), has_pdl(x.device))(
        x, experts, weights, *weight, bias, out, out.stride(0), num_experts, N, K=K, TOP_K=top_k, SLOTS=slots,
        GROUP=weight.group, GROUPS=groups_of_chunk(weight), COLUMNS=_COLUMNS, ROWS=rows, CHUNKS=num_warps,
        STEPS=triton.cdiv(triton.cdiv(K, CHUNK), num_warps // slots), E2M1=weight.is_e2m1, ADD=add, SHARD=is_shard,
        COMPILED=x.is_cuda, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    return out


def check_gate_up(x: Tensor, norm_weight: Tensor | None, experts: Tensor, weight: FourBit, bias: Tensor | None) -> None:
    """Raise ValueError, beginning with the argument's name, for what `gate_up` cannot compute."""
    _, num_rows, K = weight.shape
    _check(x, experts, weight, bias)
    if x.shape != (len(experts), K) or num_rows % 2:
        raise ValueError(f"x must be [{len(experts)}, {K}], and weight have an even number of rows, not {num_rows}")
    if norm_weight is not None and (norm_weight.shape != (K,) or K > MAX_NORM_SIZE or x.dtype != torch.bfloat16):
        raise ValueError(f"norm_weight must be [{K}] of at most {MAX_NORM_SIZE} for an x in bfloat16, not in {x.dtype}")


def check_down(x: Tensor, experts: Tensor, weights: Tensor, weight: FourBit, bias: Tensor | None, out: Tensor) -> None:
    """Raise ValueError, beginning with the argument's name, for what `down` cannot compute."""
    _, N, K = weight.shape
    _check(x, experts, weight, bias)
    num_tokens, top_k = experts.shape
    if x.shape != (num_tokens * top_k, K) or not x.is_contiguous():
        raise ValueError(f"x must be a contiguous [{num_tokens * top_k}, {K}], not {list(x.shape)}")
    if weights.shape != experts.shape or weights.dtype != torch.float32 or not weights.is_contiguous():
        raise ValueError(f"weights must be a contiguous float32 {list(experts.shape)}, not {list(weights.shape)}")
    if out.shape != (num_tokens, N) or out.stride(1) != 1 or out.dtype != x.dtype:
        raise ValueError(f"out must be [{num_tokens}, {N}] with contiguous rows, not {list(out.shape)} {out.dtype}")


def _check(x: Tensor, experts: Tensor, weight: FourBit, bias: Tensor | None) -> None:
    check_four_bit(weight, x.dtype)
    num_experts, rows, _ = weight.shape
    if experts.dim() != 2 or not 1 <= len(experts) <= MAX_TOKENS or not experts.is_contiguous():
        raise ValueError(f"experts must be a contiguous [1..{MAX_TOKENS}, top_k], not {list(experts.shape)}")
    if x.dim() != 2 or x.stride(1) != 1:
        raise ValueError(f"x must have contiguous rows, not {list(x.shape)} with strides {x.stride()}")
    if bias is not None and (bias.shape != (num_experts, rows) or not bias.is_contiguous()):
        raise ValueError(f"bias must be a contiguous [{num_experts}, {rows}], not {list(bias.shape)}")
