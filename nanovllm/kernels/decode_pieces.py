"""How a program of decode attention begins and ends, whichever kernel it is of: it learns which piece of the plan is
its own, and stores that one's result, or leaves it to be combined with others.

Splits are combined without a second launch, which would cost a small batch as much as the attention itself: each split
leaves its partial result in the workspace and counts itself in; the one that finds all others there combines them.
Whoever that is, it reads them in the same order, so equal launches give equal bits. (Another plan, hence another batch,
rounds differently.)
"""

import triton
import triton.language as tl


@triton.jit
def load_piece(plan_ptr, item, PIECE_FIELDS: tl.constexpr):
    """Of the plan's piece number `item`: row of the batch (int64), which split, of how many, first key and the one
    after the last. A negative row is no piece, and the rest means nothing. A padding row (context 0) has one piece,
    which reads no key and writes zeros."""
    piece_ptr = plan_ptr + item * PIECE_FIELDS
    seq = tl.load(piece_ptr).to(tl.int64)
    split = tl.load(piece_ptr + 1)
    num_splits = tl.load(piece_ptr + 2)
    first_key = tl.load(piece_ptr + 3)
    end_key = tl.load(piece_ptr + 4)
    return seq, split, num_splits, first_key, end_key


@triton.jit
def _combine(
    out_ptr,
    partial_ptr,
    lse_ptr,
    num_splits,
    SPLIT_STRIDE: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Weigh the partial outputs of `num_splits` splits by their softmax sums, always in the order of the splits."""
    members = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, PADDED_DIM)
    inside = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    tile = members[:, None] * HEAD_DIM + dims[None, :]
    acc = tl.zeros([PADDED_GROUP, PADDED_DIM], dtype=tl.float32)
    total = tl.zeros([PADDED_GROUP], dtype=tl.float32)
    highest = tl.full([PADDED_GROUP], float("-inf"), dtype=tl.float32)
    for split in range(num_splits):
        row = split * SPLIT_STRIDE
        # ".cg" goes past L1, which need not know what other multiprocessors wrote.
        lse = tl.load(lse_ptr + row + members, mask=members < GROUP, other=0.0, cache_modifier=".cg")
        partial = tl.load(partial_ptr + row * HEAD_DIM + tile, mask=inside, other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, lse)
        weight, shrink = tl.exp2(lse - new_highest), tl.exp2(highest - new_highest)
        acc = acc * shrink[:, None] + partial * weight[:, None]
        total = total * shrink + weight
        highest = new_highest
    tl.store(out_ptr + tile, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def finish_piece(
    out_ptr,
    partial_ptr,
    lse_ptr,
    arrivals_ptr,
    acc,
    row_max,
    row_sum,
    seq,
    kv_head,
    item,
    split,
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """The end of piece number `item`, split `split` of `num_splits` of sequence `seq`.

    acc [PADDED_GROUP, PADDED_DIM]: the sum over its keys of exp2(score - row_max) * value, row_sum [PADDED_GROUP] that
    of these weights alone; row_max: the largest score, scores in units of log2.
    """
    members = tl.arange(0, PADDED_GROUP)
    dims = tl.arange(0, PADDED_DIM)
    inside_heads = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    head_tile = members[:, None] * HEAD_DIM + dims[None, :]
    # No key leaves acc and row_sum at zero: dividing by one instead makes the padding row's zeros.
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    pair = seq * NUM_KV_HEADS + kv_head
    out_ptr += pair * GROUP * HEAD_DIM
    if num_splits == 1:
        tl.store(out_ptr + head_tile, acc.to(out_ptr.dtype.element_ty), mask=inside_heads)
    else:
        # The splits of a sequence are neighbours in the plan, so its first one's number is where they all lie.
        first_row = ((item - split) * NUM_KV_HEADS + kv_head) * GROUP
        partial_ptr += first_row * HEAD_DIM
        lse_ptr += first_row
        own_row = split * NUM_KV_HEADS * GROUP
        tl.store(partial_ptr + own_row * HEAD_DIM + head_tile, acc, mask=inside_heads)
        tl.store(lse_ptr + own_row + members, row_max + tl.log2(row_sum), mask=members < GROUP)
        # One thread does the atomic: it may release the stores of all only after all have made theirs.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrivals_ptr + pair, 1, sem="acq_rel")
        if arrived == num_splits - 1:
            # Everyone has counted, so the counter can go back to zero for the next launch of the graph.
            tl.store(arrivals_ptr + pair, 0)
            _combine(
                out_ptr,
                partial_ptr,
                lse_ptr,
                num_splits,
                NUM_KV_HEADS * GROUP,
                GROUP,
                PADDED_GROUP,
                HEAD_DIM,
                PADDED_DIM,
            )
