"""Attention of one query token a row over the paged cache, split over keys within one launch.

One program takes one piece of a plan (see `decode_plan`), some keys of one sequence, for one KV head, and all query
heads that share that head, so every key and value is loaded once; where rows are consecutive tokens of a prompt, for
several of them. A launch may be captured in a CUDA graph: its grid follows from shapes alone, and which piece a program
takes is read from the plan.

The kernel here runs everywhere; `paged_decode_tma` has the one that is faster on Hopper.
"""

import math

import torch
import triton
import triton.language as tl

from nanovllm.kernels.decode_config import DecodeConfig, choose_config, has_tma
from nanovllm.kernels.decode_pieces import finish_piece, load_piece, piece_pairs
from nanovllm.kernels.decode_workspace import DecodeWorkspace
from nanovllm.kernels.dependent_launch import (
    CACHE_LINE,
    gdc_launch_dependents,
    gdc_wait,
    has_pdl,
    prefetch_lines,
)
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.paged_cache import check_cache, check_heads, key_slots, load_blocks
from nanovllm.kernels.paged_decode_tma import launch_paged_decode_tma
from nanovllm.utils.decode_plan import PIECE_FIELDS, make_plan, rows_a_piece


@triton.jit
def _prefetch_keys(
    k_ptr,
    v_ptr,
    table_ptr,
    first_key,
    end_key,
    ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Ask one head's keys and values into L2, LINE elements at a time; a line written meanwhile is written there."""
    dims = tl.arange(0, PADDED_DIM // LINE) * LINE
    for start in range(first_key, end_key, TILE):
        keys = start + tl.arange(0, TILE)
        slots = key_slots(load_blocks(table_ptr, start, end_key, BLOCK_SIZE, TILE), start, BLOCK_SIZE, TILE)
        inside = (keys < end_key)[:, None] & (dims < HEAD_DIM)[None, :]
        # Past the end the first line of the cache is asked for: nobody minds.
        lines = tl.where(inside, slots[:, None] * ROW + dims[None, :], 0)
        prefetch_lines(k_ptr + lines)
        prefetch_lines(v_ptr + lines)


# The table's width follows the longest context; specialising on it would compile the kernel again in mid-run.
@triton.jit(do_not_specialize=["table_stride"])
def _paged_decode_kernel(
    out_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    plan_ptr,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    q_stride,
    table_stride,
    scale_log2,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PIECE_FIELDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    LINE: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    # KV heads vary fastest: the heads of a token lie side by side in memory and are best read at the same time.
    kv_head = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    first_row, split, num_splits, first_key, end_key, num_rows, first_len = load_piece(
        plan_ptr, item, PIECE_FIELDS, MOST_ROWS
    )
    if first_row < 0:
        return
    table_ptr = block_tables_ptr + first_row * table_stride
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * HEAD_DIM
    # A tile's block is known a tile ahead: a load that asked for it itself would cost a stage of the pipeline.
    blocks = load_blocks(table_ptr, first_key, end_key, BLOCK_SIZE, TILE)
    if PDL:
        if PREFETCH:
            ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
            _prefetch_keys(
                k_ptr, v_ptr, table_ptr, first_key, end_key, ROW, HEAD_DIM, PADDED_DIM, LINE, BLOCK_SIZE, TILE
            )
        gdc_wait()

    rows, heads, inside_pairs = piece_pairs(num_rows, kv_head, GROUP, PAIRS, MOST_ROWS)
    dims = tl.arange(0, PADDED_DIM)
    inside_dims = dims < HEAD_DIM
    q_tile = (rows * q_stride + heads * HEAD_DIM)[:, None] + dims[None, :]
    inside_q = inside_pairs[:, None] & inside_dims[None, :]
    q = tl.load(q_ptr + first_row * q_stride + q_tile, mask=inside_q, other=0.0)

    acc = tl.zeros([PAIRS, PADDED_DIM], dtype=tl.float32)
    pair_max = tl.full([PAIRS], float("-inf"), dtype=tl.float32)
    pair_sum = tl.zeros([PAIRS], dtype=tl.float32)
    for start in range(first_key, end_key, TILE):
        keys = start + tl.arange(0, TILE)
        owned = keys < end_key
        slots = key_slots(blocks, start, BLOCK_SIZE, TILE)
        blocks = load_blocks(table_ptr, start + TILE, end_key, BLOCK_SIZE, TILE)
        cache_tile = slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + dims[None, :]
        # Values are masked as well as keys: a slot past the end may hold NaN, and 0 * NaN is not 0.
        inside = owned[:, None] & inside_dims[None, :]
        k = tl.load(k_ptr + cache_tile, mask=inside, other=0.0)
        v = tl.load(v_ptr + cache_tile, mask=inside, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        attended = owned[None, :]
        if MOST_ROWS > 1:
            # Each row has a key of the piece's first tile: a run of rows and its last keys lie in one.
            attended &= keys[None, :] < (first_len + rows)[:, None]
        scores = tl.where(attended, scores, float("-inf"))
        new_max = tl.maximum(pair_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        shrink = tl.exp2(pair_max - new_max)
        pair_sum = pair_sum * shrink + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        pair_max = new_max

    finish_piece(
        out_ptr,
        partial_ptr,
        lse_ptr,
        arrivals_ptr,
        acc,
        pair_max,
        pair_sum,
        first_row,
        num_rows,
        kv_head,
        item,
        split,
        num_splits,
        NUM_KV_HEADS,
        GROUP,
        PAIRS,
        MOST_ROWS,
        MOST_ROWS,
        HEAD_DIM,
        PADDED_DIM,
    )


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    plan: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    config: DecodeConfig | None = None,
    pdl: bool = False,
    most_rows: int = 1,
) -> torch.Tensor:
    """Attention of each row's token to its whole context: softmax(q k^T * scale) v, grouped-query heads. A row is a
    sequence's newest token, or in a mixed step any token of a prompt.

    Args:
        q: `[batch_size, num_heads, head_dim]`, heads packed within a token, any stride between tokens.
        k_cache, v_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous, of q's dtype, block_size a
            power of two from 16 up, all rows' keys and values already in them.
        context_lens: int32 `[batch_size]`, keys of each row, its own included; 0 marks a padding row, which reads no
            key and whose output is zero. Read only where there is no plan, which says the same.
        block_tables: int32 `[batch_size, max_blocks]`, right-padded with -1; of rows that share pieces the first one's
            is read.
        scale: positive factor of the scores, usually `head_dim ** -0.5`.
        plan: int32 `[num_items, PIECE_FIELDS]`, the pieces of work, made for these context_lens (see `decode_plan`);
            one is made for this call if None, which waits for the device.
        workspace: what the splits share; one is made for this call if None.
        config: launch constants, chosen from the shapes if None.
        pdl: programmatic dependent launch (see `dependent_launch`); the plan and block_tables are read before the wait.
        most_rows: that share a piece of the plan, at most `rows_a_piece`.

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
    out = torch.empty((batch_size, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if batch_size == 0:
        return out

    pdl = pdl and plan is not None and has_pdl(q.device)  # A plan made here would be read before it is there.
    if plan is None:
        plan = make_plan(context_lens, num_kv_heads)
    elif plan.dtype != torch.int32 or plan.shape[1:] != (PIECE_FIELDS,) or not plan.is_contiguous():
        raise ValueError(
            f"plan must be a contiguous int32 [num_items, {PIECE_FIELDS}], not {list(plan.shape)} {plan.dtype} with "
            f"strides {plan.stride()}"
        )
    group = num_heads // num_kv_heads
    allowed = rows_a_piece(num_heads, num_kv_heads)
    if not 1 <= most_rows <= allowed:
        raise ValueError(f"most_rows must be in 1..{allowed} with {group} query heads a KV head, got {most_rows}")
    num_items = len(plan)
    room = num_items * most_rows
    workspace = workspace or DecodeWorkspace(batch_size, num_heads, num_kv_heads, head_dim, q.device, room)
    workspace.check_room(batch_size, num_heads, num_kv_heads, head_dim, room)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    if config is None:
        tma = has_tma(head_dim, block_size, q.element_size(), q.device)
        config = choose_config(batch_size * num_kv_heads, padded_dim, q.element_size(), q.device, tma)
    scale_log2 = scale * math.log2(math.e)
    if config.tma:
        tensors = (out, q, k_cache, v_cache, block_tables, plan, workspace)
        launch_paged_decode_tma(*tensors, scale_log2, config, pdl, most_rows)
        return out
    launcher(_paged_decode_kernel, (num_kv_heads, num_items), pdl)(
        out,
        q,
        k_cache,
        v_cache,
        block_tables,
        plan,
        workspace.partial,
        workspace.lse,
        workspace.arrivals,
        q.stride(0),
        block_tables.stride(0),
        scale_log2,
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        MOST_ROWS=most_rows,
        # Tensor cores take no fewer than 16; what pads a small group is computed and thrown away.
        PAIRS=max(16, triton.next_power_of_2(most_rows * group)),
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_dim,
        PIECE_FIELDS=PIECE_FIELDS,
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        LINE=min(padded_dim, CACHE_LINE // q.element_size()),
        PREFETCH=config.prefetch,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return out
