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
def load_piece(plan_ptr, item, PIECE_FIELDS: tl.constexpr, MOST_ROWS: tl.constexpr):
    """Of the plan's piece number `item`: first row of the batch (int64), which split, of how many, first key, the one
    after the last, how many rows, and how many keys the first of these has in all. A negative row is no piece, and the
    rest means nothing. A padding row (context 0) has one piece, which reads no key and writes zeros."""
    piece_ptr = plan_ptr + item * PIECE_FIELDS
    first_row = tl.load(piece_ptr).to(tl.int64)
    split = tl.load(piece_ptr + 1)
    num_splits = tl.load(piece_ptr + 2)
    first_key = tl.load(piece_ptr + 3)
    end_key = tl.load(piece_ptr + 4)
    num_rows = 1
    first_len = end_key
    if MOST_ROWS > 1:
        num_rows = tl.load(piece_ptr + 5)
        first_len = tl.load(piece_ptr + 6)
    return first_row, split, num_splits, first_key, end_key, num_rows, first_len


@triton.jit
def piece_pairs(num_rows, kv_head, GROUP: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """What the tensor cores multiply with a key, the query heads of a KV head, of each row: of the pairs of a row and a
    head, [PAIRS], the row, counted within the piece, the head, and whether there is such a pair."""
    pairs = tl.arange(0, PAIRS)
    rows = pairs // GROUP if ROWS > 1 else tl.zeros([PAIRS], dtype=tl.int32)
    heads = kv_head * GROUP + pairs - rows * GROUP
    inside = pairs < num_rows * GROUP if ROWS > 1 else pairs < GROUP
    return rows, heads, inside


@triton.jit
def _combine(
    out_ptr,
    partial_ptr,
    lse_ptr,
    num_splits,
    out_tile,
    inside_pairs,
    SPLIT_STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Weigh the partial outputs of `num_splits` splits by their softmax sums, always in the order of the splits."""
    pairs = tl.arange(0, PAIRS)
    dims = tl.arange(0, PADDED_DIM)
    inside = inside_pairs[:, None] & (dims < HEAD_DIM)[None, :]
    tile = pairs[:, None] * HEAD_DIM + dims[None, :]
    acc = tl.zeros([PAIRS, PADDED_DIM], dtype=tl.float32)
    total = tl.zeros([PAIRS], dtype=tl.float32)
    highest = tl.full([PAIRS], float("-inf"), dtype=tl.float32)
    for split in range(num_splits):
        first = split * SPLIT_STRIDE
        # ".cg" goes past L1, which need not know what other multiprocessors wrote.
        lse = tl.load(lse_ptr + first + pairs, mask=inside_pairs, other=0.0, cache_modifier=".cg")
        partial = tl.load(partial_ptr + first * HEAD_DIM + tile, mask=inside, other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, lse)
        weight, shrink = tl.exp2(lse - new_highest), tl.exp2(highest - new_highest)
        acc = acc * shrink[:, None] + partial * weight[:, None]
        total = total * shrink + weight
        highest = new_highest
    tl.store(out_ptr + out_tile, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def finish_piece(
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    MOST_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """The end of piece number `item`, split `split` of `num_splits` of the num_rows, up to ROWS, from first_row on.

    acc [PAIRS, PADDED_DIM]: of the pairs of a row and a head the sum over the piece's keys of exp2(score - pair_max) *
    value, pair_sum [PAIRS] that of these weights alone; pair_max: the largest score, scores in units of log2.
    MOST_ROWS: that any piece of the launch has.
    """
    pairs = tl.arange(0, PAIRS)
    dims = tl.arange(0, PADDED_DIM)
    rows, heads, inside_pairs = piece_pairs(num_rows, kv_head, GROUP, PAIRS, ROWS)
    inside = inside_pairs[:, None] & (dims < HEAD_DIM)[None, :]
    # No key leaves acc and pair_sum at zero: dividing by one instead makes the padding row's zeros.
    acc = acc / tl.where(pair_sum > 0, pair_sum, 1.0)[:, None]
    out_ptr += first_row * NUM_KV_HEADS * GROUP * HEAD_DIM
    out_tile = (rows * NUM_KV_HEADS * GROUP + heads)[:, None] * HEAD_DIM + dims[None, :]
    if num_splits == 1:
        tl.store(out_ptr + out_tile, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        # The splits of a sequence are neighbours in the plan, so its first one's number is where they all lie.
        SPLIT_STRIDE: tl.constexpr = NUM_KV_HEADS * MOST_ROWS * GROUP
        first_pair = (item - split) * SPLIT_STRIDE + kv_head * MOST_ROWS * GROUP
        partial_ptr += first_pair * HEAD_DIM
        lse_ptr += first_pair
        own_pair = split * SPLIT_STRIDE
        tile = pairs[:, None] * HEAD_DIM + dims[None, :]
        tl.store(partial_ptr + own_pair * HEAD_DIM + tile, acc, mask=inside)
        tl.store(lse_ptr + own_pair + pairs, pair_max + tl.log2(pair_sum), mask=inside_pairs)
        # One thread does the atomic: it may release the stores of all only after all have made theirs.
        tl.debug_barrier()
        arrivals_ptr += first_row * NUM_KV_HEADS + kv_head
        arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
        if arrived == num_splits - 1:
            # Everyone has counted, so the counter can go back to zero for the next launch of the graph.
            tl.store(arrivals_ptr, 0)
            _combine(
                out_ptr,
                partial_ptr,
                lse_ptr,
                num_splits,
                out_tile,
                inside_pairs,
                SPLIT_STRIDE,
                PAIRS,
                HEAD_DIM,
                PADDED_DIM,
            )
