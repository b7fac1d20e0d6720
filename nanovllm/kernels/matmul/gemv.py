"""Linear layers of 1 to 4 tokens, each fused with what stands before and after it: y = f(x) W^T.

Such a layer takes as long as reading its weights. A program computes a few output columns, that is rows of W, over all
of K. Nothing is combined between programs, so results are deterministic and a residual can be updated in place. All
loads of a tile are independent, 16 bytes each, and issued before the first is used; the next tile is loaded before this
one is multiplied. Every program computes the norm of the input anew, because x is small and in L2.

For so few tokens the plain cores keep pace with memory, with the weights in the registers that they were loaded to.
Weights in e4m3 become float32 there.
"""

from typing import NamedTuple

from torch import Tensor

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.linear_checks import BLOCK, check_layer, check_norm, check_result
from nanovllm.kernels.parallel.posted_sums import Inboxes, post
from nanovllm.kernels.triton_stub import tl, triton

MAX_TOKENS = 4


class GemvConfig(NamedTuple):
    """Launch constants, all powers of two."""

    rows_per_program: int  # weight rows of a program; two make one output column with `silu`
    k_tile: int  # columns of a weight tile, at least 16; a program loads two tiles at once, or one that spans K
    num_warps: int


def unroll_factor(K: int, k_tile: int) -> int:
    """How many tiles an iteration multiplies: all of them, unless that takes long to compile.

    A loop takes weights in e4m3 that it hands on apart, number by number, and packs them again."""
    num_tiles = triton.cdiv(K, k_tile)
    return num_tiles if num_tiles <= 16 else 4


@triton.jit(do_not_specialize=["index"])
def gemv_kernel(
    x, norm_weight, weight, weight_scale, bias, y, x_stride, y_stride, N, eps, inboxes, step, abort, index,
    M: tl.constexpr, K: tl.constexpr, PADDED_M: tl.constexpr, ROWS: tl.constexpr, K_TILE: tl.constexpr,
    VECTOR: tl.constexpr, UNROLL: tl.constexpr, BLOCK: tl.constexpr, SILU_OUTPUT: tl.constexpr, ADD: tl.constexpr,
    RANK: tl.constexpr, SIZE: tl.constexpr, PADDED_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y [M, N] = f(x) W^T + bias, y += that with ADD, or silu(gate) * up of it with SILU_OUTPUT; f: norm or none. With
    inboxes it is posted to them and there is no y. BLOCK: columns and rows of W that share a scale; 0 if rows do."""
    row = tl.arange(0, ROWS)
    if SILU_OUTPUT:
        # Even rows of the tile are gates, from the weight's first N rows, odd ones the ups that belong to them.
        OUTPUTS: tl.constexpr = ROWS // 2
        column = tl.program_id(0) * OUTPUTS + row // 2
        weight_row = column + row % 2 * N
    else:
        OUTPUTS: tl.constexpr = ROWS  # type: ignore[no-redef]
        column = tl.program_id(0) * OUTPUTS + row
        weight_row = column
    if PDL:
        # The next kernel begins with its weights too: its programs are welcome as soon as there is room for them.
        gdc_launch_dependents()

    # x is [token, 1, k], the weights [1, row, k].
    k = tl.arange(0, K_TILE)[None, None, :]
    inside_rows = (column < N)[None, :, None]
    # A thread loads as many weights in e4m3 at once as numbers of x, or the weights would have to change threads.
    weight_k = k if weight_scale is None else tl.max_contiguous(k, [1, 1, VECTOR])
    weight += weight_row.to(tl.int64)[None, :, None] * K + weight_k
    w = tl.load(weight, mask=inside_rows & (k < K), other=0.0)
    if norm_weight is not None:
        scale = tl.load(norm_weight + k, mask=k < K, other=0.0)
    if BLOCK > 0:
        vector = tl.arange(0, K_TILE // VECTOR)[None, None, :] * VECTOR
        block_row = weight_scale + (weight_row // BLOCK * (K // BLOCK))[None, :, None]
    elif weight_scale is not None:
        row_scale = tl.load(weight_scale + weight_row, mask=column < N, other=0.0)
    if bias is not None:
        shift = tl.load(bias + weight_row, mask=column < N, other=0.0).to(tl.float32)
    if inboxes is not None:
        ranks = tl.arange(0, PADDED_SIZE)
        addresses = tl.load(inboxes + ranks, mask=ranks < SIZE, other=0)
        number = tl.load(step) + index
    # Above this line nothing may be read that a launch under way writes, and nothing written (see dependent_launch).
    if PDL:
        gdc_wait()

    tokens = tl.arange(0, PADDED_M)
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inside_y = (tokens < M)[:, None] & (outputs < N)[None, :]
    if inboxes is not None:
        # Once aborted, the others' memory may be gone with them.
        num_words = tl.where(tl.load(abort, volatile=True) == 0, N // 2, 0)
    else:
        y += tokens[:, None] * y_stride + outputs[None, :]
    if ADD:
        total = tl.load(y, mask=inside_y, other=0.0).to(tl.float32)
    else:
        total = tl.zeros([PADDED_M, OUTPUTS], dtype=tl.float32)

    token = tokens[:, None, None]
    x += token * x_stride + k
    squares = tl.zeros([PADDED_M, 1, K_TILE // VECTOR], dtype=tl.float32)
    acc = tl.zeros([PADDED_M, ROWS, K_TILE // VECTOR], dtype=tl.float32)
    for start in tl.range(0, K, K_TILE, loop_unroll_factor=UNROLL):
        value = tl.load(x + start, mask=(token < M) & (k < K - start), other=0.0).to(tl.float32)
        left = K - K_TILE - start
        next_w = tl.load(weight + K_TILE + start, mask=inside_rows & (k < left), other=0.0)
        if norm_weight is not None:
            squares += tl.sum(tl.reshape(value * value, (PADDED_M, 1, K_TILE // VECTOR, VECTOR)), axis=3)
            value *= scale.to(tl.float32)
            scale = tl.load(norm_weight + K_TILE + start + k, mask=k < left, other=0.0)
        # A vector is what one thread loaded at once, so this sum needs no other thread.
        part = tl.sum(tl.reshape(value * w.to(tl.float32), (PADDED_M, ROWS, K_TILE // VECTOR, VECTOR)), axis=3)
        if BLOCK > 0:
            inside_blocks = inside_rows & (vector < K - start)
            part *= tl.load(block_row + (start + vector) // BLOCK, mask=inside_blocks, other=0.0)
        acc += part
        w = next_w

    result = tl.sum(acc, axis=2)
    if norm_weight is not None:
        # Only now, so that no product waits for the sum of squares.
        result *= tl.rsqrt(tl.sum(squares, axis=2) / K + eps)
    if BLOCK == 0 and weight_scale is not None:
        result *= row_scale[None, :]
    if bias is not None:
        result += shift[None, :]
    if SILU_OUTPUT:
        # Rounded, as it would be between two kernels.
        result = result.to(y.dtype.element_ty).to(tl.float32)
        gate, up = tl.split(tl.reshape(result, (PADDED_M, OUTPUTS, 2)))
        result = gate / (1.0 + tl.exp(-gate)) * up
    if inboxes is not None:
        DTYPE: tl.constexpr = x.dtype.element_ty
        post(result, tl.program_id(0), addresses, number, index, num_words, M, N, PADDED_M, OUTPUTS, RANK, SIZE, DTYPE)
    else:
        tl.store(y, (total + result).to(y.dtype.element_ty), mask=inside_y)


def gemv(
    x: Tensor,
    weight: Tensor,
    y: Tensor | None,
    bias: Tensor | None,
    config: GemvConfig,
    *,
    weight_scale: Tensor | None = None,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    silu: bool = False,
    add: bool = False,
    inboxes: Inboxes | None = None,
    index: int = 0,
    pdl: bool = False,
) -> None:
    """`y = f(x) W^T + bias`, summed in float32 and rounded once, where f is the RMS norm or nothing.

    Rows of x don't influence each other. Equal calls give equal bits; another number of tokens may round differently.

    Args:
        x: `[M, K]`, M in 1..MAX_TOKENS, float32 or a 16-bit float, any row stride.
        weight: `[N, K]`, contiguous, of x's dtype, or of e4m3.
        y: `[M, N]` of x's dtype, any row stride; shares no memory with x. None with inboxes.
        weight_scale: of a weight in e4m3: float32 `[N, 1]`, or `[N / 128, K / 128]` of blocks; else None.
        bias: `[N]`, any float dtype, or None.
        norm_weight, eps: of the norm (Zhang & Sennrich 2019), whose result stays in float32: `[K]`, any float dtype, K
            at most MAX_NORM_SIZE; and what is added to the mean square.
        silu: whether y `[M, N / 2]` becomes `silu(gate) * up` (Shazeer 2020) instead. The weight holds the gate's N / 2
            rows and then the up's. Both results are rounded to x's dtype in between.
        add: whether the result is added to y, before it is rounded.
        inboxes, index: this rank's, and the number of the sum, if the result is posted to all ranks instead of written
            to y. Each has to `collect` it next. For 16-bit floats and an even N.
        pdl: programmatic dependent launch (see `dependent_launch`). Weights, norm weights and biases are read before
            the wait.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    check_layer(x, weight, bias, MAX_TOKENS, weight_scale)
    M, (num_rows, K) = len(x), weight.shape
    check_norm(norm_weight, K)
    if inboxes is not None and (x.element_size() != 2 or num_rows % 2):
        raise ValueError(
            f"x must be of a 16-bit float and weight have an even number of rows, not {list(weight.shape)}"
        )
    if inboxes is None:
        if y is None:
            raise ValueError("y must be given, or inboxes")
        check_result(y, x, weight, silu)
    N = num_rows if y is None else y.shape[1]
    size = 1 if inboxes is None else len(inboxes.addresses)
    in_blocks = weight_scale is not None and weight_scale.shape != (num_rows, 1)
    rows, k_tile, num_warps = config
    launcher(gemv_kernel, (triton.cdiv(num_rows, rows),), pdl and has_pdl(x.device))(
        x, norm_weight, weight, weight_scale, bias, y, x.stride(0), 0 if y is None else y.stride(0), N, eps,
        inboxes and inboxes.addresses, inboxes and inboxes.step, inboxes and inboxes.abort, index,
        M=M, K=K, PADDED_M=triton.next_power_of_2(M), ROWS=rows, K_TILE=k_tile, VECTOR=16 // x.element_size(),
        UNROLL=unroll_factor(K, k_tile), BLOCK=BLOCK if in_blocks else 0, SILU_OUTPUT=silu, ADD=add,
        RANK=inboxes.rank if inboxes else 0, SIZE=size, PADDED_SIZE=triton.next_power_of_2(size), num_warps=num_warps,
    )  # fmt: skip
