"""Linear layers of 1 to 4 tokens with weights in int4, on plain cores: `gemv` for integers of four bits.

A thread loads eight bytes of a row: eight columns in their low halves, and the eight that are 16 columns later in their
high halves. So it needs two vectors of x, which are loaded as they lie in memory, and no weight changes threads. An
integer q becomes a float by an "and, or" where it lies: 0x43000000 | q << 16 is 128 + q, and 0x45000000 | q << 12 is
2048 + q. A shift brings two integers there. The offsets are subtracted from the sum of a thread's columns, which share
a scale; they cost a sum less than its rounding to 16 bits does. With the multiplication that is two and a half
instructions a weight; e4m3 takes more.

Tensor cores need fewer (`four_bit_gemv`), but want weights in shared memory, whose stages leave a multiprocessor room
for two or three programs. Here many small programs have all their weights under way at once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.four_bit import FourBit, check_few_tokens, check_four_bit
from nanovllm.kernels.matmul.gemv import unroll_factor
from nanovllm.kernels.matmul.linear_checks import check_norm, check_result
from nanovllm.kernels.triton_stub import tl, triton

MAX_TOKENS = 4


class Int4GemvConfig(NamedTuple):
    """Launch constants, all powers of two."""

    rows_per_program: int  # weight rows of a program; two make one output column with `silu`
    k_tile: int  # columns of a weight tile, at least 32; a program loads two tiles at once, or one that spans K
    num_warps: int


# Results are the halves of a word's bytes, the lowest first: 128 + q of low halves, 2048 + q of high ones.
_FLOATS = tl.constexpr("""{
    .reg .b32 t;
    shl.b32 t, $8, 16;
    lop3.b32 $0, t, 0x000f0000, 0x43000000, 0xea;
    shl.b32 t, $8, 8;
    lop3.b32 $1, t, 0x0000f000, 0x45000000, 0xea;
    lop3.b32 $2, t, 0x000f0000, 0x43000000, 0xea;
    lop3.b32 $3, $8, 0x0000f000, 0x45000000, 0xea;
    lop3.b32 $4, $8, 0x000f0000, 0x43000000, 0xea;
    shr.u32 t, $8, 8;
    lop3.b32 $5, t, 0x0000f000, 0x45000000, 0xea;
    lop3.b32 $6, t, 0x000f0000, 0x43000000, 0xea;
    shr.u32 t, $8, 16;
    lop3.b32 $7, t, 0x0000f000, 0x45000000, 0xea;
}""")
_LOW_OFFSET, _HIGH_OFFSET = tl.constexpr(128), tl.constexpr(2048)


@triton.jit
def _floats(words, COMPILED: tl.constexpr):
    """Of words [pairs, rows, 1, 2] the 16 numbers of each pair, with their offsets: [pairs, rows, 1, 16]. Of a byte's
    halves the low one comes first."""
    if COMPILED:
        a, b, c, d, e, f, g, h = tl.inline_asm_elementwise(
            _FLOATS, "=r,=r,=r,=r,=r,=r,=r,=r,r", [words], (tl.int32,) * 8, is_pure=True, pack=1
        )
        a, b, c, d = _float(a), _float(b), _float(c), _float(d)
        e, f, g, h = _float(e), _float(f), _float(g), _float(h)
    else:
        a, b = (words & 15) + 128.0, ((words >> 4) & 15) + 2048.0
        c, d = ((words >> 8) & 15) + 128.0, ((words >> 12) & 15) + 2048.0
        e, f = ((words >> 16) & 15) + 128.0, ((words >> 20) & 15) + 2048.0
        g, h = ((words >> 24) & 15) + 128.0, ((words >> 28) & 15) + 2048.0
    low = tl.join(tl.join(a, e), tl.join(c, g))
    high = tl.join(tl.join(b, f), tl.join(d, h))
    return tl.reshape(tl.join(low, high), (words.shape[0], words.shape[1], 1, 16))


@triton.jit
def _float(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _int4_gemv_kernel(
    x, norm_weight, weight, scale, zero, bias, y, x_stride, y_stride, N, eps,
    M: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PADDED_M: tl.constexpr, ROWS: tl.constexpr,
    K_TILE: tl.constexpr, UNROLL: tl.constexpr, SILU: tl.constexpr, ADD: tl.constexpr, COMPILED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y [M, N] = f(x) W^T + bias, y += that with ADD, or silu(gate) * up of it with SILU; f: norm or none."""
    PAIRS: tl.constexpr = K_TILE // 16  # of words, eight bytes
    # With SILU even rows of the tile are gates, from the weight's first N rows, odd ones the ups that belong to them.
    EACH: tl.constexpr = 2 if SILU else 1
    OUTPUTS: tl.constexpr = ROWS // EACH
    row = tl.arange(0, ROWS)
    column = tl.program_id(0) * OUTPUTS + row // EACH
    weight_row = column + row % EACH * N
    if PDL:
        gdc_launch_dependents()

    # x is [pair, 1, token, k], the weights [pair, row, 1, word]. With pairs first, threads lie along them.
    pair = tl.arange(0, PAIRS)
    pairs = pair[:, None, None, None]
    inside_rows = (column < N)[None, :, None, None]
    long_row = weight_row.to(tl.int64)[None, :, None, None]
    weight += long_row * (K // 8) + pairs * 2 + tl.arange(0, 2)[None, None, None, :]
    scale_at = scale + long_row * (K // GROUP)
    inside = inside_rows & (pairs < K // 16)
    words = tl.load(weight, mask=inside, other=0)
    factor = tl.load(scale_at + pairs // 2 * 32 // GROUP, mask=inside, other=0.0)
    # Columns of the low halves; those of the high halves are 16 further on.
    k = pairs // 2 * 32 + pairs % 2 * 8 + tl.arange(0, 8)[None, None, None, :]
    if norm_weight is not None:
        low_norm = tl.load(norm_weight + k, mask=k < K, other=0.0)
        high_norm = tl.load(norm_weight + k + 16, mask=k < K, other=0.0)
    if bias is not None:
        shift = tl.load(bias + weight_row, mask=column < N, other=0.0).to(tl.float32)
    # Above this line nothing may be read that a launch under way writes, and nothing written (see dependent_launch).
    if PDL:
        gdc_wait()

    tokens = tl.arange(0, PADDED_M)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside_y = (tokens < M)[None, :] & (outputs < N)[:, None]
    y += tokens[None, :] * y_stride + outputs[:, None]
    if ADD:
        residual = tl.load(y, mask=inside_y, other=0.0).to(tl.float32)

    token = tokens[None, None, :, None]
    x += token * x_stride + k
    squares = tl.zeros([PAIRS, 1, PADDED_M, 1], dtype=tl.float32)
    total = tl.zeros([PAIRS, ROWS, PADDED_M, 1], dtype=tl.float32)
    for start in tl.range(0, K, K_TILE, loop_unroll_factor=UNROLL):
        is_value = (token < M) & (k < K - start)
        low = tl.load(x + start, mask=is_value, other=0.0).to(tl.float32)
        high = tl.load(x + start + 16, mask=is_value, other=0.0).to(tl.float32)
        following = start + K_TILE
        is_next = inside_rows & (pairs * 16 < K - following)
        next_words = tl.load(weight + following // 8, mask=is_next, other=0)
        next_factor = tl.load(scale_at + (following + pairs // 2 * 32) // GROUP, mask=is_next, other=0.0)
        if norm_weight is not None:
            squares += tl.sum(low * low, axis=3, keep_dims=True) + tl.sum(high * high, axis=3, keep_dims=True)
            low *= low_norm.to(tl.float32)
            high *= high_norm.to(tl.float32)
            low_norm = tl.load(norm_weight + following + k, mask=k < K - following, other=0.0)
            high_norm = tl.load(norm_weight + following + k + 16, mask=k < K - following, other=0.0)
        # A pair's columns are one thread's, so these sums need no other thread.
        values = tl.reshape(tl.join(low, high), (PAIRS, 1, PADDED_M, 16))
        part = tl.sum(values * _floats(words, COMPILED), axis=3, keep_dims=True)
        low_sum, high_sum = tl.sum(low, axis=3, keep_dims=True), tl.sum(high, axis=3, keep_dims=True)
        part -= low_sum * _LOW_OFFSET + high_sum * _HIGH_OFFSET
        if zero is None:
            part -= (low_sum + high_sum) * 8
        else:
            is_here = inside_rows & (pairs * 16 < K - start)
            zero_at = zero + long_row * (K // GROUP) + (start + pairs // 2 * 32) // GROUP
            part -= (low_sum + high_sum) * tl.load(zero_at, mask=is_here, other=0).to(tl.float32)
        total += part * factor.to(tl.float32)
        words, factor = next_words, next_factor

    result = tl.sum(tl.reshape(total, (PAIRS, ROWS, PADDED_M)), axis=0)
    if norm_weight is not None:
        # Only now, so that no product waits for the sum of squares.
        result *= tl.rsqrt(tl.sum(tl.reshape(squares, (PAIRS, 1, PADDED_M)), axis=0) / K + eps)
    if bias is not None:
        result += shift[:, None]
    if SILU:
        # Rounded, as it would be between two kernels.
        result = result.to(y.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.trans(tl.reshape(result, (OUTPUTS, 2, PADDED_M)), 0, 2, 1))
        result = gate / (1.0 + tl.exp(-gate)) * up
    if ADD:
        result += residual
    tl.store(y, result.to(y.dtype.element_ty), mask=inside_y)


def int4_gemv(
    x: Tensor,
    weight: FourBit,
    y: Tensor,
    bias: Tensor | None,
    config: Int4GemvConfig,
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
        x: `[M, K]`, M in 1..MAX_TOKENS, bfloat16 or float16, any row stride.
        weight: `[N, K]`, integers.
        y: `[M, N]` of x's dtype, any row stride; shares no memory with x.
        bias: `[N]`, any float dtype, or None.
        norm_weight, eps: of the norm (Zhang & Sennrich 2019), whose result stays in float32: `[K]`, any float dtype, K
            at most MAX_NORM_SIZE; and what is added to the mean square.
        silu: whether y `[M, N / 2]` becomes `silu(gate) * up` (Shazeer 2020) instead. The weight holds the gate's N / 2
            rows and then the up's. Both results are rounded to x's dtype in between.
        add: whether the result is added to y, before it is rounded.
        pdl: programmatic dependent launch (see `dependent_launch`). Weights, norm weights and biases are read before
            the wait.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    check_four_bit(weight, x.dtype)
    check_few_tokens(x, weight, bias, MAX_TOKENS)
    M, (num_rows, K) = len(x), weight.shape
    if weight.is_e2m1:
        raise ValueError("weight must have integers, not e2m1 numbers")
    check_norm(norm_weight, K)
    check_result(y, x, weight.values, silu)
    rows, k_tile, num_warps = config
    N = y.shape[1]
    words = weight.values.view(torch.int32)
    launcher(_int4_gemv_kernel, (triton.cdiv(num_rows, rows),), pdl and has_pdl(x.device))(
        x, norm_weight, words, weight.scale, weight.zero, bias, y, x.stride(0), y.stride(0), N, eps,
        M=M, K=K, GROUP=weight.group, PADDED_M=triton.next_power_of_2(M), ROWS=rows, K_TILE=k_tile,
        UNROLL=unroll_factor(K, k_tile), SILU=silu, ADD=add, COMPILED=x.is_cuda, num_warps=num_warps,
    )  # fmt: skip
