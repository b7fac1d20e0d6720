"""Adds two partial sums to the residual once the second one has arrived, and computes the RMS norm of the result."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import launcher

# The most programs: each one checks for itself whether the second sum has arrived.
MAX_PROGRAMS = 1056


@triton.jit(do_not_specialize=["num_tokens", "number"])
def _add_norm_kernel(
    residual,
    first,
    second,
    weight,
    y,
    arrival,
    number,
    abort,
    num_tokens,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    mask = column < HIDDEN
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    seen = tl.atomic_add(arrival, 0, sem="acquire", scope="sys")
    while (seen != number) & (tl.load(abort, volatile=True) == 0):
        seen = tl.atomic_add(arrival, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    stride = tl.full([1], HIDDEN, tl.int64)
    for token in range(program, num_tokens, tl.num_programs(0)):
        row = token * stride + column
        total = tl.load(residual + row, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(first + row, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(second + row, mask=mask, other=0.0).to(tl.float32)
        rounded = total.to(residual.dtype.element_ty)
        tl.store(residual + row, rounded, mask=mask)
        value = rounded.to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
        tl.store(y + row, (value * inverse_rms * scale).to(y.dtype.element_ty), mask=mask)


def add_norm_arrived(
    residual: Tensor,
    first: Tensor,
    second: Tensor,
    weight: Tensor,
    eps: float,
    arrival: Tensor,
    number: int,
    abort: Tensor,
) -> Tensor:
    """`residual += first + second`, then `residual / sqrt(mean(residual^2) + eps) * weight`, in float32, each rounded
    once. Waits until `arrival` is `number`.

    Args:
        residual: `[num_tokens, hidden]`, contiguous, any float dtype; overwritten.
        first, second: like residual; added in this order.
        weight: `[hidden]`.
        eps: added to the mean square.
        arrival: int32, a scalar, which another device sets.
        number: the value that it is set to, below 2^31.
        abort: int32 `[1]`; a value other than 0 ends the waiting, and the results mean nothing.

    Returns:
        The norm, like residual.
    """
    num_tokens, hidden = residual.shape
    y = torch.empty_like(residual)
    block = triton.next_power_of_2(hidden)
    launcher(_add_norm_kernel, (min(num_tokens, MAX_PROGRAMS),))(
        residual,
        first,
        second,
        weight,
        y,
        arrival,
        number,
        abort,
        num_tokens,
        eps,
        HIDDEN=hidden,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 16),
    )
    return y
