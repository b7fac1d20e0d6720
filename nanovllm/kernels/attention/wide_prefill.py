"""Prefill attention for heads of 256 and 512 on Hopper, whose warps share the work by kind.

`paged_prefill` gives all warps the same work, so tensor cores wait while weights are computed, and wide heads leave no
registers and shared memory to hide that. Here one warp does nothing but ask for tiles of keys and values, by the
tensor memory accelerator. Two groups of four warps take them in turns: a group asks for the scores of the next keys
before it adds the values of the last ones, and computes weights meanwhile, as FlashAttention-3 does (Shah et al. 2024).

Heads of 256: each group has 64 rows. Heads of 512: both have the same 64 rows and one half of the results each, for no
more fit the registers. Both compute the scores, since sharing them would cost more than half of the keys' products.

It is written in Gluon, for Triton's own compiler gives all warps the same work. Triton's interpreter doesn't run it.
"""

import math

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

_ROWS, _KEYS, _WIDTH = gl.constexpr(64), gl.constexpr(64), gl.constexpr(256)  # of a group's tile; dims of a chunk
_STAGES = 5  # chunks of 64 keys or values in flight
_REGISTERS = 168  # of a thread at the start, for 4 + 4 + 1 warps, which count as 12
SHARED_BYTES = (2 + _STAGES) * 64 * 256 * 2  # with the queries, which are two chunks


@gluon.jit
def _extent(cu_seqlens_q, cu_seqlens_k, GROUP: gl.constexpr, TILE_ROWS: gl.constexpr, WINDOW: gl.constexpr):
    """What this program reads: the first of its rows, the first token and the number of its sequence's queries, the
    same of the sequence's keys, the first of these that a row attends to, and how many tiles of keys. A row is one
    query of one of the GROUP heads that share a KV head, so that a short chunk fills its tile."""
    seq = gl.program_id(2)
    q_start = gl.load(cu_seqlens_q + seq)
    len_q = gl.load(cu_seqlens_q + seq + 1) - q_start
    k_start = gl.load(cu_seqlens_k + seq)
    len_k = gl.load(cu_seqlens_k + seq + 1) - k_start
    # Programs that read the same keys are neighbours, so that these stay in L2. The last rows have the most keys. They
    # start first, so that short programs even out the end.
    first_row = (gl.num_programs(0) - 1 - gl.program_id(0)) * TILE_ROWS
    last_query = gl.minimum((first_row + TILE_ROWS - 1) // GROUP, len_q - 1)
    end_key = gl.where(first_row < len_q * GROUP, len_k - len_q + last_query + 1, 0)
    first_key = 0
    if WINDOW is not None:
        first_key = gl.maximum(len_k - len_q + first_row // GROUP - WINDOW + 1, 0) // _KEYS * _KEYS
    num_tiles = gl.cdiv(gl.maximum(end_key - first_key, 0), _KEYS)
    return first_row, q_start, len_q, k_start, len_k, first_key, num_tiles


@gluon.jit
def _load_chunks(source, row, ring, full, empty, chunk, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr):
    """Ask for 64 keys or values, which begin at a row of the source."""
    PARTS: gl.constexpr = HEAD_DIM // _WIDTH
    for part in gl.static_range(PARTS):
        stage = (chunk + part) % STAGES
        mbarrier.wait(empty.index(stage), ((chunk + part) // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), _KEYS * _WIDTH * 2)
        column = gl.program_id(1) * HEAD_DIM + part * _WIDTH
        async_load(source, [row, column], full.index(stage), ring.index(stage))
    return chunk + PARTS


@gluon.jit
def _load_tiles(
    k, v, ring, full, empty, cu_seqlens_q, cu_seqlens_k, block_tables, table_stride, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, TILE_ROWS: gl.constexpr, BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """What the warp does that asks for tiles."""
    _, _, _, k_start, _, first_key, num_tiles = _extent(cu_seqlens_q, cu_seqlens_k, GROUP, TILE_ROWS, WINDOW)
    chunk, last_row = 0, 0
    for tile in range(num_tiles):
        key = first_key + tile * _KEYS
        if block_tables is not None:
            block = gl.load(block_tables + gl.program_id(2).to(gl.int64) * table_stride + key // BLOCK_SIZE)
            row = block * BLOCK_SIZE + key % BLOCK_SIZE
        else:
            row = k_start + key
        chunk = _load_chunks(k, row, ring, full, empty, chunk, HEAD_DIM, STAGES)
        if tile > 0:
            chunk = _load_chunks(v, last_row, ring, full, empty, chunk, HEAD_DIM, STAGES)
        last_row = row
    if num_tiles > 0:
        _load_chunks(v, last_row, ring, full, empty, chunk, HEAD_DIM, STAGES)


@gluon.jit
def _ask_for_scores(queries, ring, full, chunk, FIRST: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    scores = gl.zeros([_ROWS, _KEYS], gl.float32, layout)
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
def _weigh(scores, row_max, row_sum, positions, first_position, last_position, key, scale_log2, WINDOW: gl.constexpr):
    """The next step of the running softmax: weights, the largest score and the sum of each row, and what the results
    until now are multiplied by."""
    cut = key + _KEYS > first_position + 1
    if WINDOW is not None:
        cut = cut | (key <= last_position - WINDOW)
    if cut:  # by the diagonal, the end of the keys or a window's start
        keys = gl.expand_dims(key + gl.arange(0, _KEYS, gl.SliceLayout(0, scores.type.layout)), 0)
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
def _clear_end(values, count):
    """Overwrite the values from `count` on: they may be NaN, and 0 * NaN is not 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    for first in gl.static_range(0, _KEYS, 8):
        part = values.slice(first, 8)
        is_value = gl.expand_dims(first + gl.arange(0, 8, gl.SliceLayout(1, layout)) < count, 1)
        part.store(gl.where(is_value, part.load(layout), 0.0))
    fence_async_shared()
    barrier()


@gluon.jit
def _row_offsets(
    first_row, q_start, stride, FIRST_DIM: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """Of a group's rows in a tensor of heads `[64, 256]`, and their queries."""
    rows = first_row + gl.arange(0, _ROWS, gl.SliceLayout(1, layout))
    tokens = (q_start + rows // GROUP).to(gl.int64)
    of_row = tokens * stride + (gl.program_id(1) * GROUP + rows % GROUP) * HEAD_DIM
    dims = FIRST_DIM + gl.arange(0, _WIDTH, gl.SliceLayout(0, layout))
    return gl.expand_dims(of_row, 1) + gl.expand_dims(dims, 0), gl.expand_dims(rows // GROUP, 1)


@gluon.jit
def _attend(
    q, out, sinks, queries, ring, full, empty, loaded, read, cu_seqlens_q, cu_seqlens_k, q_stride, scale_log2,
    GROUP_OF_WARPS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    TILE_ROWS: gl.constexpr, WINDOW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What each of the two groups of warps does."""
    PARTS: gl.constexpr = HEAD_DIM // _WIDTH
    # The chunk of queries that its scores begin with, and the first dimension of its results.
    FIRST: gl.constexpr = GROUP_OF_WARPS if PARTS == 1 else 0
    FIRST_DIM: gl.constexpr = GROUP_OF_WARPS * _WIDTH if PARTS == 2 else 0
    dtype: gl.constexpr = ring.dtype
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _KEYS, 16])
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _WIDTH, 16])
    of_row: gl.constexpr = gl.SliceLayout(1, acc_layout)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    in_lines: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    first_row, q_start, len_q, _k_start, len_k, first_key, num_tiles = _extent(
        cu_seqlens_q, cu_seqlens_k, GROUP, TILE_ROWS, WINDOW
    )
    if PARTS == 1:
        first_row += GROUP_OF_WARPS * _ROWS
    if num_tiles > 0:
        offsets, of_query = _row_offsets(first_row, q_start, q_stride, FIRST_DIM, GROUP, HEAD_DIM, in_lines)
        queries.index(GROUP_OF_WARPS).store(gl.load(q + offsets, mask=of_query < len_q, other=0.0))
        fence_async_shared()
        barrier()
        if PARTS == 2:
            mbarrier.arrive(loaded, count=1)
            mbarrier.wait(loaded, 0)

        # Query i of a sequence is at position len_k - len_q + i and attends to the keys up to its own. A row after the
        # last query must see a key too.
        rows = first_row + gl.arange(0, _ROWS, gl.SliceLayout(1, scores_layout))
        positions = gl.minimum(len_k - len_q + rows // GROUP, len_k - 1)
        first_position = gl.minimum(len_k - len_q + first_row // GROUP, len_k - 1)
        last_position = gl.minimum(len_k - len_q + (first_row + _ROWS - 1) // GROUP, len_k - 1)
        if sinks is not None:
            heads = gl.program_id(1) * GROUP + rows % GROUP
            row_max = gl.load(sinks + heads).to(gl.float32) * 1.4426950408889634
            row_sum = gl.full([_ROWS], 1.0, gl.float32, gl.SliceLayout(1, scores_layout))
        else:
            row_max = gl.full([_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, scores_layout))
            row_sum = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, scores_layout))
        acc = gl.zeros([_ROWS, _WIDTH], gl.float32, acc_layout)

        scores = warpgroup_mma_wait(0, deps=[_ask_for_scores(queries, ring, full, 0, FIRST, PARTS, STAGES)])
        _give_back(empty, 0, PARTS, STAGES)
        chunk = PARTS
        weights, row_max, row_sum, _shrink = _weigh(
            scores, row_max, row_sum, positions, first_position, last_position, first_key, scale_log2, WINDOW
        )
        rounded = gl.convert_layout(weights.to(dtype), operand)
        for tile in range(1, num_tiles):
            asked = _ask_for_scores(queries, ring, full, chunk, FIRST, PARTS, STAGES)
            of_values = _await_values(full, chunk + PARTS, GROUP_OF_WARPS, PARTS, STAGES)
            adding = warpgroup_mma(rounded, ring.index(of_values), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[asked])
            _give_back(empty, chunk, PARTS, STAGES)
            weights, row_max, row_sum, shrink = _weigh(
                scores, row_max, row_sum, positions, first_position, last_position, first_key + tile * _KEYS,
                scale_log2, WINDOW,
            )  # fmt: skip
            acc = warpgroup_mma_wait(0, deps=[adding])
            _give_back(empty, chunk + PARTS, PARTS, STAGES)
            acc = acc * gl.expand_dims(gl.convert_layout(shrink, of_row), 1)
            rounded = gl.convert_layout(weights.to(dtype), operand)
            chunk += 2 * PARTS
        of_values = _await_values(full, chunk, GROUP_OF_WARPS, PARTS, STAGES)
        count = len_k - first_key - (num_tiles - 1) * _KEYS
        if count < _KEYS:
            _clear_end(ring.index(of_values), count)
        acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(rounded, ring.index(of_values), acc, is_async=True)])

        acc = acc / gl.expand_dims(gl.convert_layout(row_sum, of_row), 1)
        # Through the queries' place, so that a warp writes whole lines.
        barrier()
        if PARTS == 2:
            mbarrier.arrive(read, count=1)
            mbarrier.wait(read, 0)
        queries.index(GROUP_OF_WARPS).store(acc.to(dtype))
        barrier()
        offsets, of_query = _row_offsets(
            first_row, q_start, NUM_KV_HEADS * GROUP * HEAD_DIM, FIRST_DIM, GROUP, HEAD_DIM, in_lines
        )
        gl.store(out + offsets, queries.index(GROUP_OF_WARPS).load(in_lines), mask=of_query < len_q)


# The table's width changes from step to step. Specialising on it would compile the kernel again in mid-run.
@gluon.jit(do_not_specialize=["table_stride"])
def _wide_prefill_kernel(
    out, q, k, v, cu_seqlens_q, cu_seqlens_k, block_tables, sinks, q_stride, table_stride, scale_log2,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """k, v: descriptors of `[keys, heads * HEAD_DIM]`."""
    TILE_ROWS: gl.constexpr = 2 * _ROWS if HEAD_DIM == _WIDTH else _ROWS
    queries = gl.allocate_shared_memory(k.dtype, [2, _ROWS, _WIDTH], k.layout)
    ring = gl.allocate_shared_memory(k.dtype, [STAGES, _KEYS, _WIDTH], k.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    read = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(loaded, count=2)
    mbarrier.init(read, count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (q, out, sinks, queries, ring, full, empty, loaded, read, cu_seqlens_q, cu_seqlens_k, q_stride,
                       scale_log2, 0, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, WINDOW, STAGES)),
            (_attend, (q, out, sinks, queries, ring, full, empty, loaded, read, cu_seqlens_q, cu_seqlens_k, q_stride,
                       scale_log2, 1, NUM_KV_HEADS, GROUP, HEAD_DIM, TILE_ROWS, WINDOW, STAGES)),
            (_load_tiles, (k, v, ring, full, empty, cu_seqlens_q, cu_seqlens_k, block_tables, table_stride, GROUP,
                           HEAD_DIM, TILE_ROWS, BLOCK_SIZE, WINDOW, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def can_attend(q: Tensor, keys: Tensor, values: Tensor, paged: bool) -> bool:
    """Whether `wide_prefill` takes these tensors of `paged_prefill`: 16 bits, heads of 256 or 512, on Hopper. Blocks of
    a cache have 64 keys at least. The accelerator wants addresses and strides in units of 16 bytes."""
    facts = GpuFacts.of(q.device)
    is_here = HAS_GLUON and facts.is_hopper and fits(SHARED_BYTES, q.device)
    is_wide = q.shape[-1] in (256, 512) and q.element_size() == 2 and keys.dtype == q.dtype
    in_blocks = not paged or keys.shape[1] >= 64
    aligned = all(each.data_ptr() % 16 == 0 and each.stride(-3) % 8 == 0 for each in (keys, values))
    return is_here and is_wide and in_blocks and aligned


def wide_prefill(
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
    group = num_heads // num_kv_heads
    table_stride, block_size = (0, 64) if block_tables is None else (block_tables.stride(0), keys.shape[1])
    tile_rows = 128 if head_dim == 256 else 64
    grid = (triton.cdiv(max_seqlen_q * group, tile_rows), num_kv_heads, cu_seqlens_q.numel() - 1)
    launcher(_wide_prefill_kernel, grid)(
        out, q, _descriptor(keys), _descriptor(values), cu_seqlens_q, cu_seqlens_k, block_tables, sinks, q.stride(0),
        table_stride, scale * math.log2(math.e), NUM_KV_HEADS=num_kv_heads, GROUP=group,
        HEAD_DIM=head_dim, BLOCK_SIZE=block_size, WINDOW=window, STAGES=_STAGES, num_warps=4,
        maxnreg=_REGISTERS,
    )  # fmt: skip


def _descriptor(tensor: Tensor):
    """Of tiles of 64 keys and 256 dimensions of packed keys or values, or of a cache's."""
    rows = tensor.flatten(0, 1) if tensor.dim() == 4 else tensor
    return SharedDescriptor.from_tensor(rows.flatten(1), [64, 256], gl.NVMMASharedLayout(128, 16, rank=2))
