"""The gated delta rule over chunks of 64 tokens, by products of matrices.

A token corrects the state by `beta (v - k S)`, where S is the chunk's first state, decayed, plus the corrections of the
chunk's earlier tokens (Yang et al. 2024, "Parallelizing Linear Transformers with the Delta Rule over Sequence Length").
With D[i, j] the decay from token j to token i and d its decay since the chunk's start, all corrections C of a chunk are

    C = (I + tril(beta K K^T D, -1))^-1 beta (V - d K S)
    out = d Q S + tril(Q K^T D) C

The inverse and `tril(Q K^T D)` depend on the chunk alone. One kernel computes them for all chunks at once. A second one
walks over each sequence's chunks with a slice of the state's columns in registers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.launch import launcher
from nanovllm.kernels.linear_attention.chunks import CHUNK, count_chunks, find_chunk
from nanovllm.kernels.linear_attention.state_order import load_matrix, store_matrix
from nanovllm.kernels.shared_memory import fits, held_stages
from nanovllm.kernels.triton_stub import tl, triton

# For float32 alone: three products on tensor cores are nearly exact, and cost a tenth of the registers of "ieee".
_PRECISION = tl.constexpr("tf32x3")
_PREPARE_REGISTERS = 128  # of a thread: room for four programs on a multiprocessor, which wait for most of their time


class ScanConfig(NamedTuple):
    """Launch constants of the scan."""

    columns: int  # of a state, for a program
    num_warps: int
    num_stages: int  # of the load pipeline, each with the tiles of a chunk


def choose_scan(dim: int, itemsize: int, device: torch.device) -> ScanConfig:
    """Slices as wide as a tile of tensor cores has rows. Wider ones give work to fewer multiprocessors. The choice
    depends on the model alone: another one in mid-run would wait for a compilation."""
    columns = min(dim, 64)
    stage_bytes = (2 * dim + columns + 2 * CHUNK) * CHUNK * itemsize
    needed = stage_bytes * held_stages(2, device) + dim * columns * itemsize
    return ScanConfig(columns, 4, 2 if itemsize < 4 and fits(needed, device) else 1)


@triton.jit
def softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(x)))


@triton.jit
def _inverse(A, CHUNK: tl.constexpr, dtype: tl.constexpr):
    """`(I + A)^-1` of a strictly lower triangular A [CHUNK, CHUNK] in float32, multiplied in `dtype`.

    X, the inverses of the diagonal blocks of size n, gives those of size 2n: `X - X A X` in between. All of A is
    multiplied, so that each level's products read it where it is in shared memory. No entry of an inverse exceeds 1,
    since it is a product of contractions.
    """
    row = tl.arange(0, CHUNK)[:, None]
    column = tl.arange(0, CHUNK)[None, :]
    X = tl.where(row == column, 1.0, 0.0) - tl.where((row // 2 == column // 2) & (row > column), A, 0.0)
    A = A.to(dtype)
    LEVELS: tl.constexpr = 5
    tl.static_assert(CHUNK == 2 ** (LEVELS + 1))
    for level in tl.static_range(1, LEVELS + 1):
        size = 2**level
        is_between = (row // (2 * size) == column // (2 * size)) & (row // size > column // size)
        rounded = X.to(dtype)
        product = tl.dot(rounded, A, input_precision=_PRECISION)
        product = tl.dot(product.to(dtype), rounded, input_precision=_PRECISION)
        X -= tl.where(is_between, product, 0.0)
    return X


@triton.jit(
    do_not_specialize=["num_seqs", "b_stride", "a_stride"], do_not_specialize_on_alignment=["b", "a", "cu_seqlens"]
)
def _prepare_chunks_kernel(
    inverses, scores, decays, mixed, b, a, A_log, dt_bias, cu_seqlens, num_seqs, b_stride, a_stride, scale,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr,
    INVERSE_DTYPE: tl.constexpr,
):  # fmt: skip
    CONV_DIM: tl.constexpr = (2 * NUM_KEY_HEADS + NUM_HEADS) * DIM
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    _seq, start, length, first = find_chunk(cu_seqlens, chunk, num_seqs)
    if first >= length:
        return
    row = tl.arange(0, CHUNK)
    inside = first + row < length
    token = (start + first + row).to(tl.int64)
    # Tokens past the end have no decay and no correction.
    x = tl.load(a + token * a_stride + head, mask=inside, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    log_decay = tl.where(inside, -rate * softplus(x + tl.load(dt_bias + head).to(tl.float32)), 0.0)
    total = tl.sum(log_decay, axis=0)
    log_decay = tl.cumsum(log_decay, axis=0)
    beta = tl.sigmoid(tl.load(b + token * b_stride + head, mask=inside, other=0.0).to(tl.float32))
    beta = tl.where(inside, beta, 0.0)

    dims = tl.arange(0, DIM)
    key_head = head // (NUM_HEADS // NUM_KEY_HEADS)
    q_at = mixed + token[:, None] * CONV_DIM + key_head * DIM + dims[None, :]
    q = tl.load(q_at, mask=inside[:, None], other=0.0)
    k = tl.load(q_at + NUM_KEY_HEADS * DIM, mask=inside[:, None], other=0.0)
    is_seen = row[:, None] >= row[None, :]
    # A positive exponent belongs to a later token, and may overflow.
    decay = tl.exp(tl.where(is_seen, log_decay[:, None] - log_decay[None, :], float("-inf")))
    # The scores first, so that nothing of them has registers while the inverse is computed.
    in_order = chunk.to(tl.int64) * NUM_HEADS + head
    tile = in_order * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
    at = decays + in_order * (2 * CHUNK) + row
    tl.store(at, tl.exp(log_decay))
    tl.store(at + CHUNK, tl.exp(total - log_decay))
    score = tl.dot(q, tl.trans(k), input_precision=_PRECISION) * decay * scale
    tl.store(scores + tile, score.to(scores.dtype.element_ty))
    system = tl.dot(k, tl.trans(k), input_precision=_PRECISION) * decay * beta[:, None]
    system = tl.where(row[:, None] > row[None, :], system, 0.0)
    inverse = _inverse(system, CHUNK, INVERSE_DTYPE) * beta[None, :]
    tl.store(inverses + tile, inverse.to(inverses.dtype.element_ty))


@triton.jit
def _input_at(qkv, tails, read, start, position, channel, qkv_stride, CONV_DIM: tl.constexpr):
    """A sequence's input at a position from -3 on. Those below 0 are in the tail that it began with."""
    is_new = position >= 0
    token = (start + position).to(tl.int64)
    new = tl.load(qkv + token * qkv_stride + channel, mask=channel < tl.where(is_new, CONV_DIM, 0), other=0.0)
    old_at = tails + (read * 3 + 3 + position) * CONV_DIM + channel
    old = tl.load(old_at, mask=channel < tl.where(is_new | (read < 0), 0, CONV_DIM), other=0.0)
    return tl.where(is_new, new, old)


@triton.jit
def _store_tail(qkv, tails, read, cell, start, length, channel, qkv_stride, CONV_DIM: tl.constexpr):
    x0 = _input_at(qkv, tails, read, start, length - 3, channel, qkv_stride, CONV_DIM)
    x1 = _input_at(qkv, tails, read, start, length - 2, channel, qkv_stride, CONV_DIM)
    x2 = _input_at(qkv, tails, read, start, length - 1, channel, qkv_stride, CONV_DIM)
    at = tails + cell * (3 * CONV_DIM) + channel
    tl.store(at, x0, mask=channel < CONV_DIM)
    tl.store(at + CONV_DIM, x1, mask=channel < CONV_DIM)
    tl.store(at + 2 * CONV_DIM, x2, mask=channel < CONV_DIM)


# Where a step's numbers are in memory changes from step to step.
@triton.jit(do_not_specialize_on_alignment=["cu_seqlens", "reads", "writes", "snapshots", "snapshot_lens"])
def _scan_chunks_kernel(
    out, qkv, mixed, inverses, scores, decays, tails, states,
    cu_seqlens, reads, writes, snapshots, snapshot_lens, qkv_stride, scale,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program has COLUMNS columns of a value head's state. It also stores CHANNELS channels of the tails.

    All products are of columns by tokens or by key dims, transposed. So what one product gives is the next one's first
    operand, which tensor cores read from the registers that it is in, and no result of the chain passes through shared
    memory.
    """
    CONV_DIM: tl.constexpr = (2 * NUM_KEY_HEADS + NUM_HEADS) * DIM
    BLOCKS: tl.constexpr = DIM // COLUMNS
    block = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2)
    start = tl.load(cu_seqlens + seq)
    length = tl.load(cu_seqlens + seq + 1) - start
    read = tl.load(reads + seq).to(tl.int64)
    write = tl.load(writes + seq).to(tl.int64)
    snapshot = tl.load(snapshots + seq).to(tl.int64)
    snapshot_len = tl.load(snapshot_lens + seq)

    channel = (head * BLOCKS + block) * CHANNELS + tl.arange(0, CHANNELS)
    if snapshot >= 0:
        _store_tail(qkv, tails, read, snapshot, start, snapshot_len, channel, qkv_stride, CONV_DIM)
    if write >= 0:
        _store_tail(qkv, tails, read, write, start, length, channel, qkv_stride, CONV_DIM)

    row = tl.arange(0, CHUNK)
    dims = tl.arange(0, DIM)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    in_state = head * (DIM * DIM) + block * (DIM * COLUMNS)
    state = tl.trans(load_matrix(states + read * (NUM_HEADS * DIM * DIM) + in_state, read >= 0, DIM, COLUMNS))
    q_column = head // (NUM_HEADS // NUM_KEY_HEADS) * DIM + dims[None, :]
    v_column = (2 * NUM_KEY_HEADS + head) * DIM + columns[None, :]
    dtype: tl.constexpr = mixed.dtype.element_ty
    first_chunk = start // CHUNK + seq
    num_chunks = tl.cdiv(length, CHUNK)
    kept_chunks = tl.where(snapshot >= 0, snapshot_len // CHUNK, 0)
    # Up to the snapshot, and from there to the end. A loop without a branch inside can be pipelined.
    for part in range(0, 2):
        for i in tl.range(tl.where(part == 0, 0, kept_chunks), tl.where(part == 0, kept_chunks, num_chunks),
                          num_stages=STAGES):  # fmt: skip
            token = (start + i * CHUNK + row).to(tl.int64)[:, None]
            inside = (i * CHUNK + row < length)[:, None]
            in_order = (first_chunk + i).to(tl.int64) * NUM_HEADS + head
            tile = in_order * (CHUNK * CHUNK) + row[:, None] * CHUNK + row[None, :]
            q_at = mixed + token * CONV_DIM + q_column
            k = tl.load(q_at + NUM_KEY_HEADS * DIM, mask=inside, other=0.0)
            v = tl.load(mixed + token * CONV_DIM + v_column, mask=inside, other=0.0)
            inverse = tl.load(inverses + tile)
            q = tl.load(q_at, mask=inside, other=0.0)
            score = tl.load(scores + tile)
            at = decays + in_order * (2 * CHUNK) + row
            since_start = tl.load(at)[None, :]
            to_end = tl.load(at + CHUNK)[None, :]
            of_chunk = tl.load(decays + in_order * (2 * CHUNK) + CHUNK - 1)
            rounded = state.to(dtype)
            known = since_start * tl.dot(rounded, tl.trans(k), input_precision=_PRECISION)
            missing = (tl.trans(v).to(tl.float32) - known).to(dtype)
            value = tl.dot(rounded, tl.trans(q), input_precision=_PRECISION) * (since_start * scale)
            correction = tl.dot(missing, tl.trans(inverse), input_precision=_PRECISION)
            decayed = (correction * to_end).to(dtype)
            value = tl.dot(correction.to(dtype), tl.trans(score), value, input_precision=_PRECISION)
            state = tl.dot(decayed, k, state * of_chunk, input_precision=_PRECISION)
            out_at = out + token * (NUM_HEADS * DIM) + head * DIM + columns[None, :]
            tl.store(out_at, tl.trans(value.to(out.dtype.element_ty)), mask=inside)
        cell = tl.where(part == 0, snapshot, write)
        if cell >= 0:
            store_matrix(states + cell * (NUM_HEADS * DIM * DIM) + in_state, tl.trans(state), DIM, COLUMNS)


def scan_chunks(
    out: Tensor,
    qkv: Tensor,
    mixed: Tensor,
    b: Tensor,
    a: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    tails: Tensor,
    states: Tensor,
    cu_seqlens: Tensor,
    reads: Tensor,
    writes: Tensor,
    snapshots: Tensor,
    snapshot_lens: Tensor,
    num_key_heads: int,
) -> None:
    """The rule's outputs before the norm into out, and new tails and states. On a GPU, or in Triton's interpreter.

    out: `[num_tokens, num_value_heads * dim]`. mixed: q, k and v after the convolution `[num_tokens, conv_dim]`,
    contiguous, in the dtype that the products are computed in. The other arguments are those of
    `gated_delta.delta_rule_prefill`.
    """
    num_tokens, conv_dim = mixed.shape
    num_seqs, num_heads, dim = len(reads), states.shape[1], states.shape[2]
    num_chunks = count_chunks(num_tokens, num_seqs)
    inverses, scores = mixed.new_empty(2, num_chunks, num_heads, CHUNK, CHUNK).unbind(0)
    # Of each token, the decay since its chunk's start, and that to the chunk's end.
    decays = torch.empty(num_chunks, num_heads, 2, CHUNK, dtype=torch.float32, device=mixed.device)
    scale = dim**-0.5
    # An inverse has no large entries, and float16 rounds them eight times as finely as bfloat16.
    inverse_dtype = tl.float32 if mixed.dtype == torch.float32 else tl.float16
    sizes = {"NUM_KEY_HEADS": num_key_heads, "NUM_HEADS": num_heads, "DIM": dim, "CHUNK": CHUNK}
    launcher(_prepare_chunks_kernel, (num_heads, num_chunks))(
        inverses, scores, decays, mixed, b, a, A_log, dt_bias, cu_seqlens, num_seqs, b.stride(0), a.stride(0),
        scale, **sizes, INVERSE_DTYPE=inverse_dtype, num_warps=4,
        maxnreg=None if mixed.dtype == torch.float32 else _PREPARE_REGISTERS,
    )  # fmt: skip
    config = choose_scan(dim, mixed.element_size(), mixed.device)
    blocks = dim // config.columns
    channels = triton.next_power_of_2(triton.cdiv(conv_dim, num_heads * blocks))
    launcher(_scan_chunks_kernel, (blocks, num_heads, num_seqs))(
        out, qkv, mixed, inverses, scores, decays, tails, states, cu_seqlens, reads, writes, snapshots,
        snapshot_lens, qkv.stride(0), scale, **sizes, COLUMNS=config.columns, CHANNELS=channels,
        STAGES=config.num_stages, num_warps=config.num_warps,
    )  # fmt: skip
