"""The experts of a mixture for a few tokens, of weights in MXFP4, on plain cores: two launches after `route`.

`four_bit_experts_gemv` has tensor cores multiply. They want weights in shared memory and each number of x in eight
columns, which many small programs load one by one. Here a thread loads eight bytes of a row, as in `int4_gemv`: sixteen
columns, which share a scale, and two vectors of x as they lie in memory.

The bits of an e2m1 number, brought to the right places of a float32, are that number times 2^-126; zero and 0.5 are no
special cases, because 0.5 becomes a subnormal. So x is multiplied by 2^64, and a thread's sum by 2^62, both exactly.
Numbers of x above 2^63 would overflow.

Arguments of both functions:
    experts: int16 `[num_tokens, top_k]`, contiguous, from `route`; num_experts, that of the weight, means none.
    weight: `[num_experts, rows, columns]`, e2m1 numbers in groups of 32 columns.
    bias: `[num_experts, rows]`, any float dtype, contiguous, or None.
    config: launch constants.

Both are dependent launches (see `dependent_launch`).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.experts.four_bit_experts_gemv import check_down, check_gate_up
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.four_bit import UNIT, FourBit, scale_of
from nanovllm.kernels.matmul.gemv import unroll_factor
from nanovllm.kernels.silu_and_mul import SWIGLU, Activation, gated
from nanovllm.kernels.triton_stub import tl, triton


class Mxfp4ExpertsConfig(NamedTuple):
    """Launch constants of `gate_up` or `down`, all powers of two."""

    rows: int  # weight rows of a program; in `gate_up` two make one column of the result
    k_tile: int  # columns of a weight tile, at least 32; a program loads two tiles at once, or one that spans K
    num_warps: int


# Results are the halves of a word's bytes, the lowest first. Multiplied by the sum of two powers of two, the sign and
# the other three bits of a number come to their places at once, for the two 16-bit halves of a word together.
_FLOATS = tl.constexpr("""{
    .reg .b32 s, t;
    and.b32 t, $8, 0x000f000f;
    mul.lo.u32 t, t, 0x1040;
    and.b32 $4, t, 0x81c00000;
    shl.b32 t, t, 16;
    and.b32 $0, t, 0x81c00000;
    and.b32 t, $8, 0x00f000f0;
    mul.lo.u32 t, t, 0x104;
    and.b32 $5, t, 0x81c00000;
    shl.b32 t, t, 16;
    and.b32 $1, t, 0x81c00000;
    shr.u32 s, $8, 8;
    and.b32 t, s, 0x000f000f;
    mul.lo.u32 t, t, 0x1040;
    and.b32 $6, t, 0x81c00000;
    shl.b32 t, t, 16;
    and.b32 $2, t, 0x81c00000;
    and.b32 t, s, 0x00f000f0;
    mul.lo.u32 t, t, 0x104;
    and.b32 $7, t, 0x81c00000;
    shl.b32 t, t, 16;
    and.b32 $3, t, 0x81c00000;
}""")
_OF_X, _OF_SUM = tl.constexpr(2.0**64), tl.constexpr(2.0**62)


@triton.jit
def _number(bits, COMPILED: tl.constexpr):
    if not COMPILED:
        bits = (bits & 8) << 28 | (bits & 7) << 22
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _numbers(words, COMPILED: tl.constexpr):
    """Of words [pairs, rows, 1, 2] the 16 numbers of each pair, times 2^-126: [pairs, rows, 1, 16]. The two of a byte
    are side by side, the low half's first."""
    if COMPILED:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _FLOATS, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r", [words], (tl.int32,) * 8, is_pure=True, pack=1
        )
    else:
        a, b, c, d = words, words >> 4, words >> 8, words >> 12
        e, f, g, h = words >> 16, words >> 20, words >> 24, words >> 28
    low_ends = tl.join(_number(a, COMPILED), _number(e, COMPILED))
    low = tl.join(low_ends, tl.join(_number(c, COMPILED), _number(g, COMPILED)))
    high_ends = tl.join(_number(b, COMPILED), _number(f, COMPILED))
    high = tl.join(high_ends, tl.join(_number(d, COMPILED), _number(h, COMPILED)))
    return tl.reshape(tl.join(low, high), (words.shape[0], words.shape[1], 1, 16))


@triton.jit
def _sums_of_experts(
    x, norm_weight, weight, scale, weight_row, has_expert, is_output, unit, K: tl.constexpr, K_TILE: tl.constexpr,
    UNROLL: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """The products of rows of weights and x, parts that are to be added: [pairs, ROWS], and the squares of x, [pairs].

    x: pointers to the row of each pair of words, [pairs, 1, 1, 1]. weight: in words. weight_row: [pairs or 1, ROWS, 1,
    1], int64. has_expert: [pairs, 1, 1, 1]; the rows of x of the others may hold anything. is_output: [1, ROWS, 1, 1].
    unit: [pairs], which 16 columns of a tile a pair is."""
    units = unit[:, None, None, None]
    weight += weight_row * (K // 8) + units * 2 + tl.arange(0, 2)[None, None, None, :]
    scale += weight_row * (K // 32) + units // 2
    is_there = has_expert & is_output
    inside = is_there & (units < K // 16)
    words = tl.load(weight, mask=inside, other=0)
    stored = tl.load(scale, mask=inside, other=0)
    # Columns of the low halves; those of the high halves are 16 further on.
    k = units // 2 * 32 + units % 2 * 8 + tl.arange(0, 8)[None, None, None, :]
    x += k
    PAIRS: tl.constexpr = words.shape[0]
    ROWS: tl.constexpr = words.shape[1]
    squares = tl.zeros([PAIRS, 1, 1, 1], dtype=tl.float32)
    total = tl.zeros([PAIRS, ROWS, 1, 1], dtype=tl.float32)
    for start in tl.range(0, K, K_TILE, loop_unroll_factor=UNROLL):
        is_value = has_expert & (k < K - start)
        low = tl.load(x + start, mask=is_value, other=0.0).to(tl.float32)
        high = tl.load(x + start + 16, mask=is_value, other=0.0).to(tl.float32)
        following = start + K_TILE
        is_next = is_there & (units * 16 < K - following)
        next_words = tl.load(weight + following // 8, mask=is_next, other=0)
        next_stored = tl.load(scale + following // 32, mask=is_next, other=0)
        if norm_weight is not None:
            squares += tl.sum(low * low, axis=3, keep_dims=True) + tl.sum(high * high, axis=3, keep_dims=True)
            low *= tl.load(norm_weight + start + k, mask=k < K - start, other=0.0).to(tl.float32)
            high *= tl.load(norm_weight + start + 16 + k, mask=k < K - start, other=0.0).to(tl.float32)
        # A pair's columns are one thread's, so these sums need no other thread.
        values = tl.reshape(tl.join(low * _OF_X, high * _OF_X), (PAIRS, 1, 1, 16))
        part = tl.sum(values * _numbers(words, COMPILED), axis=3, keep_dims=True)
        total += part * _OF_SUM * scale_of(stored, True)
        words, stored = next_words, next_stored
    return tl.reshape(total, (PAIRS, ROWS)), tl.reshape(squares, (PAIRS,))


@triton.jit
def _mxfp4_gate_up_kernel(
    x, norm_weight, experts, weight, scale, bias, y, x_stride, num_experts, N, eps, K: tl.constexpr,
    TOP_K: tl.constexpr, ROWS: tl.constexpr, K_TILE: tl.constexpr, UNROLL: tl.constexpr, GELU: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [tokens * TOP_K, N] = gate and up of norm(x), `gated`."""
    await_previous(PDL)
    pair = tl.program_id(1)
    expert = tl.load(experts + pair).to(tl.int64)
    if expert >= num_experts:
        return
    OUTPUTS: tl.constexpr = ROWS // 2
    # Even rows of the tile are gates, from the expert's first N rows, odd ones the ups that belong to them.
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * OUTPUTS + row // 2
    weight_row = expert * 2 * N + column + row % 2 * N
    unit = tl.arange(0, K_TILE // 16)
    units = unit[:, None, None, None]
    x += pair // TOP_K * x_stride
    parts, squares = _sums_of_experts(
        x + units * 0, norm_weight, weight, scale, weight_row[None, :, None, None], units >= 0,
        (column < N)[None, :, None, None], unit, K, K_TILE, UNROLL, COMPILED,
    )  # fmt: skip
    acc = tl.sum(parts, axis=0)
    if norm_weight is not None:
        # Only now, so that no product waits for the sum of squares.
        acc *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    if bias is not None:
        acc += tl.load(bias + weight_row, mask=column < N, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(acc, (OUTPUTS, 2)))
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    result = gated(gate, up, GELU, ALPHA, LIMIT)
    tl.store(y + pair * N + output, result.to(y.dtype.element_ty), mask=output < N)


def gate_up(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    experts: Tensor,
    weight: FourBit,
    bias: Tensor | None,
    config: Mxfp4ExpertsConfig,
    activation: Activation = SWIGLU,
) -> Tensor:
    """As `four_bit_experts_gemv.gate_up`, but the norm's result stays in float32."""
    check_gate_up(x, norm_weight, experts, weight, bias)
    _check_mxfp4(weight)
    num_experts, num_rows, K = weight.shape
    N = num_rows // 2
    rows, k_tile, num_warps = config
    y = torch.empty(experts.numel(), N, dtype=x.dtype, device=x.device)
    launcher(_mxfp4_gate_up_kernel, (triton.cdiv(num_rows, rows), experts.numel()), has_pdl(x.device))(
        x, norm_weight, experts, weight.values.view(torch.int32), weight.scale, bias, y, x.stride(0), num_experts, N,
        eps, K=K, TOP_K=experts.shape[1], ROWS=rows, K_TILE=k_tile, UNROLL=unroll_factor(K, k_tile),
        **activation.constants, COMPILED=x.is_cuda, num_warps=num_warps,
    )  # fmt: skip
    return y


@triton.jit
def _mxfp4_down_kernel(
    x, experts, weights, weight, scale, bias, out, out_stride, num_experts, N, K: tl.constexpr, TOP_K: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, K_TILE: tl.constexpr, UNROLL: tl.constexpr, ADD: tl.constexpr,
    SHARD: tl.constexpr, COMPILED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [tokens, N] = the weighted sum of x [tokens, TOP_K, K] by the experts, added to it with ADD. SHARD: whether
    some of a token's experts may be none; otherwise all of them are, or no one."""
    await_previous(PDL)
    pair = tl.program_id(1) * TOP_K
    if not SHARD and tl.load(experts + pair) >= num_experts:
        return
    UNITS: tl.constexpr = K_TILE // 16
    index = tl.arange(0, SLOTS * UNITS)
    slot, unit = index // UNITS, index % UNITS
    is_slot = slot < TOP_K
    expert = tl.load(experts + pair + slot, mask=is_slot, other=0).to(tl.int64)
    if SHARD:
        is_slot = is_slot & (expert < num_experts)
    share = tl.load(weights + pair + slot, mask=is_slot, other=0.0)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = expert[:, None] * N + output[None, :]
    x_row = x + tl.where(is_slot, pair + slot, pair).to(tl.int64) * K
    parts, _ = _sums_of_experts(
        x_row[:, None, None, None], None, weight, scale, row[:, :, None, None], is_slot[:, None, None, None],
        (output < N)[None, :, None, None], unit, K, K_TILE, UNROLL, COMPILED,
    )  # fmt: skip
    if bias is not None:
        is_first = (is_slot & (unit == 0))[:, None] & (output < N)[None, :]
        parts += tl.load(bias + row, mask=is_first, other=0.0).to(tl.float32)
    acc = tl.sum(parts * share[:, None], axis=0)
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
    config: Mxfp4ExpertsConfig,
    is_shard: bool = False,
) -> Tensor:
    """As `four_bit_experts_gemv.down`."""
    check_down(x, experts, weights, weight, bias, out)
    _check_mxfp4(weight)
    num_experts, N, K = weight.shape
    num_tokens, top_k = experts.shape
    rows, k_tile, num_warps = config
    launcher(_mxfp4_down_kernel, (triton.cdiv(N, rows), num_tokens), has_pdl(x.device))(
        x, experts, weights, weight.values.view(torch.int32), weight.scale, bias, out, out.stride(0),
        num_experts, N, K=K, TOP_K=top_k, SLOTS=triton.next_power_of_2(top_k), ROWS=rows, K_TILE=k_tile,
        UNROLL=unroll_factor(K, k_tile), ADD=add, SHARD=is_shard, COMPILED=x.is_cuda, num_warps=num_warps,
    )  # fmt: skip
    return out


def _check_mxfp4(weight: FourBit) -> None:
    if not weight.is_e2m1 or weight.group != UNIT:
        kind = "e2m1 numbers" if weight.is_e2m1 else "integers"
        raise ValueError(f"weight must have e2m1 numbers in groups of {UNIT} columns, not {kind} of {weight.group}")
