"""Causal attention of many query tokens over variable-length sequences, keys packed or in the paged cache.

The algorithm is FlashAttention-2 (Dao 2023), over the pages of PagedAttention (Kwon et al. 2023).
"""

import math
from typing import NamedTuple

import torch

from nanovllm.kernels.attention.hopper_prefill import can_attend, hopper_prefill
from nanovllm.kernels.attention.paged_cache import check_layout, check_sinks, key_slots, load_blocks, load_sinks
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.shared_memory import fits
from nanovllm.kernels.triton_stub import tl, triton


class PrefillTiles(NamedTuple):
    """Launch constants."""

    rows: int  # (query, head) pairs of a tile
    keys: int  # of a tile
    num_warps: int
    num_stages: int  # of the load pipeline

    def shared_bytes(self, padded_dim: int, itemsize: int, device: torch.device) -> int:
        """What a program needs at most: the queries, and of each stage one tile of keys and one of values. Where
        operands are copied to registers, one stage less, and the weights on their way from one product to the next."""
        stages, row_bytes = self.num_stages, padded_dim * itemsize
        if itemsize == 4 or GpuFacts.of(device).reads_shared_operands:
            return (self.rows + 2 * self.keys * stages) * row_bytes
        # Without a pipeline keys and values take turns.
        tiles = 2 * (stages - 1) if stages > 1 else 1
        return (self.rows + self.keys * tiles) * row_bytes + self.rows * self.keys * itemsize

    @property
    def are_smallest(self) -> bool:
        return self.rows <= _FEWEST_ROWS and self.keys <= _FEWEST_KEYS

    def smaller(self) -> "PrefillTiles":
        """The tiles with half as many keys, or, from 32 keys down, half as many rows; at last half as many of those."""
        if self.keys > _FEW_KEYS or (self.rows <= _FEW_ROWS and self.keys > _FEWEST_KEYS):
            return self._replace(keys=self.keys // 2)
        return self._replace(rows=self.rows // 2, num_warps=max(4, self.num_warps // 2))


_FEW_KEYS, _FEW_ROWS, _FEWEST_KEYS, _FEWEST_ROWS = 32, 64, 16, 16


def choose_tiles(padded_dim: int, itemsize: int, max_rows: int, paged: bool, device: torch.device) -> PrefillTiles:
    """The tiles that were measured to be the fastest, made smaller until they fit the card's shared memory."""
    tiles = _fastest_tiles(padded_dim, itemsize, max_rows, paged)
    while not tiles.are_smallest and not fits(tiles.shared_bytes(padded_dim, itemsize, device), device):
        tiles = tiles.smaller()
    return tiles


def _fastest_tiles(padded_dim: int, itemsize: int, max_rows: int, paged: bool) -> PrefillTiles:
    """They suit Hopper's 64-row tensor core instructions. float32 needs small tiles that fit the registers, because it
    does not run on tensor cores, which would round its products."""
    if itemsize == 4:
        return PrefillTiles(32 if padded_dim <= 128 else 16, 32, 8, 1)
    if padded_dim > 256:  # not measured: larger tiles would not leave the results in registers
        return PrefillTiles(64, 32, 8, 2)
    if 64 < padded_dim <= 128 and not paged:
        return PrefillTiles(64 if max_rows <= 256 else 128, 32, 4, 3)
    if max_rows <= 64:
        return PrefillTiles(64, 64, 4, 3 if padded_dim <= 128 else 2)
    if padded_dim <= 64:
        return PrefillTiles(128, 128, 8, 3)
    if padded_dim > 128:
        return PrefillTiles(128, 64, 8, 2)
    return PrefillTiles(128, 64, 4, 3)


@triton.jit
def _attend(
    acc, row_max, row_sum, q, positions, k_ptr, v_ptr, table_ptr, k_stride, v_stride, first_key, end_key, scale_log2,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Add keys first_key..end_key to the running softmax. Without MASK every row attends to all of them."""
    dims = tl.arange(0, PADDED_DIM)
    for start in range(first_key, end_key, TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        tokens = keys.to(tl.int64)
        if PAGED:
            # Unlike in decode attention, a look-up one tile ahead was slower here.
            blocks = load_blocks(table_ptr, start, end_key, BLOCK_SIZE, TILE_KEYS)
            tokens = key_slots(blocks, start, BLOCK_SIZE, TILE_KEYS)
        k_tile = k_ptr + tokens[:, None] * k_stride + dims[None, :]
        v_tile = v_ptr + tokens[:, None] * v_stride + dims[None, :]
        if MASK or HEAD_DIM != PADDED_DIM:
            # Values are masked as well as keys: a slot past the end may hold NaN, and 0 * NaN is not 0.
            inside = (keys < end_key)[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_tile, mask=inside, other=0.0)
            v = tl.load(v_tile, mask=inside, other=0.0)
        else:
            k = tl.load(k_tile)
            v = tl.load(v_tile)
        k, v = k.to(q.dtype), v.to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASK:
            is_seen = keys[None, :] <= positions[:, None]
            if WINDOW is not None:
                is_seen &= keys[None, :] > positions[:, None] - WINDOW
            scores = tl.where(is_seen, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        base = new_max
        if WINDOW is not None:
            # A row may have seen no key yet, and the difference of infinities is NaN.
            base = tl.where(new_max > float("-inf"), new_max, 0.0)
        weights = tl.exp2(scores * scale_log2 - base[:, None])
        shrink = tl.exp2(row_max - base)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        row_max = new_max
    return acc, row_max, row_sum


# The table's width changes from step to step. Specialising on it would compile the kernel again in mid-run.
@triton.jit(do_not_specialize=["table_stride"])
def _paged_prefill_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, block_tables_ptr, kv_scales_ptr, sinks_ptr,
    q_stride, k_stride, v_stride, table_stride, scale_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    # The last rows have the most keys. They start first, so that short programs even out the end.
    tile = tl.num_programs(2) - 1 - tl.program_id(2)

    q_start = tl.load(cu_seqlens_q_ptr + seq)
    len_q = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    k_start = tl.load(cu_seqlens_k_ptr + seq)
    len_k = tl.load(cu_seqlens_k_ptr + seq + 1) - k_start
    if tile * TILE_ROWS >= len_q * GROUP:
        return

    # A row is one query of one of the GROUP heads that share this KV head, so that a short chunk fills its tile.
    rows = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    queries = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, PADDED_DIM)
    inside = (queries < len_q)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (q_start + queries).to(tl.int64)
    q_tile = q_ptr + tokens[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :]
    q = tl.load(q_tile, mask=inside, other=0.0)

    # Query i of a sequence is at position len_k - len_q + i and attends to the keys up to its own.
    positions = len_k - len_q + queries
    first_position = len_k - len_q + tile * TILE_ROWS // GROUP
    last_query = tl.minimum((tile * TILE_ROWS + TILE_ROWS - 1) // GROUP, len_q - 1)
    end_key = len_k - len_q + last_query + 1
    seen_by_all = (first_position + 1) // TILE_KEYS * TILE_KEYS

    if kv_scales_ptr is not None:
        scale_log2 *= tl.load(kv_scales_ptr + kv_head)
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    table_ptr = block_tables_ptr + seq * table_stride
    if not PAGED:
        k_ptr += k_start.to(tl.int64) * k_stride
        v_ptr += k_start.to(tl.int64) * v_stride

    acc = tl.zeros([TILE_ROWS, PADDED_DIM], dtype=tl.float32)
    row_max = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([TILE_ROWS], dtype=tl.float32)
    if sinks_ptr is not None:
        row_max = load_sinks(sinks_ptr, heads, queries < len_q)
        row_sum += 1.0
    # Only the tiles that the diagonal, the end of the keys or a window's start cuts need a mask.
    first_unmasked = 0
    if WINDOW is not None:
        positions = tl.minimum(positions, len_k - 1)  # because a padding row must see a key too
        first_seen = tl.maximum(first_position - WINDOW + 1, 0) // TILE_KEYS * TILE_KEYS
        all_start = tl.maximum(end_key - WINDOW, 0)  # The last query's window starts here.
        first_unmasked = tl.minimum(tl.cdiv(all_start, TILE_KEYS) * TILE_KEYS, seen_by_all)
        acc, row_max, row_sum = _attend(
            acc, row_max, row_sum, q, positions, k_ptr, v_ptr, table_ptr, k_stride, v_stride, first_seen,
            first_unmasked, scale_log2, HEAD_DIM, PADDED_DIM, TILE_KEYS, BLOCK_SIZE, PAGED, WINDOW, True,
        )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, positions, k_ptr, v_ptr, table_ptr, k_stride, v_stride, first_unmasked, seen_by_all,
        scale_log2, HEAD_DIM, PADDED_DIM, TILE_KEYS, BLOCK_SIZE, PAGED, WINDOW, False,
    )  # fmt: skip
    acc, row_max, row_sum = _attend(
        acc, row_max, row_sum, q, positions, k_ptr, v_ptr, table_ptr, k_stride, v_stride, seen_by_all, end_key,
        scale_log2, HEAD_DIM, PADDED_DIM, TILE_KEYS, BLOCK_SIZE, PAGED, WINDOW, True,
    )  # fmt: skip

    out = acc / row_sum[:, None]
    if kv_scales_ptr is not None:
        out *= tl.load(kv_scales_ptr + NUM_KV_HEADS + kv_head)
    out_tile = out_ptr + (tokens * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=inside)


def paged_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    block_tables: torch.Tensor | None,
    scale: float,
    window: int | None = None,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a flat batch of sequences. `paged_cache` describes the arguments that are not described here.

    Args:
        k, v: `[total_k, num_kv_heads, head_dim]`, laid out like q; read if `block_tables` is None.
        k_cache, v_cache, kv_scales: read otherwise.
        cu_seqlens_q, cu_seqlens_k: int32 `[num_seqs + 1]`, running totals from 0 of the tokens and of the keys. A
            sequence has at least as many keys as queries: query i is at position len_k - len_q + i.
        max_seqlen_q: the most query tokens of a sequence.
        window: the number of keys that a query attends to, its own included; None: all up to its own.
    """
    paged = block_tables is not None
    keys, values = (k_cache, v_cache) if paged else (k, v)
    kv_scales = kv_scales if paged else None
    check_layout(q, keys, values, paged, kv_scales)
    check_sinks(sinks, q.shape[1])
    (total_q, num_heads, head_dim), num_kv_heads = q.shape, keys.shape[-2]
    out = torch.empty((total_q, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if total_q == 0:
        return out
    if kv_scales is None and can_attend(q, keys, values, max_seqlen_q, paged):
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q
        hopper_prefill(out, q, keys, values, *lengths, block_tables, scale, window, sinks)
        return out
    group = num_heads // num_kv_heads
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    tiles = choose_tiles(padded_dim, q.element_size(), max_seqlen_q * group, paged, q.device)
    grid = (num_kv_heads, cu_seqlens_q.numel() - 1, triton.cdiv(max_seqlen_q * group, tiles.rows))
    tables = cu_seqlens_k if block_tables is None else block_tables  # It is not read without a table.
    launcher(_paged_prefill_kernel, grid)(
        out, q, keys, values, cu_seqlens_q, cu_seqlens_k, tables, kv_scales, sinks,
        q.stride(0), keys.stride(-3), values.stride(-3), tables.stride(0) if paged else 0, scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, PADDED_DIM=padded_dim,
        TILE_ROWS=tiles.rows, TILE_KEYS=tiles.keys, BLOCK_SIZE=keys.shape[1] if paged else tiles.keys, PAGED=paged,
        WINDOW=window,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out
