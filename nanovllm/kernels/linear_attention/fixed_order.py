"""The gated delta rule that gives a token the same bits in each step: for `deterministic=True`.

A prefill computes a state token by token, as decode steps do, and rounds it after each to the dtype in which it is
kept. So chunks, a cached beginning and a preemption change nothing. Sequences of a batch go on side by side, and no
operation sums over them. Arguments and results are those of `gated_delta`.

On a GPU two kernels compute both kinds of steps, the convolution and the rule. What a step is, they are told by numbers
that no variant is compiled for, so that a token goes through the same instructions.
"""

import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.linear_attention.causal_conv import L2_EPS, load_float, silu_and_norm
from nanovllm.kernels.linear_attention.gated_delta import (
    MAX_REGISTERS,
    check_arguments,
    check_kernel,
    gated_norm,
    next_token,
    ranks_of_rows,
    split_heads,
)
from nanovllm.kernels.linear_attention.state_order import (
    STRIP,
    by_dims,
    in_memory_order,
    load_state,
    store_state,
)
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.triton_stub import tl, triton

_ROW_TILE = 512  # channels of a program of the convolution
_SEQS = 256  # that it compares at a time
# A compiler may compute a loop's first pass apart, and fuse other products with sums there than in the others.
_UNFUSED = {"enable_fp_fusion": False}
_LINEAR_FROM = 20.0  # where softplus is the identity, as torch's


@kernel_or_twin
def fixed_order_decode(
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
    """`delta_rule_decode`."""
    check_arguments(qkv, z, b, a, conv_weight, tails, states, num_key_heads, num_value_heads)
    out = qkv.new_zeros(len(qkv), num_value_heads, states.shape[3])
    gates = _gates(a, b, A_log, dt_bias)
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
        state = torch.where((position > 0)[:, :, None, None], by_dims(states[read]), 0)
        heads = split_heads(_convolve(windows, conv_weight, states.shape, num_key_heads), states.shape, num_key_heads)
        after, of_rows = _next(state, *heads, *(each[rows] for each in gates))
        states[write] = in_memory_order(after)
        out[rows] = of_rows.to(out.dtype)
    return _gated_norm(out, z, norm_weight, eps)


@kernel_or_twin
def fixed_order_prefill(
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
    cu_seqlens: Tensor,
    reads: Tensor,
    writes: Tensor,
    snapshots: Tensor,
    snapshot_lens: Tensor,
    num_key_heads: int,
    num_value_heads: int,
) -> Tensor:
    """`delta_rule_prefill`."""
    check_arguments(qkv, z, b, a, conv_weight, tails, states, num_key_heads, num_value_heads)
    out = qkv.new_empty(len(qkv), num_value_heads, states.shape[3])
    gates = _gates(a, b, A_log, dt_bias)
    starts, num_taps = cu_seqlens.long(), conv_weight.shape[1]
    begins, lens = starts[:-1], starts.diff()
    state = states.new_zeros(len(lens), *states.shape[1:])
    of_convolution = qkv.new_empty(len(qkv), num_taps, qkv.shape[1])
    inputs = []
    for i, (start, end, read) in enumerate(zip(starts.tolist(), starts[1:].tolist(), reads.tolist(), strict=False)):
        tail = tails[read] if read >= 0 else qkv.new_zeros(tails.shape[1:])
        inputs.append(torch.cat((tail, qkv[start:end])))
        for tap in range(num_taps):
            of_convolution[start:end, tap] = inputs[i][tap : tap + end - start]
        if read >= 0:
            state[i] = by_dims(states[read])
    mixed = _convolve(of_convolution, conv_weight, states.shape, num_key_heads)
    heads = split_heads(mixed, states.shape, num_key_heads)
    for position in range(int(lens.max()) if len(lens) else 0):
        going_on = torch.nonzero(lens > position).squeeze(1)
        rows = begins[going_on] + position
        state[going_on], of_rows = _next(state[going_on], *(each[rows] for each in (*heads, *gates)))
        out[rows] = of_rows.to(out.dtype)
        for i in torch.nonzero((snapshots >= 0) & (snapshot_lens == position + 1)).squeeze(1).tolist():
            states[snapshots[i]] = in_memory_order(state[i])
            tails[snapshots[i]] = inputs[i][position + 1 : position + num_taps]
    for i, write in enumerate(writes.tolist()):
        if write >= 0:
            tails[write] = inputs[i][len(inputs[i]) - num_taps + 1 :]
            states[write] = in_memory_order(state[i])
    return _gated_norm(out, z, norm_weight, eps)


def _next(state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The state after a token, in the dtype of the one before, and the token's output in float32, of each row."""
    decayed = state.float() * log_decay.exp()[:, :, None, None]
    delta = (v - _sum_keys(k, decayed)) * beta[:, :, None]
    after = decayed + k[:, :, :, None] * delta[:, :, None, :]
    return after.to(state.dtype), _sum_keys(q, after)


def _sum_keys(x: Tensor, state: Tensor) -> Tensor:
    """`x S` of each row and head. Not a product of matrices, for which a library may choose an order."""
    return (x[:, :, :, None] * state).sum(2)


# torch's silu, sigmoid and softplus give the last numbers of a tensor other bits than the rest. Its exp does not.


def _sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """g and beta, float32 `[num_tokens, num_value_heads]`."""
    x = a.float() + dt_bias.float()
    softplus = torch.where(x > _LINEAR_FROM, x, torch.log1p(torch.exp(x)))
    return -A_log.float().exp() * softplus, _sigmoid(b.float())


def _convolve(windows: Tensor, weight: Tensor, state_shape: torch.Size, num_key_heads: int) -> Tensor:
    """`convolve_torch`."""
    mixed, key_dim = _silu((windows.float() * weight.float().t()).sum(1)), state_shape[2]
    heads = mixed[:, : 2 * num_key_heads * key_dim].view(len(mixed), 2 * num_key_heads, key_dim)
    heads *= torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
    return mixed


def _gated_norm(out: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = rms_norm.twin(out.float(), weight, eps) * _silu(z.reshape(out.shape).float())
    return normed.to(out.dtype).flatten(1)


@triton.jit
def _continues(cells, is_proposed, row, num_rows, num_flags):
    """Whether a row of a decode step goes on with the sequence of the row before. num_flags: of is_proposed; 0 if no
    token is proposed."""
    has_before = (row >= 1) & (row < num_rows)
    cell = tl.load(cells + row, mask=has_before, other=-1)
    before = tl.load(cells + row - 1, mask=has_before, other=-1)
    flag = tl.load(is_proposed + row, mask=has_before & (row < num_flags), other=0)
    return (cell >= 0) & ((cell == before) | (flag != 0))


# Variants for other addresses and strides could sum in other orders.
@triton.jit(
    do_not_specialize=["num_rows", "num_seqs", "num_flags", "is_prefill", "qkv_stride"],
    do_not_specialize_on_alignment=["qkv", "cells", "context_lens", "is_proposed", "cu_seqlens", "reads"],
)
def _fixed_order_convolution_kernel(
    mixed, qkv, weight, tails, cells, context_lens, is_proposed, cu_seqlens, reads, num_rows, num_seqs, num_flags,
    is_prefill, qkv_stride,
    NUM_NORMED: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HEADS: tl.constexpr, SEQS: tl.constexpr,
):  # fmt: skip
    """A program computes some heads of one row. It leaves the tails as they are, since others read them. rank: rows of
    the same sequence right before this one; known: inputs before the first of them."""
    CONV_DIM: tl.constexpr = NUM_HEADS * DIM
    row = tl.program_id(0)
    if is_prefill != 0:
        seq = 0
        for first in range(0, num_seqs, SEQS):
            seqs = first + tl.arange(0, SEQS)
            ends = tl.load(cu_seqlens + 1 + seqs, mask=seqs < num_seqs, other=num_rows)
            seq += tl.sum((ends <= row).to(tl.int32), axis=0)
        rank = row - tl.load(cu_seqlens + seq)
        cell = tl.load(reads + seq)
        known = tl.where(cell >= 0, 3, 0)
    else:
        is_second = _continues(cells, is_proposed, row, num_rows, num_flags)
        is_third = is_second & _continues(cells, is_proposed, row - 1, num_rows, num_flags)
        is_fourth = is_third & _continues(cells, is_proposed, row - 2, num_rows, num_flags)
        rank = is_second.to(tl.int32) + is_third.to(tl.int32) + is_fourth.to(tl.int32)
        cell = tl.load(cells + row - rank)
        known = tl.load(context_lens + row - rank) - 1
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    channel = head * DIM + tl.arange(0, DIM)[None, :]
    inside = channel < CONV_DIM
    new_at = qkv + row.to(tl.int64) * qkv_stride + channel
    old_at = tails + cell.to(tl.int64) * (3 * CONV_DIM) + channel
    value = tl.zeros([HEADS, DIM], tl.float32)
    for tap in tl.static_range(4):
        back = 3 - tap
        new = load_float(new_at - back * qkv_stride, channel < tl.where(rank >= back, CONV_DIM, 0))
        is_old = (rank < back) & (cell >= 0) & (known >= back - rank)
        old = load_float(old_at + (rank + tap) * CONV_DIM, channel < tl.where(is_old, CONV_DIM, 0))
        value = tl.fma(new + old, load_float(weight + channel * 4 + tap, inside), value)
    value = silu_and_norm(value, head < NUM_NORMED)
    tl.store(mixed + row.to(tl.int64) * CONV_DIM + channel, value, mask=inside)


@triton.jit
def _keep(
    state, x0, x1, x2, states, tails, cell, head, channel, NUM_HEADS: tl.constexpr, DIM: tl.constexpr,
    CONV_DIM: tl.constexpr,
):  # fmt: skip
    """Write a head's state, and some channels of the tail, to a cell."""
    cell = cell.to(tl.int64)
    store_state(states + (cell * NUM_HEADS + head) * (DIM * DIM), state, DIM, DIM)
    tail = tails + cell * (3 * CONV_DIM) + channel
    tl.store(tail, x0, mask=channel < CONV_DIM)
    tl.store(tail + CONV_DIM, x1, mask=channel < CONV_DIM)
    tl.store(tail + 2 * CONV_DIM, x2, mask=channel < CONV_DIM)


@triton.jit(
    do_not_specialize=[
        *("num_rows", "num_flags", "is_prefill", "qkv_stride", "z_stride", "b_stride", "a_stride"),
    ],
    do_not_specialize_on_alignment=[
        *("qkv", "z", "b", "a", "cells", "context_lens", "is_proposed"),
        *("cu_seqlens", "reads", "writes", "snapshots", "snapshot_lens"),
    ],
)
def _fixed_order_rule_kernel(
    out, mixed, qkv, z, b, a, A_log, dt_bias, norm_weight, tails, states, cells, context_lens, is_proposed,
    cu_seqlens, reads, writes, snapshots, snapshot_lens, num_rows, num_flags, is_prefill,
    qkv_stride, z_stride, b_stride, a_stride, scale, eps,
    NUM_KEY_HEADS: tl.constexpr, NUM_HEADS: tl.constexpr, DIM: tl.constexpr, STRIP: tl.constexpr,
    CHANNELS: tl.constexpr,
):  # fmt: skip
    """A program computes one head of a sequence, all its rows. It also keeps CHANNELS channels of the tails."""
    CONV_DIM: tl.constexpr = (2 * NUM_KEY_HEADS + NUM_HEADS) * DIM
    head = tl.program_id(0)
    row = tl.program_id(1)
    dims = tl.arange(0, DIM)
    write, snapshot, snapshot_len = -1, -1, 0
    if is_prefill != 0:
        seq = row
        row = tl.load(cu_seqlens + seq)
        count = tl.load(cu_seqlens + seq + 1) - row
        read = tl.load(reads + seq)
        known = tl.where(read >= 0, 3, 0)
        write = tl.load(writes + seq)
        snapshot = tl.load(snapshots + seq)
        snapshot_len = tl.load(snapshot_lens + seq)
    else:
        read = tl.load(cells + row)
        known = tl.load(context_lens + row) - 1
        count = 0
        if read < 0:
            at = out + (row.to(tl.int64) * NUM_HEADS + head) * DIM
            tl.store(at + dims, tl.zeros([DIM], out.dtype.element_ty))
        elif not _continues(cells, is_proposed, row, num_rows, num_flags):
            count = 1
            while _continues(cells, is_proposed, row + count, num_rows, num_flags):
                count += 1
    if count > 0:
        has_begun = (read >= 0) & (known > 0)
        columns = tl.arange(0, DIM // STRIP)[:, None] * STRIP + tl.arange(0, STRIP)[None, :]
        cell = read.to(tl.int64)
        state = load_state(states + (cell * NUM_HEADS + head) * (DIM * DIM), has_begun, DIM, DIM)
        channel = head * CHANNELS + tl.arange(0, CHANNELS)
        tail = tails + cell * (3 * CONV_DIM) + channel
        x0 = tl.load(tail, mask=channel < tl.where(has_begun & (known >= 3), CONV_DIM, 0), other=0.0)
        x1 = tl.load(tail + CONV_DIM, mask=channel < tl.where(has_begun & (known >= 2), CONV_DIM, 0), other=0.0)
        x2 = tl.load(tail + 2 * CONV_DIM, mask=channel < tl.where(has_begun, CONV_DIM, 0), other=0.0)
        rate = tl.exp(tl.load(A_log + head).to(tl.float32))
        bias = tl.load(dt_bias + head).to(tl.float32)
        weight = tl.load(norm_weight + columns).to(tl.float32)
        q_column = head // (NUM_HEADS // NUM_KEY_HEADS) * DIM + dims
        v_column = (2 * NUM_KEY_HEADS + head) * DIM + columns
        for i in range(0, count):
            token = (row + i).to(tl.int64)
            q_at = mixed + token * CONV_DIM + q_column
            state, value = next_token(
                state, q_at, q_at + NUM_KEY_HEADS * DIM, mixed + token * CONV_DIM + v_column,
                a + token * a_stride + head, b + token * b_stride + head, rate, bias, scale, DIM,
            )  # fmt: skip
            z_at = z + token * z_stride + head * DIM + columns
            value = gated_norm(value, z_at, weight, eps, out.dtype.element_ty, DIM)
            tl.store(out + (token * NUM_HEADS + head) * DIM + columns, value)
            state = state.to(states.dtype.element_ty).to(tl.float32)
            x0 = x1
            x1 = x2
            x2 = tl.load(qkv + token * qkv_stride + channel, mask=channel < CONV_DIM, other=0.0)
            is_last = i + 1 == count
            target = tl.where(is_last, write, -1)
            if is_prefill == 0:
                # A proposed token has a cell of its own, so that what was before it is kept.
                is_followed = tl.load(is_proposed + row + i + 1, mask=row + i + 1 < num_flags, other=0) != 0
                mine = tl.load(cells + row + i)
                target = tl.where(is_last | is_followed, mine, -1)
            if (i + 1 == snapshot_len) & (snapshot >= 0):
                _keep(state, x0, x1, x2, states, tails, snapshot, head, channel, NUM_HEADS, DIM, CONV_DIM)
            if target >= 0:
                _keep(state, x0, x1, x2, states, tails, target, head, channel, NUM_HEADS, DIM, CONV_DIM)


@kernel_of(fixed_order_decode)
def _launch_fixed_order_decode(
    qkv, z, b, a, conv_weight, A_log, dt_bias, norm_weight, eps, tails, states,
    cells, context_lens, num_key_heads, num_value_heads, is_proposed=None,
):  # fmt: skip
    check_arguments(qkv, z, b, a, conv_weight, tails, states, num_key_heads, num_value_heads)
    flags, num_flags = (cells, 0) if is_proposed is None else (is_proposed, len(is_proposed))
    # Without a prefill nothing reads its places.
    places = cells, context_lens, flags, *[cells] * 5
    tensors = qkv, z, b, a, conv_weight, A_log, dt_bias, norm_weight
    return _launch(tensors, eps, tails, states, places, len(qkv), num_flags, False, num_key_heads)


@kernel_of(fixed_order_prefill)
def _launch_fixed_order_prefill(
    qkv, z, b, a, conv_weight, A_log, dt_bias, norm_weight, eps, tails, states,
    cu_seqlens, reads, writes, snapshots, snapshot_lens, num_key_heads, num_value_heads,
):  # fmt: skip
    check_arguments(qkv, z, b, a, conv_weight, tails, states, num_key_heads, num_value_heads)
    places = *[reads] * 3, cu_seqlens, reads, writes, snapshots, snapshot_lens
    tensors = qkv, z, b, a, conv_weight, A_log, dt_bias, norm_weight
    return _launch(tensors, eps, tails, states, places, len(reads), 0, True, num_key_heads)


def _launch(
    tensors: tuple[Tensor, ...],
    eps: float,
    tails: Tensor,
    states: Tensor,
    places: tuple[Tensor, ...],
    num_programs: int,
    num_flags: int,
    is_prefill: bool,
    num_key_heads: int,
) -> Tensor:
    """places: int32, from cells to snapshot_lens. num_programs: sequences, or rows that may begin one."""
    qkv, z, b, a, conv_weight, A_log, dt_bias, norm_weight = tensors
    dim, num_heads = check_kernel(conv_weight, states), states.shape[1]
    num_rows, conv_dim = qkv.shape
    out = torch.empty(num_rows, num_heads * dim, dtype=qkv.dtype, device=qkv.device)
    if num_rows == 0:
        return out
    mixed = torch.empty(num_rows, conv_dim, dtype=torch.float32, device=qkv.device)
    heads = max(1, _ROW_TILE // dim)
    launcher(_fixed_order_convolution_kernel, (num_rows, triton.cdiv(conv_dim // dim, heads)))(
        mixed, qkv, conv_weight, tails, *places[:5], num_rows, num_programs, num_flags, int(is_prefill), qkv.stride(0),
        NUM_NORMED=2 * num_key_heads, NUM_HEADS=conv_dim // dim, DIM=dim, HEADS=heads, SEQS=_SEQS, num_warps=4,
        **_UNFUSED,
    )  # fmt: skip
    launcher(_fixed_order_rule_kernel, (num_heads, num_programs))(
        out, mixed, qkv, z, b, a, A_log, dt_bias, norm_weight, tails, states, *places, num_rows, num_flags,
        int(is_prefill), qkv.stride(0), z.stride(0), b.stride(0), a.stride(0), dim**-0.5, eps,
        NUM_KEY_HEADS=num_key_heads, NUM_HEADS=num_heads, DIM=dim, STRIP=STRIP,
        CHANNELS=triton.next_power_of_2(triton.cdiv(conv_dim, num_heads)),
        num_warps=dim // STRIP, maxnreg=MAX_REGISTERS, **_UNFUSED,
    )  # fmt: skip
    return out
