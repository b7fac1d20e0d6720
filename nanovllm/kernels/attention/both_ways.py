"""Attention in both directions within each of several ranges of tokens: that of a vision tower within its images.

The algorithm is FlashAttention-2 (arXiv:2307.08691). A head whose size is no power of two is computed in two parts, as
64 and 16 of the 72 dimensions that many towers have: tiles of tensor cores are powers of two, and 128 would be nearly
twice the work.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.attention.paged_prefill import PrefillTiles
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.shared_memory import fits
from nanovllm.kernels.triton_stub import tl, triton

_MIN_TILE = 16  # dimensions, of tensor cores


def parts_of_head(head_dim: int) -> tuple[int, int]:
    """Powers of two whose sum is head_dim at least; the second may be 0."""
    main = max(_MIN_TILE, 1 << (head_dim.bit_length() - 1))
    rest = head_dim - main
    return main, max(_MIN_TILE, triton.next_power_of_2(rest)) if rest > 0 else 0


def choose_tiles(padded_dim: int, itemsize: int, device: torch.device) -> PrefillTiles:
    """The tiles that were measured to be the fastest, made smaller until they fit the card's shared memory."""
    tiles = PrefillTiles(32, 32, 8, 1) if itemsize == 4 else PrefillTiles(64, 64, 4, 3)
    while not tiles.are_smallest and not fits(tiles.shared_bytes(padded_dim, itemsize, device), device):
        tiles = tiles.smaller()
    return tiles


@triton.jit
def _attend(
    acc, acc_rest, row_max, row_sum, q, q_rest, k_ptr, v_ptr, k_stride, v_stride, first_key, end_key, scale_log2,
    HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, TILE_KEYS: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add keys first_key..end_key to the running softmax. Without MASK they fill their tiles."""
    dims = tl.arange(0, MAIN)
    for start in range(first_key, end_key, TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        k_rows, v_rows = k_ptr + keys.to(tl.int64)[:, None] * k_stride, v_ptr + keys.to(tl.int64)[:, None] * v_stride
        is_key = (keys < end_key)[:, None]
        if MASK or MAIN > HEAD_DIM:
            inside = is_key & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_rows + dims[None, :], mask=inside, other=0.0)
            v = tl.load(v_rows + dims[None, :], mask=inside, other=0.0)
        else:
            k = tl.load(k_rows + dims[None, :])
            v = tl.load(v_rows + dims[None, :])
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if REST > 0:
            rest = MAIN + tl.arange(0, REST)
            of_rest = is_key & (rest < HEAD_DIM)[None, :] if MASK else (rest < HEAD_DIM)[None, :]
            k_rest = tl.load(k_rows + rest[None, :], mask=of_rest, other=0.0)
            v_rest = tl.load(v_rows + rest[None, :], mask=of_rest, other=0.0)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        if MASK:
            scores = tl.where((keys < end_key)[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        weights = weights.to(v.dtype)
        acc = tl.dot(weights, v, acc * shrink[:, None], input_precision="ieee")
        if REST > 0:
            acc_rest = tl.dot(weights, v_rest, acc_rest * shrink[:, None], input_precision="ieee")
        row_max = new_max
    return acc, acc_rest, row_max, row_sum


@triton.jit
def _both_ways_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, starts_ptr, ends_ptr, q_stride, k_stride, v_stride, scale_log2,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
):  # fmt: skip
    REST_TILE: tl.constexpr = REST if REST > 0 else 16
    tile, head, image = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(starts_ptr + image).to(tl.int64), tl.load(ends_ptr + image).to(tl.int64)
    length = (end - start).to(tl.int32)
    if tile * TILE_ROWS >= length:
        return
    rows = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    dims, rest = tl.arange(0, MAIN), MAIN + tl.arange(0, REST_TILE)
    is_row = (rows < length)[:, None]
    inside, inside_rest = is_row & (dims < HEAD_DIM)[None, :], is_row & (rest < HEAD_DIM)[None, :]
    tokens = (start + rows)[:, None]
    q_rows = q_ptr + tokens * q_stride + head * HEAD_DIM
    q = tl.load(q_rows + dims[None, :], mask=inside, other=0.0)
    q_rest = tl.load(q_rows + rest[None, :], mask=inside_rest, other=0.0)
    k_ptr += start * k_stride + head * HEAD_DIM
    v_ptr += start * v_stride + head * HEAD_DIM
    acc = tl.zeros([TILE_ROWS, MAIN], dtype=tl.float32)
    acc_rest = tl.zeros([TILE_ROWS, REST_TILE], dtype=tl.float32)
    row_max = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([TILE_ROWS], dtype=tl.float32)
    whole = length // TILE_KEYS * TILE_KEYS
    acc, acc_rest, row_max, row_sum = _attend(
        acc, acc_rest, row_max, row_sum, q, q_rest, k_ptr, v_ptr, k_stride, v_stride, 0, whole, scale_log2,
        HEAD_DIM, MAIN, REST, TILE_KEYS, False,
    )  # fmt: skip
    acc, acc_rest, row_max, row_sum = _attend(
        acc, acc_rest, row_max, row_sum, q, q_rest, k_ptr, v_ptr, k_stride, v_stride, whole, length, scale_log2,
        HEAD_DIM, MAIN, REST, TILE_KEYS, True,
    )  # fmt: skip
    out_rows = out_ptr + (tokens * NUM_HEADS + head) * HEAD_DIM
    tl.store(out_rows + dims[None, :], (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty), mask=inside)
    if REST > 0:
        of_rest = (acc_rest / row_sum[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_rows + rest[None, :], of_rest, mask=inside_rest)


@kernel_or_twin
def attend_both_ways(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, ends: Tensor, max_length: int, scale: float
) -> Tensor:
    """Attention of each token to all tokens of its range: `[num_tokens, num_heads, head_dim]`, contiguous, zeros for
    tokens of no range.

    Args:
        q: `[num_tokens, num_heads, head_dim]`, heads packed within a token, any stride between tokens; k and v like it.
        starts, ends: int32 or int64 `[num_ranges]`, of ranges that do not overlap.
        max_length: tokens of the longest range.
        scale: of the scores.

    The kernel raises ValueError for other layouts.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        queries, keys, values = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        found = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
        out[start:end] = found.squeeze(0).transpose(0, 1)
    return out


@kernel_of(attend_both_ways)
def _launch_both_ways(q, k, v, starts, ends, max_length, scale):
    num_tokens, num_heads, head_dim = q.shape
    for name, x in {"q": q, "k": k, "v": v}.items():
        is_packed = x.stride(2) == 1 and (num_heads == 1 or x.stride(1) == head_dim)
        if x.shape != q.shape or x.dtype != q.dtype or not is_packed:
            raise ValueError(
                f"{name} must be {list(q.shape)}, {q.dtype}, its heads packed within a token, not {list(x.shape)}, "
                f"{x.dtype}, with strides {x.stride()}"
            )
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if not len(starts) or not num_tokens:
        return out
    main, rest = parts_of_head(head_dim)
    tiles = choose_tiles(main + rest, q.element_size(), q.device)
    grid = (triton.cdiv(max_length, tiles.rows), num_heads, len(starts))
    launcher(_both_ways_kernel, grid)(
        out, q, k, v, starts, ends, q.stride(0), k.stride(0), v.stride(0), scale * math.log2(math.e),
        NUM_HEADS=num_heads, HEAD_DIM=head_dim, MAIN=main, REST=rest, TILE_ROWS=tiles.rows, TILE_KEYS=tiles.keys,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
