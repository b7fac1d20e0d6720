"""Decode attention: one query token a row over the paged KV cache, with the keys split over programs in one launch.

A program computes one piece of the plan (see `decode_plan`), which is a run of one row's keys, for one KV head and all
query heads that share it. So every key and value is loaded once. The grid follows from shapes alone, and a program
reads its piece from the plan: a launch can be captured in a CUDA graph.

In a speculative step the rows of a group, which belong to one sequence, are computed by one program too. Its lanes,
the columns of the products, are then the query heads of all these rows. So a group loads its keys once, as a single
row does. Groups with fewer rows leave lanes idle.

On Hopper the tensor memory accelerator loads whole tiles, and the keys are the left operand of the products, of which
tensor cores then compute 8 columns (query heads) instead of 16 rows. That needs less than half of the instructions and
a tenth less energy. Elsewhere, and for small batches, every key is loaded by its address.

Keys and values of float8_e4m3fn are multiplied in float16, in which they are exact and to which the hardware converts
two at a time. (It reaches bfloat16 only from there, one number after the other, which takes longer than loading them.)

Flash-Decoding (Dao, Haziza, Massa, Sizov 2023) over the pages of PagedAttention (Kwon et al. 2023).
"""

import math

import torch

from nanovllm.kernels.attention.decode_plan import (
    GROUP_PIECE_FIELDS,
    PIECE_FIELDS,
    SPLIT_UNIT,
    DecodeConfig,
    DecodeWorkspace,
    num_lanes,
)
from nanovllm.kernels.attention.paged_cache import check_layout, check_sinks, key_slots, load_blocks, load_sinks
from nanovllm.kernels.dependent_launch import CACHE_LINE, gdc_launch_dependents, gdc_wait, has_pdl, prefetch_lines
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.triton_stub import TensorDescriptor, tl, triton

_PIECE_FIELDS, _GROUP_PIECE_FIELDS = tl.constexpr(PIECE_FIELDS), tl.constexpr(GROUP_PIECE_FIELDS)


@triton.jit
def _prefetch_keys(
    k_ptr, v_ptr, table_ptr, first_key, end_key,
    TOKEN: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, LINE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Request the keys and values of one head into L2, in cache lines of LINE elements."""
    dims = tl.arange(0, PADDED_DIM // LINE) * LINE
    for start in range(first_key, end_key, TILE):
        keys = start + tl.arange(0, TILE)
        slots = key_slots(load_blocks(table_ptr, start, end_key, BLOCK_SIZE, TILE), start, BLOCK_SIZE, TILE)
        inside = (keys < end_key)[:, None] & (dims < HEAD_DIM)[None, :]
        # Past the end this requests the first line of the cache, which is harmless.
        lines = tl.where(inside, slots[:, None] * TOKEN + dims[None, :], 0)
        prefetch_lines(k_ptr + lines)
        prefetch_lines(v_ptr + lines)


@triton.jit
def _lane_heads(lanes, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr):
    """Which query head each lane computes, counted from the first lane's, over all rows of a group."""
    heads = lanes
    if GROUP_ROWS > 1:
        heads = lanes // GROUP * (NUM_KV_HEADS * GROUP) + lanes % GROUP
    return heads


@triton.jit
def _sees(lane_starts, lane_ends, keys, WINDOWED: tl.constexpr):
    """Whether each lane's row sees each key."""
    is_seen = keys < lane_ends
    if WINDOWED:
        is_seen = is_seen & (keys >= lane_starts)
    return is_seen


@triton.jit
def _finite_max(largest, GROUP_ROWS: tl.constexpr):
    """The largest score of each lane, to be subtracted from its scores. A row of a group may see none of the keys so
    far: then all are -inf, and 0 is subtracted instead of -inf, which would make NaN."""
    if GROUP_ROWS > 1:
        largest = tl.where(largest == float("-inf"), 0.0, largest)
    return largest


@triton.jit
def _combine(
    out_ptr, partial_ptr, lse_ptr, num_rows, num_splits, split_stride, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr, LANES: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Weigh the partial outputs of the splits by their softmax sums, always in the order of the splits."""
    lanes = tl.arange(0, LANES)
    dims = tl.arange(0, PADDED_DIM)
    is_lane = lanes < num_rows * GROUP
    heads = _lane_heads(lanes, NUM_KV_HEADS, GROUP, GROUP_ROWS)
    inside = is_lane[:, None] & (dims < HEAD_DIM)[None, :]
    tile = heads[:, None] * HEAD_DIM + dims[None, :]
    acc = tl.zeros([LANES, PADDED_DIM], dtype=tl.float32)
    total = tl.zeros([LANES], dtype=tl.float32)
    highest = tl.full([LANES], float("-inf"), dtype=tl.float32)
    for split in range(num_splits):
        first = split * split_stride
        # ".cg" bypasses L1, which does not see what other multiprocessors wrote.
        lse = tl.load(lse_ptr + first + heads, mask=is_lane, other=0.0, cache_modifier=".cg")
        partial = tl.load(partial_ptr + first * HEAD_DIM + tile, mask=inside, other=0.0, cache_modifier=".cg")
        new_highest = tl.maximum(highest, lse)
        subtrahend = _finite_max(new_highest, GROUP_ROWS)
        weight, shrink = tl.exp2(lse - subtrahend), tl.exp2(highest - subtrahend)
        acc = acc * shrink[:, None] + partial * weight[:, None]
        total = total * shrink + weight
        highest = new_highest
    tl.store(out_ptr + tile, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _finish_piece(
    out_ptr, partial_ptr, lse_ptr, arrivals_ptr,
    acc, lane_max, lane_sum, row, num_rows, kv_head, place, split, num_splits, NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, LANES: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
):  # fmt: skip
    """Store the result of a piece. If its row or group has several, leave it in the workspace and count this split. The
    program that counts last combines them, always in the same order, so equal launches give equal bits. (A second
    launch would cost a small batch as much as attention.)

    acc [LANES, PADDED_DIM]: of each lane the sum over the piece's keys of exp2(score - lane_max) * value;
    lane_sum [LANES]: the sum of these weights; lane_max: the largest score. Scores are in units of log2.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GROUP
    lanes = tl.arange(0, LANES)
    dims = tl.arange(0, PADDED_DIM)
    is_lane = lanes < num_rows * GROUP
    heads = _lane_heads(lanes, NUM_KV_HEADS, GROUP, GROUP_ROWS)
    inside = is_lane[:, None] & (dims < HEAD_DIM)[None, :]
    tile = heads[:, None] * HEAD_DIM + dims[None, :]
    # A padding row has no key, so acc and lane_sum are zero. Dividing by one keeps the zeros.
    acc = acc / tl.where(lane_sum > 0, lane_sum, 1.0)[:, None]
    out_ptr += (row * NUM_HEADS + kv_head * GROUP) * HEAD_DIM
    if num_splits == 1:
        tl.store(out_ptr + tile, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        # The results of all splits lie behind the place of the first one, each like the rows of the output.
        split_stride = num_rows * NUM_HEADS
        first_head = place * NUM_HEADS + kv_head * GROUP
        partial_ptr += first_head * HEAD_DIM
        lse_ptr += first_head
        own = split * split_stride
        if GROUP_ROWS > 1:
            lane_sum = tl.where(lane_sum > 0, lane_sum, 1.0)  # Then lane_max is -inf, and so is the logarithm.
        tl.store(partial_ptr + own * HEAD_DIM + tile, acc, mask=inside)
        tl.store(lse_ptr + own + heads, lane_max + tl.log2(lane_sum), mask=is_lane)
        # One thread does the atomic. It must not release the others' stores before they are made.
        tl.debug_barrier()
        arrivals_ptr += row * NUM_KV_HEADS + kv_head
        arrived = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel")
        if arrived == num_splits - 1:
            tl.store(arrivals_ptr, 0)  # for the next launch
            _combine(
                out_ptr, partial_ptr, lse_ptr, num_rows, num_splits, split_stride,
                NUM_KV_HEADS, GROUP, GROUP_ROWS, LANES, HEAD_DIM, PADDED_DIM,
            )  # fmt: skip


@triton.jit
def _to_float16(q):
    """(q times a power of two, in float16; the factor that undoes it). The largest number becomes less than 2**15, so
    none overflows, and others are exact down to 2**-31 of it."""
    q = q.to(tl.float32)
    # The exponent in the bits of float32. It counts as 2**-60 at least: scores of -inf must meet no factor of 0.
    exponent = tl.maximum(tl.max(tl.abs(q)).to(tl.int32, bitcast=True) >> 23, 127 - 60)
    factor = ((127 + 14 + 127 - exponent) << 23).to(tl.float32, bitcast=True)
    undo = ((exponent - 14) << 23).to(tl.float32, bitcast=True)
    return (q * factor).to(tl.float16), undo


@triton.jit
def _split_pairs(pairs):
    """For pairs of float8_e4m3fn, int16 `[M, N]`: the first and the second numbers, float16 `[M, N, 2]`. Not in
    Triton's interpreter."""
    # A register holds two pairs. Its bytes are sorted before they are converted: Triton would move each one alone.
    first, second = tl.inline_asm_elementwise(
        """{
        .reg .b32 sorted;
        .reg .b16 first, second;
        prmt.b32 sorted, $2, 0, 0x3120;
        mov.b32 {first, second}, sorted;
        cvt.rn.f16x2.e4m3x2 $0, first;
        cvt.rn.f16x2.e4m3x2 $1, second;
        }""",
        "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
    )  # fmt: skip
    return tl.join(first, second)


@triton.jit
def _transpose_values(v, dtype, PAIRS: tl.constexpr):
    """Values `[TILE, HEAD_DIM]` as `[HEAD_DIM, TILE]` of this dtype; with PAIRS of int16 `[TILE, HEAD_DIM // 2]`, and
    then all even dims before all odd ones. Loads from shared memory transpose elements of 16 bits, but not of 8."""
    if PAIRS:
        pairs = tl.trans(v)
        v = tl.reshape(tl.permute(_split_pairs(pairs), (2, 0, 1)), (2 * pairs.shape[0], pairs.shape[1])).to(dtype)
    else:
        v = tl.trans(v)
    return v


@triton.jit
def _attend(
    q, k, v, is_seen, acc, lane_max, lane_sum, scale_log2,
    GROUP_ROWS: tl.constexpr, MASK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys with keys as the left operand: q [HEAD_DIM, LANES], k [TILE, HEAD_DIM], v as in
    `_transpose_values`, acc [HEAD_DIM, LANES], lane_max and lane_sum [LANES]. With MASK only the keys of is_seen
    [TILE, LANES] or [TILE, 1] count; the values of others must be finite."""
    k, v = k.to(q.dtype), _transpose_values(v, q.dtype, PAIRS)
    scores = tl.dot(k, q, input_precision="ieee")
    if MASK:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(lane_max, tl.max(scores, 0) * scale_log2)
    subtrahend = _finite_max(new_max, GROUP_ROWS)
    weights = tl.exp2(scores * scale_log2 - subtrahend[None, :])
    shrink = tl.exp2(lane_max - subtrahend)
    lane_sum = lane_sum * shrink + tl.sum(weights, 0)
    # In float16 a weight is off by 2**-25 at most if it is small, while all weights add up to one or more.
    acc = tl.dot(v, weights.to(v.dtype), acc * shrink[None, :], input_precision="ieee")
    return acc, new_max, lane_sum


# The table's width follows the longest context. Specialising on it would compile the kernel again in mid-run.
@triton.jit(do_not_specialize=["table_stride"])
def _paged_decode_kernel(
    out_ptr, q_ptr, k_desc, v_desc, k_cache_ptr, v_cache_ptr, kv_scales_ptr, sinks_ptr, block_tables_ptr,
    plan_ptr, partial_ptr, lse_ptr, arrivals_ptr, q_stride, table_stride, scale_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, LANES: tl.constexpr,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    LINE: tl.constexpr, WINDOWED: tl.constexpr, PREFETCH: tl.constexpr, TMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    # KV heads vary fastest: the heads of a token are neighbours in memory and are best read at the same time.
    kv_head = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    piece_ptr = plan_ptr + item * (_PIECE_FIELDS if GROUP_ROWS == 1 else _GROUP_PIECE_FIELDS)
    row, split, num_splits = tl.load(piece_ptr).to(tl.int64), tl.load(piece_ptr + 1), tl.load(piece_ptr + 2)
    first_key, end_key = tl.load(piece_ptr + 3), tl.load(piece_ptr + 4)
    if row < 0:
        return
    lanes = tl.arange(0, LANES)
    if GROUP_ROWS == 1:
        # All splits of a row leave as many results, so the piece's own place in the plan serves.
        num_rows, place = 1, item - split
        lane_heads, lane_offsets = lanes, lanes * HEAD_DIM
    else:
        num_rows, place = tl.load(piece_ptr + 5), tl.load(piece_ptr + 6).to(tl.int64)
        lane_rows, lane_heads = lanes // GROUP, lanes % GROUP
        lane_offsets = lane_rows.to(tl.int64) * q_stride + lane_heads * HEAD_DIM
        # Of each row the first key that it sees and the one after the last. Idle lanes see what the last row sees.
        lane_rows = tl.minimum(lane_rows, num_rows - 1)
        lane_ends, lane_starts = tl.load(piece_ptr + 7) + lane_rows, tl.load(piece_ptr + 8) + lane_rows
    is_lane = lanes < num_rows * GROUP
    TOKEN: tl.constexpr = NUM_KV_HEADS * HEAD_DIM  # elements of the cache
    table_ptr = block_tables_ptr + row * table_stride
    # Then the values' cache is one of int16, of two numbers each.
    PAIRS: tl.constexpr = TMA and kv_scales_ptr is not None
    V_PACK: tl.constexpr = 2 if PAIRS else 1
    k_ptr = k_cache_ptr + kv_head * HEAD_DIM
    v_ptr = v_cache_ptr + kv_head * (HEAD_DIM // V_PACK)
    if kv_scales_ptr is not None:
        scale_log2 *= tl.load(kv_scales_ptr + kv_head)
    start_key = first_key
    if WINDOWED:
        start_key = first_key // TILE * TILE  # Only the keys from first_key on count.
    # The accelerator does not know where a sequence ends, so it loads no keys from `rest` on.
    rest = start_key + (end_key - start_key) // TILE * TILE
    # A tile's block is looked up a tile ahead. A load that waited for the look-up would cost a pipeline stage.
    blocks = load_blocks(table_ptr, start_key, end_key, BLOCK_SIZE, TILE)
    if TMA:
        rest_blocks = load_blocks(table_ptr, rest, end_key, BLOCK_SIZE, TILE)
    if PDL:
        if PREFETCH:
            _prefetch_keys(
                k_ptr, v_ptr, table_ptr, start_key, end_key, TOKEN, HEAD_DIM, PADDED_DIM, LINE, BLOCK_SIZE, TILE
            )
        gdc_wait()

    dims = tl.arange(0, PADDED_DIM)
    inside_dims = dims < HEAD_DIM
    IN_FLOAT16: tl.constexpr = kv_scales_ptr is not None and q_ptr.dtype.element_ty == tl.bfloat16
    q_row = q_ptr + row * q_stride + kv_head * GROUP * HEAD_DIM
    lane_max = tl.full([LANES], float("-inf"), dtype=tl.float32)
    lane_sum = tl.zeros([LANES], dtype=tl.float32)
    if sinks_ptr is not None:  # noqa: SIM102 (is known when the kernel is compiled)
        if split == 0:
            lane_max = load_sinks(sinks_ptr, kv_head * GROUP + lane_heads, is_lane)
            lane_sum += 1.0
    # Values are masked as well as keys: a slot past the end may hold NaN, and 0 * NaN is not 0.
    if TMA:
        q = tl.load(q_row + lane_offsets[None, :] + dims[:, None], mask=is_lane[None, :], other=0.0)
        if IN_FLOAT16:
            q, undo = _to_float16(q)
            scale_log2 *= undo
        keys = rest + tl.arange(0, TILE)
        is_key = keys < end_key
        if WINDOWED:
            is_key &= keys >= first_key
        slots = key_slots(rest_blocks, rest, BLOCK_SIZE, TILE)[:, None]
        v_dims = tl.arange(0, PADDED_DIM // V_PACK)
        k_rest = tl.load(k_ptr + (slots * TOKEN + dims[None, :]), mask=is_key[:, None], other=0.0)
        v_rest = tl.load(v_ptr + (slots * (TOKEN // V_PACK) + v_dims[None, :]), mask=is_key[:, None], other=0.0)
        acc = tl.zeros([PADDED_DIM, LANES], dtype=tl.float32)
        for start in range(start_key, rest, TILE):
            slot = blocks * BLOCK_SIZE + start % BLOCK_SIZE
            blocks = load_blocks(table_ptr, start + TILE, end_key, BLOCK_SIZE, TILE)
            k = k_desc.load([slot, kv_head * HEAD_DIM])
            v = v_desc.load([slot, kv_head * (HEAD_DIM // V_PACK)])
            keys_of_tile = (start + tl.arange(0, TILE))[:, None]
            if GROUP_ROWS == 1:
                is_seen = keys_of_tile >= first_key
            else:
                is_seen = _sees(lane_starts[None, :], lane_ends[None, :], keys_of_tile, WINDOWED)
            acc, lane_max, lane_sum = _attend(
                q, k, v, is_seen, acc, lane_max, lane_sum, scale_log2,
                GROUP_ROWS=GROUP_ROWS, MASK=WINDOWED or GROUP_ROWS > 1, PAIRS=PAIRS,
            )  # fmt: skip
        if rest < end_key:
            is_seen = is_key[:, None]
            if GROUP_ROWS > 1:
                is_seen = is_seen & _sees(lane_starts[None, :], lane_ends[None, :], keys[:, None], WINDOWED)
            acc, lane_max, lane_sum = _attend(
                q, k_rest, v_rest, is_seen, acc, lane_max, lane_sum, scale_log2,
                GROUP_ROWS=GROUP_ROWS, MASK=True, PAIRS=PAIRS,
            )  # fmt: skip
        acc = tl.trans(acc)
        if PAIRS:
            acc = tl.permute(tl.reshape(acc, (LANES, 2, PADDED_DIM // 2)), (0, 2, 1))
            acc = tl.reshape(acc, (LANES, PADDED_DIM))
    else:
        inside_q = is_lane[:, None] & inside_dims[None, :]
        q = tl.load(q_row + lane_offsets[:, None] + dims[None, :], mask=inside_q, other=0.0)
        if IN_FLOAT16:
            q, undo = _to_float16(q)
            scale_log2 *= undo
        acc = tl.zeros([LANES, PADDED_DIM], dtype=tl.float32)
        for start in range(start_key, end_key, TILE):
            keys = start + tl.arange(0, TILE)
            owned = keys < end_key
            if WINDOWED:
                owned &= keys >= first_key
            tile = key_slots(blocks, start, BLOCK_SIZE, TILE)[:, None] * TOKEN + dims[None, :]
            blocks = load_blocks(table_ptr, start + TILE, end_key, BLOCK_SIZE, TILE)
            inside = owned[:, None] & inside_dims[None, :]
            k = tl.load(k_ptr + tile, mask=inside, other=0.0)
            v = tl.load(v_ptr + tile, mask=inside, other=0.0)
            k, v = k.to(q.dtype), v.to(q.dtype)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            is_seen = owned[None, :]
            if GROUP_ROWS > 1:
                is_seen = is_seen & _sees(lane_starts[:, None], lane_ends[:, None], keys[None, :], WINDOWED)
            scores = tl.where(is_seen, scores, float("-inf"))
            new_max = tl.maximum(lane_max, tl.max(scores, 1) * scale_log2)
            subtrahend = _finite_max(new_max, GROUP_ROWS)
            weights = tl.exp2(scores * scale_log2 - subtrahend[:, None])
            shrink = tl.exp2(lane_max - subtrahend)
            lane_sum = lane_sum * shrink + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            lane_max = new_max

    if kv_scales_ptr is not None:
        acc *= tl.load(kv_scales_ptr + NUM_KV_HEADS + kv_head)
    _finish_piece(
        out_ptr, partial_ptr, lse_ptr, arrivals_ptr, acc, lane_max, lane_sum, row, num_rows, kv_head, place, split,
        num_splits, NUM_KV_HEADS, GROUP, GROUP_ROWS, LANES, HEAD_DIM, PADDED_DIM,
    )  # fmt: skip


def paged_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    plan: torch.Tensor,
    workspace: DecodeWorkspace,
    config: DecodeConfig,
    pdl: bool = False,
    windowed: bool = False,
    kv_scales: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    group_rows: int = 1,
) -> torch.Tensor:
    """Attention of each row's token to the keys of its plan. `paged_cache` describes the arguments that are not
    described here.

    A row is a sequence's newest token, or in a mixed step any token of a prompt. The result of a padding row is zeros.

    Args:
        plan: int32 `[num_pieces, PIECE_FIELDS]`, contiguous, made for the rows' context lengths (see `decode_plan`).
        workspace: memory that the splits share.
        config: launch constants; with `tma` only where `has_tma`.
        pdl: programmatic dependent launch (see `dependent_launch`). The plan, block_tables and kv_scales are read
            before the wait, as sinks may be.
        windowed: whether the plan was made for a window, whose pieces may begin inside a tile.
        group_rows: more than 1 for a plan of groups, int32 `[num_pieces, GROUP_PIECE_FIELDS]`, which have at most this
            many rows, neighbours with the same block table. The values of all keys of a group must be finite: a row
            multiplies those of later rows by zero.

    Raises ValueError also for too small a workspace, or another layout of the plan.
    """
    check_layout(q, k_cache, v_cache, True, kv_scales)
    check_sinks(sinks, q.shape[1])
    (batch_size, num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, k_cache.shape
    out = torch.empty((batch_size, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if batch_size == 0:
        return out
    num_fields = PIECE_FIELDS if group_rows == 1 else GROUP_PIECE_FIELDS
    if plan.dtype != torch.int32 or plan.shape[1:] != (num_fields,) or not plan.is_contiguous():
        raise ValueError(
            f"plan must be a contiguous int32 [num_pieces, {num_fields}], not {list(plan.shape)} {plan.dtype} with "
            f"strides {plan.stride()}"
        )
    workspace.check_room(batch_size, num_heads, num_kv_heads, head_dim, len(plan), group_rows)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    if config.tma and kv_scales is not None:
        v_cache = v_cache.view(torch.int16)
    k_desc, v_desc = descriptors_of(k_cache, v_cache, config.tile) if config.tma else (None, None)
    group = num_heads // num_kv_heads
    launcher(_paged_decode_kernel, (num_kv_heads, len(plan)), pdl and has_pdl(q.device))(
        out, q, k_desc, v_desc, k_cache, v_cache, kv_scales, sinks, block_tables, plan,
        workspace.partial, workspace.lse, workspace.arrivals,
        q.stride(0), block_tables.stride(0), scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, GROUP_ROWS=group_rows,
        LANES=num_lanes(group * group_rows, config.tma),
        HEAD_DIM=head_dim, PADDED_DIM=padded_dim, BLOCK_SIZE=block_size, TILE=config.tile,
        LINE=min(padded_dim, CACHE_LINE // k_cache.element_size()),
        WINDOWED=windowed, PREFETCH=config.prefetch, TMA=config.tma,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def has_tma(head_dim: int, block_size: int, itemsize: int, device: torch.device) -> bool:
    """Whether Hopper's tensor memory accelerator can be used: in half precision, for the head_dims that it was
    measured with."""
    fits = itemsize == 2 and head_dim in (64, 128) and block_size >= SPLIT_UNIT
    return fits and GpuFacts.of(device).is_hopper


def descriptors_of(k_cache: torch.Tensor, v_cache: torch.Tensor, tile: int) -> tuple:
    """What the tensor memory accelerator has to know of the caches: tiles of `tile` keys of one head. Raises ValueError
    unless head_dim is a power of two and a tile a part of a block."""
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    if head_dim & (head_dim - 1) or tile > block_size:
        raise ValueError(
            f"the tensor memory accelerator reads heads of a power of two, not head_dim {head_dim}, in blocks of no "
            f"less than a tile of {tile} keys, not {block_size}"
        )
    caches = k_cache.flatten(2).flatten(0, 1), v_cache.flatten(2).flatten(0, 1)
    return tuple(TensorDescriptor.from_tensor(cache, [tile, cache.shape[1] // num_kv_heads]) for cache in caches)
