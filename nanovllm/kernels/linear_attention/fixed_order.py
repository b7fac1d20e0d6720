"""The gated delta rule that gives a token the same bits in each step: for `deterministic=True`, on a CPU.

A prefill computes a state token by token, as decode steps do, and rounds it after each to the dtype in which it is
kept. So chunks, a cached beginning and a preemption change nothing. Sequences of a batch go on side by side, and no
operation sums over them. Arguments and results are those of `gated_delta`.
"""

import torch
from torch import Tensor

from nanovllm.kernels.linear_attention.causal_conv import L2_EPS
from nanovllm.kernels.linear_attention.gated_delta import check_arguments, ranks_of_rows, split_heads
from nanovllm.kernels.rms_norm import rms_norm

_LINEAR_FROM = 20.0  # where softplus is the identity, as torch's


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
    back = torch.arange(conv_weight.shape[1] - 1, 0, -1)
    for rank in range(int(ranks.max()) + 1 if len(ranks) else 0):
        rows = torch.nonzero(ranks == rank).squeeze(1)
        write, position = writes[rows], context_lens[rows, None] - 1
        read = writes[rows - 1] if rank else write
        tail = torch.where((position >= back)[:, :, None], tails[read], 0)
        windows = torch.cat((tail, qkv[rows, None]), dim=1)
        tails[write] = windows[:, 1:]
        state = torch.where((position > 0)[:, :, None, None], states[read], 0)
        heads = split_heads(_convolve(windows, conv_weight, states.shape, num_key_heads), states.shape, num_key_heads)
        states[write], of_rows = _next(state, *heads, *(each[rows] for each in gates))
        out[rows] = of_rows.to(out.dtype)
    return _gated_norm(out, z, norm_weight, eps)


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
            state[i] = states[read]
    mixed = _convolve(of_convolution, conv_weight, states.shape, num_key_heads)
    heads = split_heads(mixed, states.shape, num_key_heads)
    for position in range(int(lens.max()) if len(lens) else 0):
        going_on = torch.nonzero(lens > position).squeeze(1)
        rows = begins[going_on] + position
        state[going_on], of_rows = _next(state[going_on], *(each[rows] for each in (*heads, *gates)))
        out[rows] = of_rows.to(out.dtype)
        for i in torch.nonzero((snapshots >= 0) & (snapshot_lens == position + 1)).squeeze(1).tolist():
            states[snapshots[i]] = state[i]
            tails[snapshots[i]] = inputs[i][position + 1 : position + num_taps]
    for i, write in enumerate(writes.tolist()):
        if write >= 0:
            tails[write], states[write] = inputs[i][len(inputs[i]) - num_taps + 1 :], state[i]
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
