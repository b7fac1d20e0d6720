"""The kernel of `paged_decode` for Hopper: whole tiles of keys and values come by the tensor memory accelerator.

The keys stand on the left of the products: of a tile of 32 keys and two query heads the tensor cores then compute
32 x 8 scores, where the other way round they compute 16 x 32. A warp or two do all, because nothing is left for them to
do but that: no addresses, no copies. A piece costs less than half of the other kernel's instructions and a tenth less
energy, which is time where the card is at its power limit (docs/performance.md).

The accelerator knows nothing of a sequence's end, so the keys of a piece after its last whole tile are loaded one by
one: asked for at the beginning, and used at the end. In a launch with pieces of several rows, which take more columns,
those of one row go another way, with as few as ever.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.decode_config import DecodeConfig
from nanovllm.kernels.decode_pieces import finish_piece, load_piece, piece_pairs
from nanovllm.kernels.decode_workspace import DecodeWorkspace
from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.paged_cache import key_slots, load_blocks
from nanovllm.utils.decode_plan import PIECE_FIELDS

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4
    TensorDescriptor = None

# Tensor cores take eight columns; the ones that pad a small group are computed and thrown away.
_MIN_PAIRS = 8


@triton.jit
def _attend(q, k, v, is_key, acc, pair_max, pair_sum, scale_log2, MASK: tl.constexpr):
    """One tile: q [HEAD_DIM, PAIRS], k and v [TILE, HEAD_DIM], acc [HEAD_DIM, PAIRS]; pair_max and pair_sum [PAIRS].
    is_key [TILE, PAIRS]: with MASK, which of the keys count; the values of those that count for no pair are zeros."""
    scores = tl.dot(k, q, input_precision="ieee")
    if MASK:
        scores = tl.where(is_key, scores, float("-inf"))
    new_max = tl.maximum(pair_max, tl.max(scores, 0) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_max[None, :])
    shrink = tl.exp2(pair_max - new_max)
    pair_sum = pair_sum * shrink + tl.sum(weights, 0)
    acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * shrink[None, :], input_precision="ieee")
    return acc, new_max, pair_sum


@triton.jit
def _attend_piece(
    out_ptr,
    q_ptr,
    k_desc,
    v_desc,
    k_cache_ptr,
    v_cache_ptr,
    table_ptr,
    block,
    rest_block,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    q_stride,
    scale_log2,
    kv_head,
    item,
    first_row,
    split,
    num_splits,
    first_key,
    rest,
    end_key,
    num_rows,
    first_len,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """A piece of up to ROWS rows; keys from `rest` on are in no whole tile. block and rest_block are the blocks of
    first_key and rest."""
    rows, heads, inside_pairs = piece_pairs(num_rows, kv_head, GROUP, PAIRS, ROWS)
    dims = tl.arange(0, HEAD_DIM)
    q_tile = (rows * q_stride + heads * HEAD_DIM)[None, :] + dims[:, None]
    q = tl.load(q_ptr + first_row * q_stride + q_tile, mask=inside_pairs[None, :], other=0.0)
    rest_keys = rest + tl.arange(0, TILE)
    rest_slots = key_slots(rest_block, rest, BLOCK_SIZE, TILE)
    rest_tile = rest_slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + dims[None, :]
    # Values are masked as well as keys: a slot past the end may hold NaN, and 0 * NaN is not 0.
    k_rest = tl.load(k_cache_ptr + rest_tile, mask=(rest_keys < end_key)[:, None], other=0.0)
    v_rest = tl.load(v_cache_ptr + rest_tile, mask=(rest_keys < end_key)[:, None], other=0.0)
    # The last split of several rows has its last keys here, and other splits have none.
    is_key = rest_keys[:, None] < (first_len + rows)[None, :]

    acc = tl.zeros([HEAD_DIM, PAIRS], dtype=tl.float32)
    pair_max = tl.full([PAIRS], float("-inf"), dtype=tl.float32)
    pair_sum = tl.zeros([PAIRS], dtype=tl.float32)
    for start in range(first_key, rest, TILE):
        slot = block * BLOCK_SIZE + start % BLOCK_SIZE
        block = load_blocks(table_ptr, start + TILE, end_key, BLOCK_SIZE, TILE)
        k = k_desc.load([slot, kv_head * HEAD_DIM])
        v = v_desc.load([slot, kv_head * HEAD_DIM])
        acc, pair_max, pair_sum = _attend(q, k, v, is_key, acc, pair_max, pair_sum, scale_log2, MASK=False)
    if rest < end_key:
        acc, pair_max, pair_sum = _attend(q, k_rest, v_rest, is_key, acc, pair_max, pair_sum, scale_log2, MASK=True)

    finish_piece(
        out_ptr,
        partial_ptr,
        lse_ptr,
        arrivals_ptr,
        tl.trans(acc),
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
        ROWS,
        MOST_ROWS,
        HEAD_DIM,
        HEAD_DIM,
    )


# The table's width follows the longest context; specialising on it would compile the kernel again in mid-run.
@triton.jit(do_not_specialize=["table_stride"])
def _paged_decode_tma_kernel(
    out_ptr,
    q_ptr,
    k_desc,
    v_desc,
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
    MOST_PAIRS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PIECE_FIELDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
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
    # Keys that are not all rows' are no part of a whole tile either.
    rest = first_key + (tl.minimum(first_len, end_key) - first_key) // TILE * TILE
    table_ptr = block_tables_ptr + first_row * table_stride
    # A tile lies in one block, which is known a tile ahead.
    block = load_blocks(table_ptr, first_key, end_key, BLOCK_SIZE, TILE)
    rest_block = load_blocks(table_ptr, rest, end_key, BLOCK_SIZE, TILE)
    if PDL:
        gdc_wait()
    # Two ways through a launch in which some pieces have several rows, and one where none has.
    for is_shared in tl.static_range(2 if MOST_ROWS > 1 else 1):
        if (num_rows > 1) == is_shared:
            _attend_piece(
                out_ptr,
                q_ptr,
                k_desc,
                v_desc,
                k_cache_ptr,
                v_cache_ptr,
                table_ptr,
                block,
                rest_block,
                partial_ptr,
                lse_ptr,
                arrivals_ptr,
                q_stride,
                scale_log2,
                kv_head,
                item,
                first_row,
                split,
                num_splits,
                first_key,
                rest,
                end_key,
                num_rows,
                first_len,
                NUM_KV_HEADS,
                GROUP,
                MOST_PAIRS if is_shared else PAIRS,
                MOST_ROWS if is_shared else 1,
                MOST_ROWS,
                HEAD_DIM,
                BLOCK_SIZE,
                TILE,
            )


def launch_paged_decode_tma(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: torch.Tensor,
    workspace: DecodeWorkspace,
    scale_log2: float,
    config: DecodeConfig,
    pdl: bool,
    most_rows: int,
) -> None:
    """Write the attention of q, all arguments as in `paged_decode`, which has checked them, into `out`.

    Raises ValueError where head_dim is no power of two, a tile no part of a block, or Triton older than 3.4.
    """
    if TensorDescriptor is None:
        raise ValueError(f"config.tma needs Triton 3.4 or newer, and this is {triton.__version__}")
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    if head_dim & (head_dim - 1) or config.tile > block_size:
        raise ValueError(
            f"head_dim {head_dim} and block_size {block_size}: with tiles by the tensor memory accelerator head_dim "
            f"must be a power of two and block_size no less than a tile of {config.tile} keys"
        )
    group = q.shape[1] // num_kv_heads
    tiles = (
        TensorDescriptor.from_tensor(cache.view(-1, num_kv_heads * head_dim), [config.tile, head_dim])
        for cache in (k_cache, v_cache)
    )
    launcher(_paged_decode_tma_kernel, (num_kv_heads, len(plan)), pdl)(
        out,
        q,
        *tiles,
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
        PAIRS=max(_MIN_PAIRS, triton.next_power_of_2(group)),
        MOST_PAIRS=max(_MIN_PAIRS, triton.next_power_of_2(most_rows * group)),
        HEAD_DIM=head_dim,
        PIECE_FIELDS=PIECE_FIELDS,
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
