"""Prefill attention for heads of 64 to 512 on Hopper, whose warps share the work by kind.

`paged_prefill` gives all warps the same work, so tensor cores wait while weights are computed, and wide heads leave no
registers and shared memory to hide that. Here one warp does nothing but ask for tiles of keys and values, by the
tensor memory accelerator. Two or three groups of four warps take them: a group asks for the scores of the next keys
before it adds the values of the last ones, and another computes weights meanwhile, as in FlashAttention-3 (Shah et al.
2024).

Each group has 64 rows. Heads of 512: both groups have the same 64 rows and one half of the results each, for no more
fit the registers. Both compute the scores, since sharing them would cost more than half of the keys' products. Heads of
64 and 128: a multiprocessor has one program, which takes unit of work after unit, so that a group of warps, or the warp
that loads, begins the next while others end the last.

It is written in Gluon, for Triton's own compiler gives all warps the same work. Triton's interpreter doesn't run it.
"""

import math
from typing import NamedTuple

from torch import Tensor

from nanovllm.kernels.gluon_stub import (
    HAS_GLUON,
    SharedDescriptor,
    async_load,
    barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.shared_memory import fits
from nanovllm.kernels.triton_stub import triton

_ROWS = gl.constexpr(64)  # of a group's tile


@gluon.jit
def _extent(
    work, cu_seqlens_q, cu_seqlens_k, num_row_tiles, num_seqs, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    TILE_ROWS: gl.constexpr, KEYS: gl.constexpr, WINDOW: gl.constexpr, PERSISTENT: gl.constexpr,
):  # fmt: skip
    """What a unit of work reads: the sequence, the KV head, the first of its rows, the first token and the number of
    its sequence's queries, the same of the sequence's keys, the first of these that a row attends to, and how many
    tiles of keys. A row is one query of one of the GROUP heads that share a KV head, so that a short chunk fills its
    tile."""
    # The last rows have the most keys. They start first, so that short units even out the end.
    if PERSISTENT:  # Each program gets long and short ones.
        kv_head = work % NUM_KV_HEADS
        seq = work // NUM_KV_HEADS % num_seqs
        tile = work // (NUM_KV_HEADS * num_seqs)
    else:
        # Units that read the same keys are neighbours, so that these stay in L2.
        tile = work % num_row_tiles
        kv_head = work // num_row_tiles % NUM_KV_HEADS
        seq = work // (num_row_tiles * NUM_KV_HEADS)
    q_start = gl.load(cu_seqlens_q + seq)
    len_q = gl.load(cu_seqlens_q + seq + 1) - q_start
    k_start = gl.load(cu_seqlens_k + seq)
    len_k = gl.load(cu_seqlens_k + seq + 1) - k_start
    first_row = (num_row_tiles - 1 - tile) * TILE_ROWS
    last_query = gl.minimum((first_row + TILE_ROWS - 1) // GROUP, len_q - 1)
    end_key = gl.where(first_row < len_q * GROUP, len_k - len_q + last_query + 1, 0)
    first_key = 0
    if WINDOW is not None:
        first_key = gl.maximum(len_k - len_q + first_row // GROUP - WINDOW + 1, 0) // KEYS * KEYS
    num_tiles = gl.cdiv(gl.maximum(end_key - first_key, 0), KEYS)
    return seq, kv_head, first_row, q_start, len_q, k_start, len_k, first_key, num_tiles


@gluon.jit
def _load_chunks(
    source, row, kv_head, ring, full, empty, chunk, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Ask for a tile of keys or values, which begin at a row of the source."""
    PARTS: gl.constexpr = HEAD_DIM // WIDTH
    for part in gl.static_range(PARTS):
        stage = (chunk + part) % STAGES
        mbarrier.wait(empty.index(stage), ((chunk + part) // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), KEYS * WIDTH * 2)
        async_load(source, [row, kv_head * HEAD_DIM + part * WIDTH], full.index(stage), ring.index(stage))
    return chunk + PARTS


@gluon.jit
def _load_unit(
    work, chunk, k, v, ring, full, empty, cu_seqlens_q, cu_seqlens_k, block_tables, table_stride, num_row_tiles,
    num_seqs, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_ROWS: gl.constexpr,
    KEYS: gl.constexpr, WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
    PERSISTENT: gl.constexpr,
):  # fmt: skip
    """chunk: the first that it asks for. Returns the first of the next unit."""
    seq, kv_head, _first_row, _q_start, _len_q, k_start, _len_k, first_key, num_tiles = _extent(
        work, cu_seqlens_q, cu_seqlens_k, num_row_tiles, num_seqs, NUM_KV_HEADS, GROUP, TILE_ROWS, KEYS, WINDOW,
        PERSISTENT,
    )  # fmt: skip
    last_row = 0
    for tile in range(num_tiles):
        key = first_key + tile * KEYS
        if block_tables is not None:
            block = gl.load(block_tables + seq.to(gl.int64) * table_stride + key // BLOCK_SIZE)
            row = block * BLOCK_SIZE + key % BLOCK_SIZE
        else:
            row = k_start + key
        chunk = _load_chunks(k, row, kv_head, ring, full, empty, chunk, HEAD_DIM, KEYS, WIDTH, STAGES)
        if tile > 0:
            chunk = _load_chunks(v, last_row, kv_head, ring, full, empty, chunk, HEAD_DIM, KEYS, WIDTH, STAGES)
        last_row = row
    if num_tiles > 0:
        chunk = _load_chunks(v, last_row, kv_head, ring, full, empty, chunk, HEAD_DIM, KEYS, WIDTH, STAGES)
    return chunk


@gluon.jit
def _load_tiles(
    k, v, ring, full, empty, cu_seqlens_q, cu_seqlens_k, block_tables, table_stride, num_row_tiles, num_seqs,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILE_ROWS: gl.constexpr,
    KEYS: gl.constexpr, WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
    PERSISTENT: gl.constexpr,
):  # fmt: skip
    """What the warp does that asks for tiles."""
    if PERSISTENT:
        chunk = 0
        for work in range(gl.program_id(0), num_row_tiles * num_seqs * NUM_KV_HEADS, gl.num_programs(0)):
            chunk = _load_unit(
                work, chunk, k, v, ring, full, empty, cu_seqlens_q, cu_seqlens_k, block_tables, table_stride,
                num_row_tiles, num_seqs, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, KEYS, WIDTH, BLOCK_SIZE, WINDOW,
                STAGES, PERSISTENT,
            )  # fmt: skip
    else:
        _load_unit(
            gl.program_id(0), gl.to_tensor(0), k, v, ring, full, empty, cu_seqlens_q, cu_seqlens_k, block_tables,
            table_stride, num_row_tiles, num_seqs, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, KEYS, WIDTH, BLOCK_SIZE,
            WINDOW, STAGES, PERSISTENT,
        )  # fmt: skip


@gluon.jit
def _ask_for_scores(
    queries, ring, full, chunk, FIRST: gl.constexpr, PARTS: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    scores = gl.zeros([_ROWS, KEYS], gl.float32, layout)
    for part in gl.static_range(PARTS):
        stage = (chunk + part) % STAGES
        mbarrier.wait(full.index(stage), (chunk + part) // STAGES & 1)
        of_part = queries.index(FIRST + part)
        keys = ring.index(stage).permute((1, 0))
        scores = warpgroup_mma(of_part, keys, scores, use_acc=part > 0, is_async=True)
    return scores


@gluon.jit
def _give_back(empty, chunk, PARTS: gl.constexpr, STAGES: gl.constexpr):
    for part in gl.static_range(PARTS):
        mbarrier.arrive(empty.index((chunk + part) % STAGES), count=1)


@gluon.jit
def _await_values(full, chunk, GROUP_OF_WARPS: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr):
    """The stage of this group's half. It also waits for the other half, so as not to give that back before it came."""
    for part in gl.static_range(PARTS):
        mbarrier.wait(full.index((chunk + part) % STAGES), (chunk + part) // STAGES & 1)
    return (chunk + (GROUP_OF_WARPS if PARTS == 2 else 0)) % STAGES


@gluon.jit
def _weigh(
    scores, row_max, row_sum, positions, first_position, last_position, key, scale_log2, KEYS: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """The next step of the running softmax: weights, the largest score and the sum of each row, and what the results
    until now are multiplied by."""
    cut = key + KEYS > first_position + 1
    if WINDOW is not None:
        cut = cut | (key <= last_position - WINDOW)
    if cut:  # by the diagonal, the end of the keys or a window's start
        keys = gl.expand_dims(key + gl.arange(0, KEYS, gl.SliceLayout(0, scores.type.layout)), 0)
        of_row = gl.expand_dims(positions, 1)
        is_seen = keys <= of_row
        if WINDOW is not None:
            is_seen = is_seen & (keys > of_row - WINDOW)
        scores = gl.where(is_seen, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    base = new_max
    if WINDOW is not None:
        # A row may have seen no key yet, and the difference of infinities is NaN.
        base = gl.where(new_max > float("-inf"), new_max, 0.0)
    weights = gl.exp2(scores * scale_log2 - gl.expand_dims(base, 1))
    shrink = gl.exp2(row_max - base)
    return weights, new_max, row_sum * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _clear_end(values, count, KEYS: gl.constexpr, layout: gl.constexpr):
    """Overwrite the values from `count` on: they may be NaN, and 0 * NaN is not 0."""
    for first in gl.static_range(0, KEYS, 16):
        part = values.slice(first, 16)
        is_value = gl.expand_dims(first + gl.arange(0, 16, gl.SliceLayout(1, layout)) < count, 1)
        part.store(gl.where(is_value, part.load(layout), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _row_offsets(
    first_row, q_start, stride, kv_head, FIRST_DIM: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    WIDTH: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Of a group's rows in a tensor of heads `[64, WIDTH]`, and their queries."""
    rows = first_row + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    tokens = (q_start + rows // GROUP).to(gl.int64)
    of_row = tokens * stride + (kv_head * GROUP + rows % GROUP) * HEAD_DIM
    dims = FIRST_DIM + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    return gl.expand_dims(of_row, 1) + gl.expand_dims(dims, 0), gl.expand_dims(rows // GROUP, 1)


@gluon.jit
def _attend_unit(
    work, chunk, q, out, sinks, queries, ring, full, empty, loaded, read, cu_seqlens_q, cu_seqlens_k, q_stride,
    num_row_tiles, num_seqs, scale_log2,
    GROUP_OF_WARPS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    TILE_ROWS: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
    PERSISTENT: gl.constexpr,
):  # fmt: skip
    """chunk: the first that it takes. Returns the first of the next unit."""
    PARTS: gl.constexpr = HEAD_DIM // WIDTH
    # The chunk of queries that its scores begin with, and the first dimension of its results.
    FIRST: gl.constexpr = GROUP_OF_WARPS if PARTS == 1 else 0
    FIRST_DIM: gl.constexpr = GROUP_OF_WARPS * WIDTH if PARTS == 2 else 0
    FIRST_ROW: gl.constexpr = GROUP_OF_WARPS * 64 if PARTS == 1 else 0
    dtype: gl.constexpr = ring.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    of_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    in_lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    _seq, kv_head, first_row, q_start, len_q, _k_start, len_k, first_key, num_tiles = _extent(
        work, cu_seqlens_q, cu_seqlens_k, num_row_tiles, num_seqs, NUM_KV_HEADS, GROUP, TILE_ROWS, KEYS, WINDOW,
        PERSISTENT,
    )  # fmt: skip
    first_row += FIRST_ROW
    if num_tiles > 0:
        offsets, of_query = _row_offsets(
            first_row, q_start, q_stride, kv_head, FIRST_DIM, GROUP, HEAD_DIM, WIDTH, in_lines
        )
        barrier()  # The last unit's results have left the queries' place.
        queries.index(GROUP_OF_WARPS).store(gl.load(q + offsets, mask=of_query < len_q, other=0.0))
        fence_async_shared()
        barrier()
        if PARTS == 2:
            mbarrier.arrive(loaded, count=1)
            mbarrier.wait(loaded, 0)

        # Query i of a sequence is at position len_k - len_q + i and attends to the keys up to its own. A row after
        # the last query must see a key too.
        rows = first_row + gl.arange(0, _ROWS, gl.SliceLayout(1, scores_layout))
        positions = gl.minimum(len_k - len_q + rows // GROUP, len_k - 1)
        first_position = gl.minimum(len_k - len_q + first_row // GROUP, len_k - 1)
        last_position = gl.minimum(len_k - len_q + (first_row + _ROWS - 1) // GROUP, len_k - 1)
        if sinks is not None:
            heads = kv_head * GROUP + rows % GROUP
            row_max = gl.load(sinks + heads).to(gl.float32) * 1.4426950408889634
            row_sum = gl.full([_ROWS], 1.0, gl.float32, gl.SliceLayout(1, scores_layout))
        else:
            row_max = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores_layout))
            row_sum = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, scores_layout))
        acc = gl.zeros([_ROWS, WIDTH], gl.float32, acc_layout)

        asked = _ask_for_scores(queries, ring, full, chunk, FIRST, PARTS, KEYS, STAGES)
        scores = warpgroup_mma_wait(0, deps=[asked])
        _give_back(empty, chunk, PARTS, STAGES)
        chunk += PARTS
        weights, row_max, row_sum, _shrink = _weigh(
            scores, row_max, row_sum, positions, first_position, last_position, first_key, scale_log2, KEYS, WINDOW
        )
        rounded = gl.convert_layout(weights.to(dtype), operand)
        for tile in range(1, num_tiles):
            asked = _ask_for_scores(queries, ring, full, chunk, FIRST, PARTS, KEYS, STAGES)
            of_values = _await_values(full, chunk + PARTS, GROUP_OF_WARPS, PARTS, STAGES)
            adding = warpgroup_mma(rounded, ring.index(of_values), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[asked])
            _give_back(empty, chunk, PARTS, STAGES)
            weights, row_max, row_sum, shrink = _weigh(
                scores, row_max, row_sum, positions, first_position, last_position, first_key + tile * KEYS,
                scale_log2, KEYS, WINDOW,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=[adding])
            _give_back(empty, chunk + PARTS, PARTS, STAGES)
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, of_row), 1)
            rounded = gl.convert_layout(weights.to(dtype), operand)
            chunk += 2 * PARTS
        of_values = _await_values(full, chunk, GROUP_OF_WARPS, PARTS, STAGES)
        count = len_k - first_key - (num_tiles - 1) * KEYS
        if count < KEYS:
            _clear_end(ring.index(of_values), count, KEYS, in_lines)
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(rounded, ring.index(of_values), acc, is_async=True)])
        _give_back(empty, chunk, PARTS, STAGES)
        chunk += PARTS

        acc = acc / gl.expand_dims(gl.convert_layout(row_sum, of_row), 1)
        # Through the queries' place, so that a warp writes whole lines.
        barrier()
        if PARTS == 2:
            mbarrier.arrive(read, count=1)
            mbarrier.wait(read, 0)
        queries.index(GROUP_OF_WARPS).store(acc.to(dtype))
        barrier()
        offsets, of_query = _row_offsets(
            first_row, q_start, NUM_KV_HEADS * GROUP * HEAD_DIM, kv_head, FIRST_DIM, GROUP, HEAD_DIM, WIDTH,
            in_lines,
        )  # fmt: skip
        gl.store(out + offsets, queries.index(GROUP_OF_WARPS).load(in_lines), mask=of_query < len_q)
    return chunk


@gluon.jit
def _attend(
    q, out, sinks, queries, ring, full, empty, loaded, read, cu_seqlens_q, cu_seqlens_k, q_stride, num_row_tiles,
    num_seqs, scale_log2,
    GROUP_OF_WARPS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    TILE_ROWS: gl.constexpr, KEYS: gl.constexpr, WIDTH: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
    PERSISTENT: gl.constexpr,
):  # fmt: skip
    """What each of the groups of four warps does."""
    if PERSISTENT:
        chunk = 0
        for work in range(gl.program_id(0), num_row_tiles * num_seqs * NUM_KV_HEADS, gl.num_programs(0)):
            chunk = _attend_unit(
                work, chunk, q, out, sinks, queries, ring, full, empty, loaded, read, cu_seqlens_q, cu_seqlens_k,
                q_stride, num_row_tiles, num_seqs, scale_log2, GROUP_OF_WARPS, NUM_KV_HEADS, GROUP, HEAD_DIM,
                TILE_ROWS, KEYS, WIDTH, WINDOW, STAGES, PERSISTENT,
            )  # fmt: skip
    else:
        _attend_unit(
            gl.program_id(0), gl.to_tensor(0), q, out, sinks, queries, ring, full, empty, loaded, read, cu_seqlens_q,
            cu_seqlens_k, q_stride, num_row_tiles, num_seqs, scale_log2, GROUP_OF_WARPS, NUM_KV_HEADS, GROUP, HEAD_DIM,
            TILE_ROWS, KEYS, WIDTH, WINDOW, STAGES, PERSISTENT,
        )  # fmt: skip


# The table's width changes from step to step. Specialising on it would compile the kernel again in mid-run.
@gluon.jit(do_not_specialize=["table_stride", "num_row_tiles", "num_seqs"])
def _hopper_prefill_kernel(
    out, q, k, v, cu_seqlens_q, cu_seqlens_k, block_tables, sinks, q_stride, table_stride, num_row_tiles, num_seqs,
    scale_log2, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, KEYS: gl.constexpr,
    WIDTH: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    PERSISTENT: gl.constexpr,
):  # fmt: skip
    """k, v: descriptors of `[keys, heads * HEAD_DIM]`."""
    TILE_ROWS: gl.constexpr = GROUPS * 64 if HEAD_DIM == WIDTH else 64
    of_rows: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    queries = gl.allocate_shared_memory(k.dtype, [GROUPS, _ROWS, WIDTH], of_rows)
    ring = gl.allocate_shared_memory(k.dtype, [STAGES, KEYS, WIDTH], k.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=GROUPS)
    mbarrier.init(loaded, count=2)
    mbarrier.init(read, count=2)
    fence_async_shared()
    if GROUPS == 2:
        gl.warp_specialize([
            (_attend, (q, out, sinks, queries, ring, full, empty, loaded, read, cu_seqlens_q, cu_seqlens_k, q_stride,
                       num_row_tiles, num_seqs, scale_log2, 0, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, KEYS, WIDTH,
                       WINDOW, STAGES, PERSISTENT)),
            (_attend, (q, out, sinks, queries, ring, full, empty, loaded, read, cu_seqlens_q, cu_seqlens_k, q_stride,
                       num_row_tiles, num_seqs, scale_log2, 1, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, KEYS, WIDTH,
                       WINDOW, STAGES, PERSISTENT)),
            (_load_tiles, (k, v, ring, full, empty, cu_seqlens_q, cu_seqlens_k, block_tables, table_stride,
                           num_row_tiles, num_seqs, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, KEYS, WIDTH, BLOCK_SIZE,
                           WINDOW, STAGES, PERSISTENT)),
        ], [4, 1], [240, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (q, out, sinks, queries, ring, full, empty, loaded, read, cu_seqlens_q, cu_seqlens_k, q_stride,
                       num_row_tiles, num_seqs, scale_log2, 0, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, KEYS, WIDTH,
                       WINDOW, STAGES, PERSISTENT)),
            (_attend, (q, out, sinks, queries, ring, full, empty, loaded, read, cu_seqlens_q, cu_seqlens_k, q_stride,
                       num_row_tiles, num_seqs, scale_log2, 1, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, KEYS, WIDTH,
                       WINDOW, STAGES, PERSISTENT)),
            (_attend, (q, out, sinks, queries, ring, full, empty, loaded, read, cu_seqlens_q, cu_seqlens_k, q_stride,
                       num_row_tiles, num_seqs, scale_log2, 2, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, KEYS, WIDTH,
                       WINDOW, STAGES, PERSISTENT)),
            (_load_tiles, (k, v, ring, full, empty, cu_seqlens_q, cu_seqlens_k, block_tables, table_stride,
                           num_row_tiles, num_seqs, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, KEYS, WIDTH, BLOCK_SIZE,
                           WINDOW, STAGES, PERSISTENT)),
        ], [4, 4, 1], [160, 160, 24])  # fmt: skip


class HopperTiles(NamedTuple):
    """Launch constants, as they were measured to be the fastest."""

    keys: int  # of a tile
    stages: int  # tiles of keys or values in flight; of heads of 512, halves of them
    groups: int  # of four warps that multiply
    persistent: bool

    def shared_bytes(self, head_dim: int) -> int:
        """Of the queries, and of the stages."""
        return (self.groups * 64 + self.stages * self.keys) * min(256, head_dim) * 2

    @property
    def registers(self) -> int:
        """Of a thread at the start: a program's warps count as a multiple of four, and share all."""
        return 65536 // (128 * (self.groups + 1)) // 8 * 8


# Of heads of 128: queries of the longest sequence, and query heads of a KV head. With fewer queries `paged_prefill` is
# as fast or faster. With two query heads this kernel is a fifth faster alone, but no whole prefill has shown that yet.
_FEWEST_QUERIES, _FEWEST_HEADS = 128, 4


def choose_hopper_tiles(head_dim: int, max_seqlen_q: int, block_size: int | None) -> HopperTiles:
    """block_size: of keys in a cache; None: packed keys."""
    if head_dim > 128:
        return HopperTiles(64, 5, 2, False)
    if head_dim == 64:
        return HopperTiles(64, 12, 3, True)
    # Large tiles are wasted on the few keys of short prompts.
    if max_seqlen_q >= 512 if block_size is None else block_size >= 128:
        return HopperTiles(128, 6, 2, True)
    return HopperTiles(64, 10, 2, True)


def can_attend(q: Tensor, keys: Tensor, values: Tensor, max_seqlen_q: int, paged: bool) -> bool:
    """Whether `hopper_prefill` takes these tensors of `paged_prefill`, and pays: 16 bits, heads of 64, 128, 256 or 512,
    on Hopper. Blocks of a cache have 64 keys at least. The accelerator wants addresses and strides in units of 16
    bytes."""
    head_dim = q.shape[-1]
    if not HAS_GLUON or head_dim not in (64, 128, 256, 512) or not GpuFacts.of(q.device).is_hopper:
        return False
    block_size = keys.shape[1] if paged else None
    tiles = choose_hopper_tiles(head_dim, max_seqlen_q, block_size)
    are_16_bits = q.element_size() == 2 and keys.dtype == q.dtype
    in_blocks = block_size is None or block_size >= 64
    aligned = all(each.data_ptr() % 16 == 0 and each.stride(-3) % 8 == 0 for each in (keys, values))
    group = q.shape[1] // keys.shape[-2]
    pays = head_dim != 128 or (max_seqlen_q >= _FEWEST_QUERIES and group >= _FEWEST_HEADS)
    return fits(tiles.shared_bytes(head_dim), q.device) and are_16_bits and in_blocks and aligned and pays


def hopper_prefill(
    out: Tensor,
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    block_tables: Tensor | None,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> None:
    """What `paged_prefill` computes, to out, `[total_q, num_heads, head_dim]`. keys, values: packed or the caches, that
    `can_attend` is True of. Other arguments are those of `paged_prefill`."""
    (_, num_heads, head_dim), num_kv_heads = q.shape, keys.shape[-2]
    group, width = num_heads // num_kv_heads, min(256, head_dim)
    table_stride, block_size = (0, None) if block_tables is None else (block_tables.stride(0), keys.shape[1])
    tiles = choose_hopper_tiles(head_dim, max_seqlen_q, block_size)
    tile_rows = 64 if head_dim > width else 64 * tiles.groups
    num_row_tiles, num_seqs = triton.cdiv(max_seqlen_q * group, tile_rows), cu_seqlens_q.numel() - 1
    num_programs = num_units = num_row_tiles * num_seqs * num_kv_heads
    if tiles.persistent:
        num_programs = min(num_units, GpuFacts.of(q.device).num_multiprocessors)
    launcher(_hopper_prefill_kernel, (num_programs,))(
        out, q, _descriptor(keys, tiles.keys, width), _descriptor(values, tiles.keys, width), cu_seqlens_q,
        cu_seqlens_k, block_tables, sinks, q.stride(0), table_stride, num_row_tiles, num_seqs,
        scale * math.log2(math.e), NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, KEYS=tiles.keys,
        WIDTH=width, BLOCK_SIZE=block_size or tiles.keys, WINDOW=window, STAGES=tiles.stages, GROUPS=tiles.groups,
        PERSISTENT=tiles.persistent, num_warps=4, maxnreg=tiles.registers,
    )  # fmt: skip


def _descriptor(tensor: Tensor, tile_keys: int, width: int):
    """Of tiles of packed keys or values, or of a cache's."""
    rows = tensor.flatten(0, 1) if tensor.dim() == 4 else tensor
    layout = gl.NVMMASharedLayout(128, 16, rank=2)
    return SharedDescriptor.from_tensor(rows.flatten(1), [tile_keys, width], layout)
