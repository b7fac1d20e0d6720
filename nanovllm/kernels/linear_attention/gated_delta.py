"""The gated delta rule, a linear attention (Yang et al. 2024, "Gated Delta Networks").

Each value head has a state S `[key_dim, value_dim]`, which a token reads and changes:

    S = exp(g) S;    S = S + k (beta (v - k S))^T;    o = q S / sqrt(key_dim)

q, k and v come from a causal convolution (`causal_conv`). g is `-exp(A_log) softplus(a + dt_bias)`, beta is sigmoid(b).
Neighbouring value heads share a key head. The output is `rms_norm(o) silu(z)` per head. Everything is computed in
float32. The output of the rule is rounded to the dtype of the model before the norm, as transformers does.

The functions share these arguments:

- qkv: `[num_tokens, conv_dim]`, with conv_dim = 2 * num_key_heads * key_dim + num_value_heads * value_dim: q, k and v
  before the convolution. This and the next three may be slices of a wider tensor, contiguous in the last dimension.
- z: `[num_tokens, num_value_heads * value_dim]`.
- b, a: `[num_tokens, num_value_heads]`.
- conv_weight: `[conv_dim, taps]`, contiguous. The kernels have 4 taps.
- A_log, dt_bias: `[num_value_heads]`.
- norm_weight: `[value_dim]`; eps: added to the mean square of a head.
- tails: `[num_cells, taps - 1, conv_dim]` in qkv's dtype, contiguous: the last inputs of a sequence's convolution, the
  oldest first.
- states: `[num_cells, num_value_heads, key_dim, value_dim]`, contiguous, float32, float16 or bfloat16. The numbers of
  each state are in the order of `state_order`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.linear_attention.causal_conv import (
    TAPS,
    convolve_rows_triton,
    convolve_sequences_triton,
    convolve_torch,
    count_rows,
    load_proposed,
    silu,
)
from nanovllm.kernels.linear_attention.chunked_delta import scan_chunks, softplus
from nanovllm.kernels.linear_attention.chunks import CHUNK
from nanovllm.kernels.linear_attention.gated_norm import gated_rms_norm
from nanovllm.kernels.linear_attention.state_order import (
    DIMS,
    STRIP,
    by_dims,
    in_memory_order,
    load_state,
    store_state,
)
from nanovllm.kernels.triton_stub import tl, triton

MAX_REGISTERS = 128  # of a thread: with half a multiprocessor's, a program loads a state while another computes


@triton.jit
def sum_keys(x):
    """Over the key dims of a state (`load_state`): [DIM // STRIP, STRIP]."""
    return tl.sum(tl.sum(x, axis=0), axis=1)


@triton.jit
def spread(x, DIM: tl.constexpr):
    """[DIM] as the key dims of a state. The gather changes nothing, but the compiler takes no layout through it, and
    would take one from a load of x to the state."""
    return tl.reshape(tl.gather(x, tl.arange(0, DIM), 0), [DIM // 8, 1, 8, 1])


@triton.jit
def next_token(state, q_at, k_at, v_at, a_at, b_at, rate, bias, scale, DIM: tl.constexpr):
    """A head's state (`load_state`) after a token, and the token's output [DIM // STRIP, STRIP] before the norm."""
    # All loads come before the first exchange between threads, which waits for its own.
    k, q, v = tl.load(k_at), tl.load(q_at), tl.load(v_at)
    decay = tl.load(a_at).to(tl.float32) + bias
    beta = tl.sigmoid(tl.load(b_at).to(tl.float32))
    decay = tl.exp(-rate * softplus(decay))
    k, q = spread(k, DIM), spread(q, DIM)
    state = decay * state
    delta = beta * (v - sum_keys(k * state))
    # In the order of the sums, backwards, so that no layout changes.
    state += k * tl.expand_dims(tl.expand_dims(delta, 1), 0)
    return state, sum_keys(q * state) * scale


@triton.jit
def gated_norm(value, z_at, weight, eps, dtype: tl.constexpr, DIM: tl.constexpr):
    """value: [DIM // STRIP, STRIP], a head's output. dtype: that of the model, to which it is rounded first."""
    value = value.to(dtype).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(tl.sum(value * value, axis=1), axis=0) / DIM + eps)
    return (value * inverse_rms * weight * silu(tl.load(z_at).to(tl.float32))).to(dtype)


@triton.jit(
    do_not_specialize=["num_rows", "b_stride", "a_stride"],
    do_not_specialize_on_alignment=["b", "a", "cells", "context_lens", "is_proposed"],
)
def _decode_kernel(
    out, mixed, z, b, a, A_log, dt_bias, norm_weight, states, cells, context_lens, is_proposed, num_rows, z_stride,
    b_stride, a_stride, scale, eps,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, STRIP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The program of a sequence's first row computes all its rows. It reads the state before it waits, because the
    states were written in an earlier step. It writes the state after the last row, and after each row that a proposed
    token follows."""
    CONV_DIM: tl.constexpr = (2 * NUM_KEY_HEADS + NUM_HEADS) * DIM
    head = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    cell = tl.load(cells + row).to(tl.int64)
    before = tl.load(cells + row - 1, mask=row >= 1, other=-1)
    following = tl.load(cells + row + 1, mask=row + 1 < num_rows, other=-1)
    context_len = tl.load(context_lens + row)
    continues = load_proposed(is_proposed, row, num_rows)
    dims = tl.arange(0, DIM)
    columns = tl.arange(0, DIM // STRIP)[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
    out_at = out + (row.to(tl.int64) * NUM_HEADS + head) * DIM
    # No row has a length below 0. Its comparison here makes the compiler load it beside the cells, and not after them.
    if (cell < 0) | (before == cell) | (context_len < 0) | continues:
        if cell < 0:
            if PDL:
                gdc_wait()
            tl.store(out_at + dims, tl.zeros([DIM], out.dtype.element_ty))
        return
    write = states + (cell * NUM_HEADS + head) * (DIM * DIM)
    state = load_state(write, context_len > 1, DIM, DIM)
    rate = tl.exp(tl.load(A_log + head).to(tl.float32))
    bias = tl.load(dt_bias + head).to(tl.float32)
    count = count_rows(cells, is_proposed, row, cell, following, num_rows)
    cells_at = cells + row
    if PDL:
        gdc_wait()
    row = row.to(tl.int64)
    q_at = mixed + row * CONV_DIM + head // (NUM_HEADS // NUM_KEY_HEADS) * DIM + dims
    k_at = q_at + NUM_KEY_HEADS * DIM
    v_at = mixed + row * CONV_DIM + (2 * NUM_KEY_HEADS + head) * DIM + columns
    z_at = z + row * z_stride + head * DIM + columns
    weight = tl.load(norm_weight + columns).to(tl.float32)
    for i in range(0, count):
        state, value = next_token(
            state, q_at + i * CONV_DIM, k_at + i * CONV_DIM, v_at + i * CONV_DIM, a + (row + i) * a_stride + head,
            b + (row + i) * b_stride + head, rate, bias, scale, DIM,
        )  # fmt: skip
        is_followed = load_proposed(is_proposed, row + i + 1, row + count)
        if is_followed | (i + 1 == count):
            store_state(write, state, DIM, DIM)
            if is_followed:
                # A proposed token begins with what a step of its own would read.
                state = state.to(states.dtype.element_ty).to(tl.float32)
                cell = tl.load(cells_at + i + 1).to(tl.int64)
                write = states + (cell * NUM_HEADS + head) * (DIM * DIM)
        value = gated_norm(value, z_at + i * z_stride, weight, eps, out.dtype.element_ty, DIM)
        tl.store(out_at + i * (NUM_HEADS * DIM) + columns, value)


@kernel_or_twin
def delta_rule_decode(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    eps: float,
    tails: Tensor,
    states: Tensor,
    cells: Tensor,
    context_lens: Tensor,
    num_key_heads: int,
    num_value_heads: int,
    is_proposed: Tensor | None = None,
) -> Tensor:
    """One token a row. Tails and states are updated in place.

    Rows of one sequence follow each other, in the order of their positions. Those of a prompt have equal cells. A token
    that is only proposed (speculation) continues the row before, and its tail and state are written to a cell of its
    own. So those before it are kept.

    Args:
        cells: int32 `[num_tokens]`, where a row's tail and state are written; -1 is a padding row, whose output is
            zeros.
        context_lens: int32 `[num_tokens]`, the tokens of the sequence up to the row's own. A row of 1 begins with a
            state of zeros, whatever its cell holds.
        is_proposed: int32 `[num_tokens]`, 1 if the row's token is only proposed, else 0. None: no token is.

    Returns:
        `[num_tokens, num_value_heads * value_dim]`.
    """
    check_arguments(qkv, z, b, a, conv_weight, tails, states, num_key_heads, num_value_heads)
    # Rows of different sequences are computed together: first each sequence's first row, then the second.
    key_dim, value_dim = states.shape[2:]
    out = qkv.new_zeros(len(qkv), num_value_heads, value_dim)
    log_decay, beta = _gates(a, b, A_log, dt_bias)
    ranks = ranks_of_rows(cells, is_proposed).masked_fill(cells < 0, -1)
    writes = cells.long()
    back = torch.arange(conv_weight.shape[1] - 1, 0, -1, device=qkv.device)
    for rank in range(int(ranks.max()) + 1 if len(ranks) else 0):
        rows = torch.nonzero(ranks == rank).squeeze(1)
        write, position = writes[rows], context_lens[rows, None] - 1
        read = writes[rows - 1] if rank else write
        tail = torch.where((position >= back)[:, :, None], tails[read], 0)
        windows = torch.cat((tail, qkv[rows, None]), dim=1)
        tails[write] = windows[:, 1:]
        q, k, v = split_heads(convolve_torch(windows, conv_weight, key_dim, num_key_heads), states.shape, num_key_heads)
        state = torch.where((position > 0)[:, :, None, None], by_dims(states[read]).float(), 0)
        state = state * log_decay[rows].exp()[:, :, None, None]
        delta = (v - torch.einsum("rhk,rhkv->rhv", k, state)) * beta[rows, :, None]
        state = state + k[:, :, :, None] * delta[:, :, None, :]
        states[write] = in_memory_order(state.to(states.dtype))
        out[rows] = torch.einsum("rhk,rhkv->rhv", q, state).to(out.dtype)
    return gated_rms_norm.twin(out.flatten(1), z, norm_weight, eps)


@kernel_or_twin
def delta_rule_prefill(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    tails: Tensor,
    states: Tensor,
    cu_seqlens: Tensor,
    reads: Tensor,
    writes: Tensor,
    snapshots: Tensor,
    snapshot_lens: Tensor,
    num_key_heads: int,
    num_value_heads: int,
) -> Tensor:
    """A flat batch of sequences, by chunks.

    No cell that a sequence writes is read or written by another sequence of the batch.

    Args:
        cu_seqlens: int32 `[num_seqs + 1]`, running totals from 0 of the new tokens.
        reads: int32 `[num_seqs]`, the cell with the tail and the state that a sequence continues from; -1: zeros.
        writes: int32 `[num_seqs]`, the cell for its last tail and state; it may be the one in `reads`. -1: none.
        snapshots: int32 `[num_seqs]`, the cell for its tail and state after `snapshot_lens` tokens. -1: none.
        snapshot_lens: int32 `[num_seqs]`, multiples of `CHUNK` from 1 up to the number of new tokens. Not read where
            there is no snapshot.

    Returns:
        `[num_tokens, num_value_heads * value_dim]`; without a norm_weight before the norm and the gate, which are then
        the caller's (`gated_rms_norm`).
    """
    check_arguments(qkv, z, b, a, conv_weight, tails, states, num_key_heads, num_value_heads)
    key_dim, value_dim = states.shape[2:]
    taps = conv_weight.shape[1]
    out = qkv.new_empty(len(qkv), num_value_heads, value_dim)
    log_decay, beta = _gates(a, b, A_log, dt_bias)
    places = zip(*(each.tolist() for each in (reads, writes, snapshots, snapshot_lens)), strict=True)
    bounds = cu_seqlens.tolist()
    for (read, write, snapshot, snapshot_len), start, end in zip(places, bounds, bounds[1:], strict=False):
        tail, state = qkv.new_zeros(tails.shape[1:]), qkv.new_zeros(states.shape[1:], dtype=torch.float32)
        if read >= 0:
            tail, state = tails[read], by_dims(states[read]).float()
        inputs = torch.cat((tail, qkv[start:end]))
        windows = torch.stack([inputs[tap : tap + end - start] for tap in range(taps)], dim=1)
        mixed = convolve_torch(windows, conv_weight, key_dim, num_key_heads)
        # Heads first, for products of matrices.
        heads = [x.transpose(0, 1) for x in split_heads(mixed, states.shape, num_key_heads)]
        gates = [x[start:end].t() for x in (log_decay, beta)]
        for first in range(0, end - start, CHUNK):
            last = min(first + CHUNK, end - start)
            q, k, v, g, beta_row = (x[:, first:last] for x in (*heads, *gates))
            chunk_out, state = _chunk_step(q, k, v, g, beta_row, state)
            out[start + first : start + last] = chunk_out.transpose(0, 1).to(out.dtype)
            if snapshot >= 0 and last == snapshot_len:
                tails[snapshot] = inputs[last : last + taps - 1]
                states[snapshot] = in_memory_order(state.to(states.dtype))
        if write >= 0:
            tails[write] = inputs[len(inputs) - taps + 1 :]
            states[write] = in_memory_order(state.to(states.dtype))
    out = out.flatten(1)
    return out if norm_weight is None else gated_rms_norm.twin(out, z, norm_weight, eps)


def _chunk_step(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs of a chunk, and the state after it, by products of matrices.

    A token's correction is `beta (v - k S)`, where S is the chunk's first state plus the corrections of the chunk's
    earlier tokens. So all corrections are the solution of one triangular system.

    q, k: `[heads, tokens, key_dim]`. v: `[heads, tokens, value_dim]`. log_decay, beta: `[heads, tokens]`. state:
    `[heads, key_dim, value_dim]`.
    """
    total = log_decay.cumsum(1)[:, :, None]
    decay = (total - total.transpose(1, 2)).tril().exp().tril()  # from each earlier token to each token
    since_start, to_end = total.exp(), (total[:, -1:] - total).exp()
    system = beta[:, :, None] * (k @ k.transpose(1, 2)) * decay
    corrections = torch.linalg.solve_triangular(
        system, beta[:, :, None] * (v - since_start * (k @ state)), upper=False, unitriangular=True
    )
    out = since_start * (q @ state) + ((q @ k.transpose(1, 2)) * decay) @ corrections
    return out, since_start[:, -1:] * state + (to_end * k).transpose(1, 2) @ corrections


def _gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g and beta, float32 `[num_tokens, num_value_heads]`."""
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def split_heads(mixed: Tensor, state_shape: torch.Size, num_key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, scaled, k and v of each value head: `[num_tokens, num_value_heads, dim]`."""
    _, num_value_heads, key_dim, value_dim = state_shape
    size = num_key_heads * key_dim
    q, k, v = mixed.split((size, size, num_value_heads * value_dim), dim=1)
    group = num_value_heads // num_key_heads
    q, k = (x.reshape(len(x), num_key_heads, key_dim).repeat_interleave(group, dim=1) for x in (q, k))
    return q * key_dim**-0.5, k, v.reshape(len(v), num_value_heads, value_dim)


def ranks_of_rows(cells: Tensor, is_proposed: Tensor | None) -> Tensor:
    """How many rows of the same sequence are right before each row."""
    rows = torch.arange(len(cells), device=cells.device)
    is_first = torch.ones_like(cells, dtype=torch.bool)
    is_first[1:] = cells[1:] != cells[:-1]
    if is_proposed is not None:
        is_first &= is_proposed == 0
    return rows - torch.where(is_first, rows, 0).cummax(0).values


@kernel_of(delta_rule_decode)
def _launch_delta_rule_decode(
    qkv, z, b, a, conv_weight, A_log, dt_bias, norm_weight, eps, tails, states,
    cells, context_lens, num_key_heads, num_value_heads, is_proposed=None,
):  # fmt: skip
    """Two launches. The first one writes q, k and v and the new tails, which several heads share.

    Both are dependent launches (`dependent_launch`), and read cells, lengths, tails and states before they wait. So an
    ordinary launch must come between two calls with the same states, as between any two steps.
    """
    check_arguments(qkv, z, b, a, conv_weight, tails, states, num_key_heads, num_value_heads)
    dim = check_kernel(conv_weight, states)
    num_rows = len(qkv)
    out = torch.empty(num_rows, num_value_heads * dim, dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return out
    mixed = convolve_rows_triton(qkv, conv_weight, tails, cells, context_lens, is_proposed, dim, num_key_heads)
    launcher(_decode_kernel, (num_value_heads, num_rows), has_pdl(qkv.device))(
        out, mixed, z, b, a, A_log, dt_bias, norm_weight, states, cells, context_lens, is_proposed, num_rows,
        z.stride(0), b.stride(0), a.stride(0), dim**-0.5, eps,
        NUM_KEY_HEADS=num_key_heads, NUM_HEADS=num_value_heads, DIM=dim, STRIP=STRIP,
        num_warps=dim // STRIP, maxnreg=MAX_REGISTERS,
    )  # fmt: skip
    return out


@kernel_of(delta_rule_prefill)
def _launch_delta_rule_prefill(
    qkv, z, b, a, conv_weight, A_log, dt_bias, norm_weight, eps, tails, states,
    cu_seqlens, reads, writes, snapshots, snapshot_lens, num_key_heads, num_value_heads,
):  # fmt: skip
    """The convolution, what a chunk needs of its own tokens alone, the scan over chunks, and the norm."""
    check_arguments(qkv, z, b, a, conv_weight, tails, states, num_key_heads, num_value_heads)
    dim = check_kernel(conv_weight, states)
    num_tokens = len(qkv)
    out = torch.empty(num_tokens, num_value_heads * dim, dtype=qkv.dtype, device=qkv.device)
    if num_tokens == 0:
        return out
    mixed = convolve_sequences_triton(qkv, conv_weight, tails, cu_seqlens, reads, dim, num_key_heads)
    places = cu_seqlens, reads, writes, snapshots, snapshot_lens
    scan_chunks(out, qkv, mixed, b, a, A_log, dt_bias, tails, states, *places, num_key_heads)
    return out if norm_weight is None else gated_rms_norm.kernel(out, z, norm_weight, eps)


def check_kernel(conv_weight: Tensor, states: Tensor) -> int:
    """The size of all heads. Raises ValueError for sizes that the kernels do not have."""
    key_dim, value_dim = states.shape[2:]
    if conv_weight.shape[1] != TAPS or key_dim != value_dim or key_dim not in DIMS:
        raise ValueError(
            f"on a GPU, linear attention needs a convolution of {TAPS} taps, and keys and values of one size, 16, 32, "
            f"64 or 128: here {conv_weight.shape[1]} taps, keys of {key_dim} and values of {value_dim}"
        )
    return key_dim


def check_arguments(
    qkv: Tensor,
    z: Tensor,
    b: Tensor,
    a: Tensor,
    conv_weight: Tensor,
    tails: Tensor,
    states: Tensor,
    num_key_heads: int,
    num_value_heads: int,
) -> None:
    """Raise ValueError if a function would read or write outside a tensor."""
    key_dim, value_dim = states.shape[2:]
    size = num_value_heads * value_dim
    conv_dim = 2 * num_key_heads * key_dim + size
    expected = {
        "qkv": (qkv, (len(qkv), conv_dim)),
        "z": (z, (len(qkv), size)),
        "b": (b, (len(qkv), num_value_heads)),
        "a": (a, (len(qkv), num_value_heads)),
        "conv_weight": (conv_weight, (conv_dim, conv_weight.shape[1])),
        "tails": (tails, (len(states), conv_weight.shape[1] - 1, conv_dim)),
        "states": (states, (len(states), num_value_heads, key_dim, value_dim)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be {list(shape)} with contiguous rows, not {list(tensor.shape)}")
    if num_value_heads % num_key_heads:
        raise ValueError(f"num_value_heads ({num_value_heads}) must be a multiple of num_key_heads ({num_key_heads})")
