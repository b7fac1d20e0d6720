"""Asking for the first keys and values of decode attention while the kernels before it leave memory idle.

Attention reads at memory's full rate, and the products between two layers' attention, of a small model, at a third of
it. What they leave is enough for a part of the cache to be in L2 when its attention begins: the beginnings of the
longest pieces, which are taken first. There is no result, only time; the twin is to do nothing.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.decode_pieces import load_piece
from nanovllm.kernels.dependent_launch import CACHE_LINE, prefetch_lasting_lines
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.paged_cache import check_cache, load_blocks
from nanovllm.utils.decode_plan import PIECE_FIELDS

# Of a piece, and of all: the best for an H200 that meanwhile computes the down projection of Qwen3-0.6B. More is in the
# products' way, and drives their weights out of L2; so do more programs, which ask faster (docs/performance.md).
_KEYS = 16
_BYTES = 12 << 20
_MIN_PROGRAMS = 40
_LANES = 32  # a warp, each a line at a time


@triton.jit(do_not_specialize=["table_stride", "num_items"])
def _prefetch_cache_kernel(
    k_cache_ptr,
    v_cache_ptr,
    block_tables_ptr,
    plan_ptr,
    table_stride,
    num_items,
    KEY_SIZE: tl.constexpr,
    LINE: tl.constexpr,
    LANES: tl.constexpr,
    KEYS: tl.constexpr,
    ITEMS: tl.constexpr,
    PIECE_FIELDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    lanes = tl.arange(0, LANES) * LINE
    first_item = tl.program_id(0) * ITEMS
    for item in range(first_item, tl.minimum(first_item + ITEMS, num_items)):
        row, _, _, first_key, end_key, _, _ = load_piece(plan_ptr, item, PIECE_FIELDS, 1)
        if row >= 0:
            # Keys of a beginning lie in one block.
            block = load_blocks(block_tables_ptr + row * table_stride, first_key, end_key, BLOCK_SIZE, KEYS)
            begin = (block.to(tl.int64) * BLOCK_SIZE + first_key % BLOCK_SIZE) * KEY_SIZE
            size = tl.minimum(end_key - first_key, KEYS) * KEY_SIZE
            for start in range(0, size, LANES * LINE):
                at = begin + tl.minimum(start + lanes, size - 1)
                prefetch_lasting_lines(k_cache_ptr + at)
                prefetch_lasting_lines(v_cache_ptr + at)


def prefetch_cache(
    k_cache: torch.Tensor, v_cache: torch.Tensor, block_tables: torch.Tensor, plan: torch.Tensor
) -> None:
    """Have a GPU fetch into L2 what the programs of `paged_decode` read first. The caches may be written meanwhile.

    Args:
        k_cache, v_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous.
        block_tables: int32 `[batch_size, max_blocks]`, right-padded with -1.
        plan: int32 `[num_items, PIECE_FIELDS]`, that of the launch to come, with one row a piece.

    Raises ValueError where the caches have another layout.
    """
    check_cache(k_cache, v_cache)
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    key_size = num_kv_heads * head_dim
    num_items = min(len(plan), max(1, _BYTES // (2 * _KEYS * key_size * k_cache.element_size())))
    items_a_program = max(1, num_items // _MIN_PROGRAMS)
    launcher(_prefetch_cache_kernel, (-(-num_items // items_a_program),))(
        k_cache,
        v_cache,
        block_tables,
        plan,
        block_tables.stride(0),
        num_items,
        KEY_SIZE=key_size,
        LINE=CACHE_LINE // k_cache.element_size(),
        LANES=_LANES,
        KEYS=_KEYS,
        ITEMS=items_a_program,
        PIECE_FIELDS=PIECE_FIELDS,
        BLOCK_SIZE=block_size,
        num_warps=1,
    )
