"""Attention of one query token a sequence over the paged cache, split over keys within one launch.

One program takes one split of one sequence's keys for one KV head, and all query heads that share that head, so every
key and value is loaded once. A launch may be captured in a CUDA graph: its grid follows from shapes alone, and what
really has to be done is worked out on the device from the context lengths.

Splits are combined without a second launch, which would cost a small batch as much as the attention itself: each
split leaves its partial result in the workspace and counts itself in; the one that finds all others there combines
them. Whoever that is, it reads them in the same order, so equal launches give equal bits. (Another `num_splits`,
hence another batch size, rounds differently.)
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl

from nanovllm.kernels.store_kvcache import check_cache, check_heads, key_slots

# One load in the combining step spans all splits, hence a bound; a power of two.
MAX_SPLITS = 64
# Five programs fit an SM at once (registers and shared memory, head_dim 128); more even out unlike lengths.
PROGRAMS_PER_SM = 8


@cache
def num_sms(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; an H200's elsewhere, so that the interpreter splits as the GPU would."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def choose_num_splits(batch_size: int, num_kv_heads: int, num_sms: int) -> int:
    """Most splits a sequence may use: enough programs to fill the device, 1 where the batch does so by itself."""
    return min(MAX_SPLITS, triton.cdiv(PROGRAMS_PER_SM * num_sms, batch_size * num_kv_heads))


def choose_tile(padded_dim: int, itemsize: int) -> tuple[int, int]:
    """Keys a tile and pipeline stages: a tile of keys and one of values, 32 KiB, are on their way in each program."""
    tile_bytes = 16 * 1024
    return max(16, min(64, tile_bytes // (padded_dim * itemsize))), 3


class DecodeWorkspace:
    """What the splits of a launch pass to each other. Allocate once, outside any CUDA graph, and pass to every launch.

    Launches that may run at the same time (other streams, other engines) need a workspace each; layers of one model
    share one. A launch leaves the counters at zero, as it needs to find them; nothing else outlives it.

    Attributes:
        partial: float32, per (sequence, KV head, split) the normalised outputs of a group's query heads.
        lse: float32, next to them the log2 of their softmax sums.
        arrivals: int32 `[max_batch_size * num_kv_heads]`, splits that have finished.
    """

    def __init__(
        self,
        max_batch_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        num_splits: int | None = None,
    ):
        """Room for every batch size up to `max_batch_size`, each with `num_splits` or its default number of splits."""
        self.arrivals = torch.zeros(max_batch_size * num_kv_heads, dtype=torch.int32, device=device)
        if num_splits is None:
            # What choose_num_splits can ask for, over all batch sizes: ceil(a / b) * b never exceeds a + b.
            programs = PROGRAMS_PER_SM * num_sms(self.arrivals.device)
            rows = min(MAX_SPLITS * max_batch_size, triton.cdiv(programs, num_kv_heads) + max_batch_size)
        else:
            rows = num_splits * max_batch_size
        self.partial = torch.empty(rows * num_heads * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(rows * num_heads, dtype=torch.float32, device=device)


@triton.jit
def _combine(
    out_ptr,
    partial_ptr,
    lse_ptr,
    num_used,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Weigh the partial outputs of `num_used` splits by their softmax sums, always in the order of the splits."""
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, PADDED_DIM)
    used = splits < num_used
    inside = used[:, None] & (dims < HEAD_DIM)[None, :]
    for member in range(GROUP):
        row = splits * GROUP + member
        # ".cg" goes past L1, which need not know what other multiprocessors wrote.
        lse = tl.load(lse_ptr + row, mask=used, other=float("-inf"), cache_modifier=".cg")
        weights = tl.exp2(lse - tl.max(lse, 0))
        weights = weights / tl.sum(weights, 0)
        partial_tile = partial_ptr + row[:, None] * HEAD_DIM + dims[None, :]
        partial = tl.load(partial_tile, mask=inside, other=0.0, cache_modifier=".cg")
        out = tl.sum(partial * weights[:, None], 0)
        tl.store(out_ptr + member * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < HEAD_DIM)


# The table's width follows the longest context; specialising on it would compile the kernel again in mid-run.
@triton.jit(do_not_specialize=["table_stride"])
def _paged_decode_kernel(
    out_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    context_lens_ptr,
    block_tables_ptr,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    q_stride,
    table_stride,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    # KV heads vary fastest: the heads of a token lie side by side in memory and are best read at the same time.
    kv_head = tl.program_id(0)
    seq = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)

    context_len = tl.load(context_lens_ptr + seq)
    num_tiles = tl.cdiv(context_len, TILE)
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), 1)
    # A padding row (context 0) keeps its first split, which reads no key and writes zeros.
    num_used = tl.maximum(tl.cdiv(num_tiles, tiles_per_split), 1)
    if split >= num_used:
        return
    first_key = split * tiles_per_split * TILE
    end_key = tl.minimum(first_key + tiles_per_split * TILE, context_len)

    members = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, PADDED_DIM)
    inside_dims = dims < HEAD_DIM
    inside_heads = (members < GROUP)[:, None] & inside_dims[None, :]
    head_tile = members[:, None] * HEAD_DIM + dims[None, :]
    first_head = kv_head * GROUP
    q = tl.load(q_ptr + seq * q_stride + first_head * HEAD_DIM + head_tile, mask=inside_heads, other=0.0)

    table_ptr = block_tables_ptr + seq * table_stride
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    acc = tl.zeros([PADDED_GROUP, PADDED_DIM], dtype=tl.float32)
    row_max = tl.full([PADDED_GROUP], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([PADDED_GROUP], dtype=tl.float32)
    for start in range(first_key, end_key, TILE):
        owned = start + tl.arange(0, TILE) < end_key
        slots = key_slots(table_ptr, start, end_key, BLOCK_SIZE, TILE)
        cache_tile = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
        # Values are masked as well as keys: a slot past the end may hold NaN, and 0 * NaN is not 0.
        inside = owned[:, None] & inside_dims[None, :]
        k = tl.load(k_ptr + cache_tile, mask=inside, other=0.0)
        v = tl.load(v_ptr + cache_tile, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where(owned[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        shrink = tl.exp2(row_max - new_max)
        row_sum = row_sum * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        row_max = new_max

    # No key leaves acc and row_sum at zero: dividing by one instead makes the padding row's zeros.
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    pair = seq * NUM_KV_HEADS + kv_head
    out_ptr += pair * GROUP * HEAD_DIM
    if num_used == 1:
        tl.store(out_ptr + head_tile, acc.to(out_ptr.dtype.element_ty), mask=inside_heads)
    else:
        partial_ptr += pair * num_splits * GROUP * HEAD_DIM
        lse_ptr += pair * num_splits * GROUP
        tl.store(partial_ptr + split * GROUP * HEAD_DIM + head_tile, acc, mask=inside_heads)
        tl.store(lse_ptr + split * GROUP + members, row_max + tl.log2(row_sum), mask=members < GROUP)
        # One thread does the atomic: it may release the stores of all only after all have made theirs.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + pair, 1, sem="acq_rel")
        if arrived == num_used - 1:
            # Everyone has counted, so the counter can go back to zero for the next launch of the graph.
            tl.store(arrivals_ptr + pair, 0)
            _combine(out_ptr, partial_ptr, lse_ptr, num_used, GROUP, HEAD_DIM, PADDED_DIM, MAX_SPLITS)


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Attention of each sequence's newest token to its whole context: softmax(q k^T * scale) v, grouped-query heads.

    Args:
        q: `[batch_size, num_heads, head_dim]`, heads packed within a token, any stride between tokens.
        k_cache, v_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous, of q's dtype, block_size a
            power of two from 16 up, the new token's keys and values already in them.
        context_lens: int32 `[batch_size]`, keys of each sequence, the new token's included; 0 marks a padding row,
            which reads no key and whose output is zero.
        block_tables: int32 `[batch_size, max_blocks]`, right-padded with -1.
        scale: positive factor of the scores, usually `head_dim ** -0.5`.
        workspace: what the splits share; one is made for this call if None.
        num_splits: most splits of one sequence's keys, 1..64; chosen from the batch size if None.

    Returns:
        `[batch_size, num_heads, head_dim]`, contiguous, of q's dtype; float32 inside.

    Raises:
        ValueError: a layout that the kernel can't address, shapes and dtypes that don't agree, too small a workspace.

    Flash-Decoding (Dao, Haziza, Massa, Sizov 2023) over the pages of PagedAttention (Kwon et al. 2023).
    """
    check_heads(q=q)
    check_cache(k_cache, v_cache)
    batch_size, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, cache_dim = k_cache.shape
    if cache_dim != head_dim or num_heads % num_kv_heads or k_cache.dtype != q.dtype:
        raise ValueError(
            f"q {list(q.shape)} {q.dtype} and caches {list(k_cache.shape)} {k_cache.dtype} don't agree: one head_dim, "
            "one dtype, and a whole number of query heads a KV head"
        )
    if not scale > 0:
        raise ValueError(f"scale must be positive, got {scale}")
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be 1..{MAX_SPLITS}, got {num_splits}")
    out = torch.empty((batch_size, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if batch_size == 0:
        return out

    if workspace is None:
        workspace = DecodeWorkspace(batch_size, num_heads, num_kv_heads, head_dim, q.device, num_splits)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    tile, num_stages = choose_tile(padded_dim, q.element_size())
    if num_splits is None:
        num_splits = choose_num_splits(batch_size, num_kv_heads, num_sms(q.device))
    # A table's width bounds its context: splits beyond its tiles could never have a key.
    num_splits = min(num_splits, triton.cdiv(block_tables.shape[1] * block_size, tile))
    rows = batch_size * num_splits * num_heads
    if (
        workspace.arrivals.numel() < batch_size * num_kv_heads
        or workspace.lse.numel() < rows
        or workspace.partial.numel() < rows * head_dim
    ):
        raise ValueError(f"workspace too small for {batch_size} sequences of {num_splits} splits, q {list(q.shape)}")
    group = num_heads // num_kv_heads
    _paged_decode_kernel[(num_kv_heads, batch_size, num_splits)](
        out,
        q,
        k_cache,
        v_cache,
        context_lens,
        block_tables,
        workspace.partial,
        workspace.lse,
        workspace.arrivals,
        q.stride(0),
        block_tables.stride(0),
        scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        # Tensor cores take no fewer than 16 rows; the ones that pad a small group are computed and thrown away.
        PADDED_GROUP=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        BLOCK_SIZE=block_size,
        TILE=tile,
        MAX_SPLITS=MAX_SPLITS,
        num_warps=4,
        num_stages=num_stages,
    )
    return out
