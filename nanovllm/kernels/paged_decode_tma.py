"""The kernel of `paged_decode` for Hopper: whole tiles of keys and values come by the tensor memory accelerator.

The keys stand on the left of the products: of a tile of 32 keys and two query heads the tensor cores then compute
32 x 8 scores, where the other way round they compute 16 x 32. A warp or two do all, because nothing is left for them to
do but that: no addresses, no copies. A piece costs less than half of the other kernel's instructions and a tenth less
energy, which is time where the card is at its power limit (docs/performance.md).

The accelerator knows nothing of a sequence's end, so the keys of a piece after its last whole tile are loaded one by
one: asked for at the beginning, and used at the end.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.decode_config import DecodeConfig
from nanovllm.kernels.decode_pieces import finish_piece, load_piece
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
_MIN_GROUP = 8


@triton.jit
def _attend(q, k, v, is_key, acc, col_max, col_sum, scale_log2, MASK: tl.constexpr):
    """One tile: q [HEAD_DIM, heads], k and v [TILE, HEAD_DIM], acc [HEAD_DIM, heads]; col_max and col_sum [heads].
    is_key [TILE]: with MASK, which of the keys count; the values of the others are zeros."""
    scores = tl.dot(k, q, input_precision="ieee")
    if MASK:
        scores = tl.where(is_key[:, None], scores, float("-inf"))
    new_max = tl.maximum(col_max, tl.max(scores, 0) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_max[None, :])
    shrink = tl.exp2(col_max - new_max)
    col_sum = col_sum * shrink + tl.sum(weights, 0)
    acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * shrink[None, :], input_precision="ieee")
    return acc, new_max, col_sum


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
    PADDED_GROUP: tl.constexpr,
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
    seq, split, num_splits, first_key, end_key = load_piece(plan_ptr, item, PIECE_FIELDS)
    if seq < 0:
        return
    rest = first_key + (end_key - first_key) // TILE * TILE
    table_ptr = block_tables_ptr + seq * table_stride
    # A tile lies in one block, which is known a tile ahead.
    block = load_blocks(table_ptr, first_key, end_key, BLOCK_SIZE, TILE)
    rest_block = load_blocks(table_ptr, rest, end_key, BLOCK_SIZE, TILE)
    if PDL:
        gdc_wait()

    members = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, HEAD_DIM)
    q_ptr += seq * q_stride + kv_head * GROUP * HEAD_DIM
    q = tl.load(q_ptr + members[None, :] * HEAD_DIM + dims[:, None], mask=(members < GROUP)[None, :], other=0.0)
    in_rest = rest + tl.arange(0, TILE) < end_key
    rest_slots = key_slots(rest_block, rest, BLOCK_SIZE, TILE)
    rest_tile = rest_slots[:, None] * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM + dims[None, :]
    # Values are masked as well as keys: a slot past the end may hold NaN, and 0 * NaN is not 0.
    k_rest = tl.load(k_cache_ptr + rest_tile, mask=in_rest[:, None], other=0.0)
    v_rest = tl.load(v_cache_ptr + rest_tile, mask=in_rest[:, None], other=0.0)

    acc = tl.zeros([HEAD_DIM, PADDED_GROUP], dtype=tl.float32)
    col_max = tl.full([PADDED_GROUP], float("-inf"), dtype=tl.float32)
    col_sum = tl.zeros([PADDED_GROUP], dtype=tl.float32)
    for start in range(first_key, rest, TILE):
        slot = block * BLOCK_SIZE + start % BLOCK_SIZE
        block = load_blocks(table_ptr, start + TILE, end_key, BLOCK_SIZE, TILE)
        k = k_desc.load([slot, kv_head * HEAD_DIM])
        v = v_desc.load([slot, kv_head * HEAD_DIM])
        acc, col_max, col_sum = _attend(q, k, v, in_rest, acc, col_max, col_sum, scale_log2, MASK=False)
    if rest < end_key:
        acc, col_max, col_sum = _attend(q, k_rest, v_rest, in_rest, acc, col_max, col_sum, scale_log2, MASK=True)

    finish_piece(
        out_ptr,
        partial_ptr,
        lse_ptr,
        arrivals_ptr,
        tl.trans(acc),
        col_max,
        col_sum,
        seq,
        kv_head,
        item,
        split,
        num_splits,
        NUM_KV_HEADS,
        GROUP,
        PADDED_GROUP,
        HEAD_DIM,
        HEAD_DIM,
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
        PADDED_GROUP=max(_MIN_GROUP, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        PIECE_FIELDS=PIECE_FIELDS,
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
