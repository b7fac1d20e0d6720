"""The input of the gated delta rule: a short causal convolution over q, k and v, SiLU, and L2 norms of q and k.

Each channel is convolved with its own last inputs. Those of before the step are the sequence's tail. q and k are
normalized per head, as `x / sqrt(sum(x^2) + 1e-6)`. Everything is computed in float32.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.linear_attention.chunks import CHUNK, count_chunks, find_chunk
from nanovllm.kernels.triton_stub import tl, triton

TAPS = 4  # of the kernels, as all published models have
L2_EPS = 1e-6  # that of the published models, which their configurations do not name
_L2_EPS = tl.constexpr(L2_EPS)
_ROW_TILE = 512  # channels of a program of a decode step
_CHUNK_TILE = 512  # of a prefill


def convolve_torch(windows: Tensor, weight: Tensor, key_dim: int, num_key_heads: int) -> Tensor:
    """The twin of both kernels: of each token q, k and v, float32 `[num_tokens, conv_dim]`.

    windows: `[num_tokens, taps, conv_dim]`, the inputs that a token sees, its own last. weight: `[conv_dim, taps]`.
    """
    mixed = F.silu((windows.float() * weight.float().t()).sum(1))
    heads = mixed[:, : 2 * num_key_heads * key_dim].view(len(mixed), 2 * num_key_heads, key_dim)
    heads *= torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
    return mixed


@triton.jit
def silu(x):
    # exp2 and the square of a reciprocal root take half the instructions of exp and a division.
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return x * (root * root)


@triton.jit
def load_float(pointers, mask):
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def silu_and_norm(mixed, is_normed):
    """mixed: float32 [rows, DIM], a head in each row. is_normed: true of q and k."""
    mixed = silu(mixed)
    inverse_norm = tl.rsqrt(tl.sum(mixed * mixed, axis=1)[:, None] + _L2_EPS)
    return tl.where(is_normed, mixed * inverse_norm, mixed)


@triton.jit
def load_proposed(is_proposed, row, num_rows):
    """Whether the token of a row is only proposed. is_proposed: int32, or None if no token is."""
    found = False
    if is_proposed is not None:
        found = tl.load(is_proposed + row, mask=(row >= 0) & (row < num_rows), other=0) != 0
    return found


@triton.jit
def count_rows(cells, is_proposed, row, cell, following, num_rows):
    """How many rows a sequence has, of which this one, with this cell, is the first. following: the next row's cell, or
    -1."""
    count = 1
    while (following == cell) | load_proposed(is_proposed, row + count, num_rows):
        count += 1
        following = tl.load(cells + row + count, mask=row + count < num_rows, other=-1)
    return count


@triton.jit
def _store_tail(tails, cell, x0, x1, x2, channel, inside, CONV_DIM: tl.constexpr):
    at = tails + cell.to(tl.int64) * (3 * CONV_DIM) + channel
    tl.store(at, x0.to(tails.dtype.element_ty), mask=inside)
    tl.store(at + CONV_DIM, x1.to(tails.dtype.element_ty), mask=inside)
    tl.store(at + 2 * CONV_DIM, x2.to(tails.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["cells", "context_lens", "is_proposed"])
def _convolve_rows_kernel(
    mixed, qkv, weight, tails, cells, context_lens, is_proposed, num_rows, qkv_stride,
    NUM_NORMED: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The program of a sequence's first row serves the first three, which see the tail, and writes the new tail. So no
    other program reads what this one writes. Proposed tokens from the fourth row on write their own tails."""
    CONV_DIM: tl.constexpr = NUM_HEADS * DIM
    row = tl.program_id(0)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    channel = head * DIM + tl.arange(0, DIM)[None, :]
    inside = channel < CONV_DIM
    is_normed = head < NUM_NORMED
    if PDL:
        gdc_launch_dependents()
    cell = tl.load(cells + row).to(tl.int64)
    # The rows of a sequence follow each other.
    before = tl.load(cells + row - 1, mask=row >= 1, other=-1)
    third_before = tl.load(cells + row - 3, mask=row >= 3, other=-1)
    following = tl.load(cells + row + 1, mask=row + 1 < num_rows, other=-1)
    continues = load_proposed(is_proposed, row, num_rows)
    is_first = (cell >= 0) & (before != cell) & (not continues)
    is_fourth_of_prompt = (cell >= 0) & (third_before == cell)
    is_fourth_of_proposal = continues
    for back in tl.static_range(1, 3):
        is_fourth_of_proposal &= load_proposed(is_proposed, row - back, num_rows)
    w0 = load_float(weight + channel * 4, inside)
    w1 = load_float(weight + channel * 4 + 1, inside)
    w2 = load_float(weight + channel * 4 + 2, inside)
    w3 = load_float(weight + channel * 4 + 3, inside)
    position = tl.where(is_first, tl.load(context_lens + row) - 1, 0)
    tail = tails + cell * (3 * CONV_DIM) + channel
    x0 = load_float(tail, channel < tl.where(position >= 3, CONV_DIM, 0))
    x1 = load_float(tail + CONV_DIM, channel < tl.where(position >= 2, CONV_DIM, 0))
    x2 = load_float(tail + 2 * CONV_DIM, channel < tl.where(position >= 1, CONV_DIM, 0))
    if PDL:
        gdc_wait()
    x_at = qkv + row.to(tl.int64) * qkv_stride + channel
    mixed_at = mixed + row.to(tl.int64) * CONV_DIM + channel
    if is_first:
        count = count_rows(cells, is_proposed, row, cell, following, num_rows)
        for i in range(0, tl.minimum(count, 3)):
            x3 = load_float(x_at + i * qkv_stride, inside)
            value = silu_and_norm(x0 * w0 + x1 * w1 + x2 * w2 + x3 * w3, is_normed)
            tl.store(mixed_at + i * CONV_DIM, value.to(mixed.dtype.element_ty), mask=inside)
            x0, x1, x2 = x1, x2, x3
            if load_proposed(is_proposed, row + i + 1, row + count):
                _store_tail(tails, cell, x0, x1, x2, channel, inside, CONV_DIM)
                cell = tl.load(cells + row + i + 1).to(tl.int64)
        if count > 3:  # If it is a proposed token, its own program writes the same.
            last = x_at + (count - 1).to(tl.int64) * qkv_stride
            x0 = load_float(last - 2 * qkv_stride, inside)
            x1 = load_float(last - qkv_stride, inside)
            x2 = load_float(last, inside)
            cell = tl.load(cells + row + count - 1).to(tl.int64)
        _store_tail(tails, cell, x0, x1, x2, channel, inside, CONV_DIM)
    elif is_fourth_of_prompt | is_fourth_of_proposal:
        x0 = load_float(x_at - 2 * qkv_stride, inside)
        x1 = load_float(x_at - qkv_stride, inside)
        x2 = load_float(x_at, inside)
        value = load_float(x_at - 3 * qkv_stride, inside) * w0 + x0 * w1 + x1 * w2 + x2 * w3
        tl.store(mixed_at, silu_and_norm(value, is_normed).to(mixed.dtype.element_ty), mask=inside)
        if is_fourth_of_proposal:
            _store_tail(tails, cell, x0, x1, x2, channel, inside, CONV_DIM)


@triton.jit
def _load_row(qkv, token, row, length, channel, qkv_stride, CONV_DIM: tl.constexpr):
    """The inputs of a sequence's row, zeros past its end."""
    at = qkv + (token + row).to(tl.int64) * qkv_stride + channel
    return tl.load(at, mask=channel < tl.where(row < length, CONV_DIM, 0), other=0.0)


@triton.jit
def _store_row(
    mixed, x0, x1, x2, x3, w0, w1, w2, w3, is_normed, token, row, length, channel, CONV_DIM: tl.constexpr
):  # fmt: skip
    """q, k and v of a row, from its inputs and those of the three rows before."""
    value = x0.to(tl.float32) * w0 + x1.to(tl.float32) * w1 + x2.to(tl.float32) * w2 + x3.to(tl.float32) * w3
    value = silu_and_norm(value, is_normed).to(mixed.dtype.element_ty)
    at = mixed + (token + row).to(tl.int64) * CONV_DIM + channel
    tl.store(at, value, mask=channel < tl.where(row < length, CONV_DIM, 0))


@triton.jit(do_not_specialize=["num_seqs"], do_not_specialize_on_alignment=["cu_seqlens", "reads"])
def _convolve_sequences_kernel(
    mixed, qkv, weight, tails, cu_seqlens, reads, num_seqs, qkv_stride,
    NUM_NORMED: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program computes some heads of a chunk, four rows at a time, and loads the next four meanwhile. So each
    input is loaded once. It leaves the tails as they are, since others read them."""
    CONV_DIM: tl.constexpr = NUM_HEADS * DIM
    seq, token, length, first = find_chunk(cu_seqlens, tl.program_id(1), num_seqs)
    if first >= length:
        return
    head = (tl.program_id(0) * HEADS + tl.arange(0, HEADS))[:, None]
    channel = head * DIM + tl.arange(0, DIM)[None, :]
    inside = channel < CONV_DIM
    is_normed = head < NUM_NORMED
    length = tl.minimum(length, first + CHUNK)
    x3 = _load_row(qkv, token, first, length, channel, qkv_stride, CONV_DIM)
    x4 = _load_row(qkv, token, first + 1, length, channel, qkv_stride, CONV_DIM)
    x5 = _load_row(qkv, token, first + 2, length, channel, qkv_stride, CONV_DIM)
    x6 = _load_row(qkv, token, first + 3, length, channel, qkv_stride, CONV_DIM)
    if first > 0:
        x0 = _load_row(qkv, token, first - 3, length, channel, qkv_stride, CONV_DIM)
        x1 = _load_row(qkv, token, first - 2, length, channel, qkv_stride, CONV_DIM)
        x2 = _load_row(qkv, token, first - 1, length, channel, qkv_stride, CONV_DIM)
    else:
        cell = tl.load(reads + seq).to(tl.int64)
        tail = tails + cell * (3 * CONV_DIM) + channel
        in_tail = channel < tl.where(cell >= 0, CONV_DIM, 0)
        x0 = tl.load(tail, mask=in_tail, other=0.0)
        x1 = tl.load(tail + CONV_DIM, mask=in_tail, other=0.0)
        x2 = tl.load(tail + 2 * CONV_DIM, mask=in_tail, other=0.0)
    w0 = load_float(weight + channel * 4, inside)
    w1 = load_float(weight + channel * 4 + 1, inside)
    w2 = load_float(weight + channel * 4 + 2, inside)
    w3 = load_float(weight + channel * 4 + 3, inside)
    for row in range(first, length, 4):
        y3 = _load_row(qkv, token, row + 4, length, channel, qkv_stride, CONV_DIM)
        y4 = _load_row(qkv, token, row + 5, length, channel, qkv_stride, CONV_DIM)
        y5 = _load_row(qkv, token, row + 6, length, channel, qkv_stride, CONV_DIM)
        y6 = _load_row(qkv, token, row + 7, length, channel, qkv_stride, CONV_DIM)
        _store_row(mixed, x0, x1, x2, x3, w0, w1, w2, w3, is_normed, token, row, length, channel, CONV_DIM)
        _store_row(mixed, x1, x2, x3, x4, w0, w1, w2, w3, is_normed, token, row + 1, length, channel, CONV_DIM)
        _store_row(mixed, x2, x3, x4, x5, w0, w1, w2, w3, is_normed, token, row + 2, length, channel, CONV_DIM)
        _store_row(mixed, x3, x4, x5, x6, w0, w1, w2, w3, is_normed, token, row + 3, length, channel, CONV_DIM)
        x0, x1, x2 = x4, x5, x6
        x3, x4, x5, x6 = y3, y4, y5, y6


def convolve_rows_triton(
    qkv: Tensor,
    weight: Tensor,
    tails: Tensor,
    cells: Tensor,
    context_lens: Tensor,
    is_proposed: Tensor | None,
    dim: int,
    num_key_heads: int,
) -> Tensor:
    """q, k and v of a decode step, float32 `[num_tokens, conv_dim]`; padding rows are left as they are. Writes the new
    tails. dim: of all heads. The other arguments are those of `gated_delta.delta_rule_decode`."""
    num_rows, conv_dim = qkv.shape
    num_heads = conv_dim // dim
    mixed = torch.empty(num_rows, conv_dim, dtype=torch.float32, device=qkv.device)
    heads = max(1, _ROW_TILE // dim)
    launcher(_convolve_rows_kernel, (num_rows, triton.cdiv(num_heads, heads)), has_pdl(qkv.device))(
        mixed, qkv, weight, tails, cells, context_lens, is_proposed, num_rows, qkv.stride(0),
        NUM_NORMED=2 * num_key_heads, NUM_HEADS=num_heads, DIM=dim, HEADS=heads, num_warps=4,
    )  # fmt: skip
    return mixed


def convolve_sequences_triton(
    qkv: Tensor, weight: Tensor, tails: Tensor, cu_seqlens: Tensor, reads: Tensor, dim: int, num_key_heads: int
) -> Tensor:
    """q, k and v of a prefill, `[num_tokens, conv_dim]` in qkv's dtype. The arguments are as above, and those of
    `gated_delta.delta_rule_prefill`."""
    num_tokens, conv_dim = qkv.shape
    num_seqs, num_heads = len(reads), conv_dim // dim
    mixed = torch.empty(num_tokens, conv_dim, dtype=qkv.dtype, device=qkv.device)
    heads = max(1, _CHUNK_TILE // dim)
    launcher(_convolve_sequences_kernel, (triton.cdiv(num_heads, heads), count_chunks(num_tokens, num_seqs)))(
        mixed, qkv, weight, tails, cu_seqlens, reads, num_seqs, qkv.stride(0),
        NUM_NORMED=2 * num_key_heads, NUM_HEADS=num_heads, DIM=dim, HEADS=heads, CHUNK=CHUNK, num_warps=4,
    )  # fmt: skip
    return mixed
