"""Attention that gives a token the same bits in a prefill and in a decode step: for `deterministic=True`.

The keys of a token are divided into chunks by their positions. A chunk's result begins with nothing, and the results
are merged in the order of the chunks. A prefill does so in a loop. A decode step computes the chunks side by side, and
a second kernel merges them: by the same operations on tiles of the same size. A chunk of which a token sees nothing
changes no bit of its result, so it may be computed or left out.

Sums and products whose rounding a compiler could choose are written as fused operations.
"""

import math

import torch
from torch import Tensor

from nanovllm.kernels.attention.decode_plan import num_lanes
from nanovllm.kernels.attention.paged_cache import check_layout, check_sinks, key_slots, load_blocks, load_sinks
from nanovllm.kernels.attention.paged_decode import descriptors_of, has_tma
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.triton_stub import tl, triton

CHUNK = 512  # keys
MAX_HEAD_DIM = 256
_TILE_ROWS, _NUM_WARPS = 64, 4
# Of decode steps on Hopper. More stages load earlier, but leave fewer programs at once.
_DECODE_WARPS, _STAGES_OF_FEW, _STAGES_OF_MANY = 2, 3, 2
_FEW = 256  # rows times KV heads
_FEWEST_ROWS, _FEWEST_COLUMNS = tl.constexpr(16), tl.constexpr(8)  # of tensor cores


def tile_keys(itemsize: int, padded_dim: int) -> int:
    """Few enough for the shared memory of every card."""
    return 16 if itemsize == 4 else 64 if padded_dim <= 128 else 32


def num_chunks(max_len: int) -> int:
    """Chunks of the longest sequence."""
    return -(-max_len // CHUNK)


@triton.jit
def _scaled_sum(x, factor, y):
    """x * factor + y, rounded once."""
    return tl.fma(x, tl.broadcast_to(factor, x.shape), tl.broadcast_to(y, x.shape))


@triton.jit
def _difference(x, factor, y):
    """x * factor - y, rounded once; factor is one number."""
    return _scaled_sum(x, tl.full([1, 1], factor, tl.float32), -y)


@triton.jit
def _subtrahend(largest):
    """What is subtracted from scores: a finite number, also of rows that have seen no key."""
    return tl.where(largest > float("-inf"), largest, 0.0)


@triton.jit
def _attend(q, k, v, is_seen, acc, row_max, row_sum, scale_log2, SUM_BY_DOT: tl.constexpr):
    """Add a tile of keys: q `[rows, dims]`, k and v `[keys, dims]`, is_seen `[rows, keys]`, acc `[rows, dims]`, row_max
    `[rows]`; row_sum `[rows]`, or with SUM_BY_DOT a tile of rows of equal numbers."""
    scores = tl.where(is_seen, tl.dot(q, tl.trans(k), input_precision="ieee"), float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    base = _subtrahend(new_max)
    weights, shrink = tl.exp2(_difference(scores, scale_log2, base[:, None])), tl.exp2(row_max - base)
    if SUM_BY_DOT:
        ones = tl.full([k.shape[0], row_sum.shape[1]], 1.0, v.dtype)
        row_sum = tl.dot(weights.to(v.dtype), ones, row_sum * shrink[:, None])
    else:
        row_sum = tl.fma(row_sum, shrink, tl.sum(weights, 1))
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, new_max, row_sum


@triton.jit
def _attend_transposed(q, k, v, is_seen, acc, row_max, row_sum, scale_log2, MASK: tl.constexpr):
    """As `_attend` with SUM_BY_DOT and with MASK, of q, is_seen, acc and row_sum that are transposed: with keys as the
    rows of a product, few queries leave no part of it idle."""
    scores = tl.dot(k, q)
    if MASK:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 0) * scale_log2)
    base = _subtrahend(new_max)
    weights, shrink = tl.exp2(_difference(scores, scale_log2, base[None, :])), tl.exp2(row_max - base)
    ones = tl.full([row_sum.shape[0], k.shape[0]], 1.0, v.dtype)
    row_sum = tl.dot(ones, weights.to(v.dtype), row_sum * shrink[None, :])
    acc = tl.dot(tl.trans(v), weights.to(v.dtype), acc * shrink[None, :])
    return acc, new_max, row_sum


@triton.jit
def _chunk(
    q, positions, ends, k_ptr, v_ptr, table_ptr, k_stride, v_stride, first_key, end_key, scale_log2,
    HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_SIZE: tl.constexpr, PAGED: tl.constexpr, WINDOW: tl.constexpr,
    SUM_BY_DOT: tl.constexpr,
):  # fmt: skip
    """A softmax over the keys of one chunk: sums of values, largest score, and sum of weights. A row sees keys that are
    before its end. If it sees none, it has zeros and -inf. Scores are in units of log2."""
    dims = tl.arange(0, PADDED_DIM)
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], dtype=tl.float32)
    row_max = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    if SUM_BY_DOT:
        row_sum = tl.zeros([TILE_ROWS, _FEWEST_COLUMNS], dtype=tl.float32)
    else:
        row_sum = tl.zeros([TILE_ROWS], dtype=tl.float32)
    for start in range(first_key, tl.minimum(first_key + CHUNK, end_key), TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        tokens = keys.to(tl.int64)
        if PAGED:
            tokens = key_slots(
                load_blocks(table_ptr, start, end_key, BLOCK_SIZE, TILE_KEYS), start, BLOCK_SIZE, TILE_KEYS
            )
        inside = (keys < end_key)[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_ptr + tokens[:, None] * k_stride + dims[None, :], mask=inside, other=0.0)
        v = tl.load(v_ptr + tokens[:, None] * v_stride + dims[None, :], mask=inside, other=0.0)
        is_seen = keys[None, :] < ends[:, None]
        if WINDOW is not None:
            is_seen &= keys[None, :] > positions[:, None] - WINDOW
        acc, row_max, row_sum = _attend(q, k, v, is_seen, acc, row_max, row_sum, scale_log2, SUM_BY_DOT)
    if SUM_BY_DOT:
        row_sum = tl.max(row_sum, 1)
    return acc, row_max, row_sum


@triton.jit
def _merge(acc, row_max, row_sum, next_acc, next_max, next_sum):
    """Add the next chunk."""
    new_max = tl.maximum(row_max, next_max)
    base = _subtrahend(new_max)
    shrink, weight = tl.exp2(row_max - base), tl.exp2(next_max - base)
    acc = _scaled_sum(acc, shrink[:, None], next_acc * weight[:, None])
    row_sum = tl.fma(row_sum, shrink, next_sum * weight)
    return acc, new_max, row_sum


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    out_ptr, q_ptr, k_ptr, v_ptr, cu_seqlens_q_ptr, cu_seqlens_k_ptr, block_tables_ptr, sinks_ptr, ends_ptr,
    q_stride, k_stride, v_stride, table_stride, scale_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PAGED: tl.constexpr, WINDOW: tl.constexpr, SUM_BY_DOT: tl.constexpr,
):  # fmt: skip
    kv_head, seq = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)  # The last rows have the most keys, and start first.
    q_start, k_start = tl.load(cu_seqlens_q_ptr + seq), tl.load(cu_seqlens_k_ptr + seq)
    len_q = tl.load(cu_seqlens_q_ptr + seq + 1) - q_start
    len_k = tl.load(cu_seqlens_k_ptr + seq + 1) - k_start
    if tile * TILE_ROWS >= len_q * GROUP:
        return
    rows = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    queries, heads = rows // GROUP, kv_head * GROUP + rows % GROUP
    dims = tl.arange(0, PADDED_DIM)
    inside = (queries < len_q)[:, None] & (dims < HEAD_DIM)[None, :]
    tokens = (q_start + queries).to(tl.int64)
    q = tl.load(q_ptr + tokens[:, None] * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    positions = len_k - len_q + queries
    ends = positions + 1
    last_query = tl.minimum((tile * TILE_ROWS + TILE_ROWS - 1) // GROUP, len_q - 1)
    end_key = len_k - len_q + last_query + 1
    if ends_ptr is not None:
        ends = tl.load(ends_ptr + tokens, mask=queries < len_q, other=0)
        end_key = tl.max(ends, 0)
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    table_ptr = block_tables_ptr + seq * table_stride
    if not PAGED:
        k_ptr += k_start.to(tl.int64) * k_stride
        v_ptr += k_start.to(tl.int64) * v_stride
    acc = tl.zeros([TILE_ROWS, PADDED_DIM], dtype=tl.float32)
    row_max = tl.full([TILE_ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([TILE_ROWS], dtype=tl.float32)
    if sinks_ptr is not None:
        row_max = load_sinks(sinks_ptr, heads, queries < len_q)
        row_sum += 1.0
    first_key = 0
    if WINDOW is not None:
        first_seen = len_k - len_q + tile * TILE_ROWS // GROUP - WINDOW + 1
        first_key = tl.maximum(first_seen, 0) // CHUNK * CHUNK
    for start in range(first_key, end_key, CHUNK):
        next_acc, next_max, next_sum = _chunk(
            q, positions, ends, k_ptr, v_ptr, table_ptr, k_stride, v_stride, start, end_key, scale_log2,
            HEAD_DIM, PADDED_DIM, TILE_ROWS, TILE_KEYS, CHUNK, BLOCK_SIZE, PAGED, WINDOW, SUM_BY_DOT,
        )  # fmt: skip
        acc, row_max, row_sum = _merge(acc, row_max, row_sum, next_acc, next_max, next_sum)
    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    out_tile = out_ptr + (tokens * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_chunks_kernel(
    partial_ptr, max_ptr, sum_ptr, q_ptr, k_ptr, v_ptr, context_lens_ptr, block_tables_ptr,
    q_stride, table_stride, scale_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, SUM_BY_DOT: tl.constexpr,
):  # fmt: skip
    """One chunk of one row, for the query heads that share a KV head."""
    kv_head, row, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_keys = tl.load(context_lens_ptr + row)
    if chunk * CHUNK >= num_keys:
        return
    if WINDOW is not None:  # noqa: SIM102 (a constant, and a number)
        if chunk * CHUNK + CHUNK <= num_keys - WINDOW:
            return
    lanes, dims = tl.arange(0, TILE_ROWS), tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + lanes
    inside = (lanes < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row * q_stride + heads[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
    positions = tl.full([TILE_ROWS], 0, tl.int32) + num_keys - 1
    stride = NUM_KV_HEADS * HEAD_DIM
    acc, row_max, row_sum = _chunk(
        q, positions, positions + 1, k_ptr + kv_head * HEAD_DIM, v_ptr + kv_head * HEAD_DIM,
        block_tables_ptr + row * table_stride, stride, stride, chunk * CHUNK, num_keys, scale_log2,
        HEAD_DIM, PADDED_DIM, TILE_ROWS, TILE_KEYS, CHUNK, BLOCK_SIZE, True, WINDOW, SUM_BY_DOT,
    )  # fmt: skip
    at = (row * NUM_CHUNKS + chunk) * (NUM_KV_HEADS * GROUP) + heads
    tl.store(partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=inside)
    tl.store(max_ptr + at, row_max, mask=lanes < GROUP)
    tl.store(sum_ptr + at, row_sum, mask=lanes < GROUP)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_chunks_hopper_kernel(
    partial_ptr, max_ptr, sum_ptr, q_ptr, k_ptr, v_ptr, k_desc, v_desc, context_lens_ptr, block_tables_ptr,
    q_stride, table_stride, scale_log2,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, TILE_KEYS: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """As `_decode_chunks_kernel`. k_desc and v_desc: see `paged_decode`; None: tiles are loaded by pointers."""
    kv_head, row, chunk = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_keys = tl.load(context_lens_ptr + row)
    first_key, end_key = chunk * CHUNK, tl.minimum(chunk * CHUNK + CHUNK, num_keys)
    if WINDOW is not None:  # Tiles of which nothing is seen change no bit.
        first_key = tl.maximum(first_key, (num_keys - WINDOW) // TILE_KEYS * TILE_KEYS)
    if first_key >= end_key:
        return
    lanes, dims = tl.arange(0, LANES), tl.arange(0, PADDED_DIM)
    heads = kv_head * GROUP + lanes
    is_lane, is_dim = lanes < GROUP, dims < HEAD_DIM
    q_tile = q_ptr + row * q_stride + heads[None, :] * HEAD_DIM + dims[:, None]
    q = tl.load(q_tile, mask=is_lane[None, :] & is_dim[:, None], other=0.0)
    k_ptr += kv_head * HEAD_DIM
    v_ptr += kv_head * HEAD_DIM
    table_ptr = block_tables_ptr + row * table_stride
    TOKEN: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    # Numbers past the end may be NaN. They are in the last tile alone, which is loaded by pointers.
    rest = first_key + (end_key - first_key) // TILE_KEYS * TILE_KEYS
    rest_keys = rest + tl.arange(0, TILE_KEYS)
    slots = key_slots(load_blocks(table_ptr, rest, end_key, BLOCK_SIZE, TILE_KEYS), rest, BLOCK_SIZE, TILE_KEYS)
    inside = (rest_keys < end_key)[:, None] & is_dim[None, :]
    k_rest = tl.load(k_ptr + slots[:, None] * TOKEN + dims[None, :], mask=inside, other=0.0)
    v_rest = tl.load(v_ptr + slots[:, None] * TOKEN + dims[None, :], mask=inside, other=0.0)
    acc = tl.zeros([PADDED_DIM, LANES], dtype=tl.float32)
    row_max = tl.full([LANES], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([_FEWEST_ROWS, LANES], dtype=tl.float32)
    blocks = load_blocks(table_ptr, first_key, end_key, BLOCK_SIZE, TILE_KEYS)  # a tile ahead: no load waits for it
    for start in range(first_key, rest, TILE_KEYS):
        keys = start + tl.arange(0, TILE_KEYS)
        if k_desc is None:
            tile = key_slots(blocks, start, BLOCK_SIZE, TILE_KEYS)[:, None] * TOKEN + dims[None, :]
            k = tl.load(k_ptr + tile, mask=is_dim[None, :], other=0.0)
            v = tl.load(v_ptr + tile, mask=is_dim[None, :], other=0.0)
        else:
            slot = blocks * BLOCK_SIZE + start % BLOCK_SIZE
            k = k_desc.load([slot, kv_head * HEAD_DIM])
            v = v_desc.load([slot, kv_head * HEAD_DIM])
        blocks = load_blocks(table_ptr, start + TILE_KEYS, end_key, BLOCK_SIZE, TILE_KEYS)
        is_seen = (keys >= num_keys - (0 if WINDOW is None else WINDOW))[:, None]
        acc, row_max, row_sum = _attend_transposed(
            q, k, v, is_seen, acc, row_max, row_sum, scale_log2, MASK=WINDOW is not None
        )
    if rest < end_key:
        is_seen = rest_keys < end_key
        if WINDOW is not None:
            is_seen &= rest_keys >= num_keys - WINDOW
        acc, row_max, row_sum = _attend_transposed(
            q, k_rest, v_rest, is_seen[:, None], acc, row_max, row_sum, scale_log2, MASK=True
        )
    at = (row * NUM_CHUNKS + chunk) * (NUM_KV_HEADS * GROUP) + heads
    out_tile = partial_ptr + at[None, :] * HEAD_DIM + dims[:, None]
    tl.store(out_tile, acc, mask=is_lane[None, :] & is_dim[:, None])
    tl.store(max_ptr + at, row_max, mask=is_lane)
    tl.store(sum_ptr + at, tl.max(row_sum, 0), mask=is_lane)


@triton.jit
def _decode_merge_kernel(
    out_ptr, partial_ptr, max_ptr, sum_ptr, context_lens_ptr, sinks_ptr,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, CHUNK: tl.constexpr, NUM_CHUNKS: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    kv_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    num_keys = tl.load(context_lens_ptr + row)
    lanes, dims = tl.arange(0, LANES), tl.arange(0, PADDED_DIM)
    heads, is_lane = kv_head * GROUP + lanes, lanes < GROUP
    inside = is_lane[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.zeros([LANES, PADDED_DIM], dtype=tl.float32)
    row_max = tl.full([LANES], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([LANES], dtype=tl.float32)
    if sinks_ptr is not None:
        row_max = load_sinks(sinks_ptr, heads, is_lane)
        row_sum += 1.0
    first_chunk = 0
    if WINDOW is not None:
        first_chunk = tl.maximum(num_keys - WINDOW, 0) // CHUNK
    for chunk in range(first_chunk, tl.cdiv(num_keys, CHUNK)):
        at = (row * NUM_CHUNKS + chunk) * (NUM_KV_HEADS * GROUP) + heads
        next_acc = tl.load(partial_ptr + at[:, None] * HEAD_DIM + dims[None, :], mask=inside, other=0.0)
        next_max = tl.load(max_ptr + at, mask=is_lane, other=float("-inf"))
        next_sum = tl.load(sum_ptr + at, mask=is_lane, other=0.0)
        acc, row_max, row_sum = _merge(acc, row_max, row_sum, next_acc, next_max, next_sum)
    out = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]  # Padding has no keys, and zeros.
    out_tile = out_ptr + (row * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out_tile, out.to(out_ptr.dtype.element_ty), mask=inside)


class FixedOrderWorkspace:
    """Results of the chunks of one decode step, which all layers of an engine share."""

    def __init__(self, max_rows: int, num_heads: int, head_dim: int, max_len: int, device: torch.device | str):
        self.num_chunks = num_chunks(max_len)
        shape = max_rows, self.num_chunks, num_heads
        self.partial = torch.empty(*shape, head_dim, dtype=torch.float32, device=device)
        self.largest, self.sums = torch.empty(2, *shape, dtype=torch.float32, device=device)


def fixed_order_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    block_tables: Tensor | None,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """As `paged_prefill`, whose arguments these are, over caches of q's dtype. ends: int32 `[num_tokens]`, the position
    behind the last key that each token sees, as images have that attend in both directions; None: behind its own."""
    paged = block_tables is not None
    keys, values = (k_cache, v_cache) if paged else (k, v)
    check_layout(q, keys, values, paged, None)
    check_sinks(sinks, q.shape[1])
    (total_q, num_heads, head_dim), num_kv_heads = q.shape, keys.shape[-2]
    out = torch.empty((total_q, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if total_q == 0:
        return out
    group, sizes = num_heads // num_kv_heads, _sizes(q, window)
    grid = (num_kv_heads, cu_seqlens_q.numel() - 1, triton.cdiv(max_seqlen_q * group, sizes["TILE_ROWS"]))
    tables = cu_seqlens_k if block_tables is None else block_tables  # It is not read without a table.
    launcher(_prefill_kernel, grid)(
        out, q, keys, values, cu_seqlens_q, cu_seqlens_k, tables, sinks, ends,
        q.stride(0), keys.stride(-3), values.stride(-3), tables.stride(0) if paged else 0, scale * math.log2(math.e),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, PAGED=paged, BLOCK_SIZE=keys.shape[1] if paged else CHUNK,
        **sizes,
    )  # fmt: skip
    return out


def fixed_order_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    workspace: FixedOrderWorkspace,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of one query token a row to its context: the bits that `fixed_order_prefill` gives the same token.
    Arguments and result as in `paged_prefill`. context_lens: int32 `[num_rows]`, keys of each row, its own included; 0
    gives zeros."""
    check_layout(q, k_cache, v_cache, True, None)
    check_sinks(sinks, q.shape[1])
    (num_rows, num_heads, head_dim), (_, block_size, num_kv_heads, _) = q.shape, k_cache.shape
    out = torch.empty((num_rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return out
    parts = workspace.partial, workspace.largest, workspace.sums
    sizes, group = _sizes(q, window), num_heads // num_kv_heads
    chunks = {"NUM_KV_HEADS": num_kv_heads, "GROUP": group, "NUM_CHUNKS": workspace.num_chunks}
    grid, strides = (num_kv_heads, num_rows, workspace.num_chunks), (q.stride(0), block_tables.stride(0))
    scale_log2 = scale * math.log2(math.e)
    shared = {name: sizes[name] for name in ("HEAD_DIM", "PADDED_DIM", "CHUNK", "WINDOW")}
    if sizes["SUM_BY_DOT"]:
        descriptors = None, None
        if has_tma(head_dim, block_size, q.element_size(), q.device):
            descriptors = descriptors_of(k_cache, v_cache, sizes["TILE_KEYS"])
        launcher(_decode_chunks_hopper_kernel, grid)(
            *parts, q, k_cache, v_cache, *descriptors, context_lens, block_tables, *strides, scale_log2,
            LANES=num_lanes(group, True), TILE_KEYS=sizes["TILE_KEYS"], BLOCK_SIZE=block_size, **chunks, **shared,
            num_warps=_DECODE_WARPS,
            num_stages=_STAGES_OF_FEW if num_rows * num_kv_heads <= _FEW else _STAGES_OF_MANY,
        )  # fmt: skip
    else:
        launcher(_decode_chunks_kernel, grid)(
            *parts, q, k_cache, v_cache, context_lens, block_tables, *strides, scale_log2,
            BLOCK_SIZE=block_size, **chunks, **sizes,
        )  # fmt: skip
    lanes = max(2, triton.next_power_of_2(group))
    launcher(_decode_merge_kernel, (num_kv_heads, num_rows))(
        out, *parts, context_lens, sinks, LANES=lanes, **chunks, **shared, num_warps=4
    )
    return out


def sums_by_dot(q: Tensor) -> bool:
    """Whether tensor cores give a sum the same bits in products of all sizes, and compute that of weights too: then a
    decode step multiplies fewer rows than a prefill. See `kernels.matmul.fixed_order`."""
    return q.element_size() == 2 and GpuFacts.of(q.device).is_hopper


def _sizes(q: Tensor, window: int | None) -> dict:
    """Of tiles: the same in prefill and decode, but for the rows where sums are by tensor cores."""
    head_dim, by_dot = q.shape[-1], sums_by_dot(q)
    padded_dim = max(16, triton.next_power_of_2(head_dim))
    sizes = {"HEAD_DIM": head_dim, "PADDED_DIM": padded_dim, "WINDOW": window, "SUM_BY_DOT": by_dot}
    sizes |= {"TILE_ROWS": _TILE_ROWS, "TILE_KEYS": tile_keys(q.element_size(), padded_dim), "CHUNK": CHUNK}
    num_stages = 1 if padded_dim > 128 else 3 if by_dot else 2
    return sizes | {"num_warps": _NUM_WARPS, "num_stages": num_stages}
