"""RMS normalization over the last dimension."""

import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.triton_stub import tl, triton


@triton.jit
def _rms_norm_kernel(
    x, weight, y, sum_scale, x_stride, y_stride, eps,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr, HEADS: tl.constexpr = 1,
):  # fmt: skip
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    if HEADS > 1:  # The heads of a token lie side by side.
        x += row % HEADS * HIDDEN
        y += row % HEADS * HIDDEN
        row = row // HEADS
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    # Loaded before the reduction, so that its latency overlaps with that of the row.
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    y_at = y + row * y_stride + columns
    if ADD:
        before = tl.load(y_at, mask=mask, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
    normed = value * inverse_rms * scale
    if ADD:
        normed += before
        if sum_scale is not None:
            normed *= tl.load(sum_scale).to(tl.float32)
    tl.store(y_at, normed.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _rms_norm_of_sum_kernel(
    x, residual, weight, y, total, x_stride, residual_stride, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < HIDDEN
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value += tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    rounded = value.to(total.dtype.element_ty)
    tl.store(total + row * HIDDEN + columns, rounded, mask=mask)
    value = rounded.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + eps)
    tl.store(y + row * HIDDEN + columns, (value * inverse_rms * scale).to(y.dtype.element_ty), mask=mask)


@kernel_or_twin
def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` for each row, in float32, rounded once (Zhang & Sennrich 2019).

    x: `[num_tokens, hidden]`, any float dtype and row stride, contiguous in its last dimension. weight: `[hidden]`.
    Returns `out`, a tensor like x which may be x itself, or a new contiguous one. The kernel raises ValueError for
    other strides or another weight. The twin accepts any number of leading dimensions.
    """
    value = x.float()
    inverse_rms = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    normed = (value * inverse_rms * weight.float()).to(x.dtype)
    return normed if out is None else out.copy_(normed)


@kernel_or_twin
def rms_norm_add(residual: Tensor, x: Tensor, weight: Tensor, eps: float, sum_scale: Tensor | None = None) -> Tensor:
    """`residual = (residual + rms_norm(x)) * sum_scale`, in float32, rounded once. Arguments and errors are those of
    `rms_norm`; residual is like x. sum_scale: `[1]`; None for 1. Returns residual."""
    total = residual.float() + rms_norm.twin(x.float(), weight, eps)
    return residual.copy_(total if sum_scale is None else total * sum_scale.float())


@kernel_or_twin
def rms_norm_heads(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of each head of x, `[num_tokens, heads, hidden]`: packed within a token, any stride between tokens.
    Returns a new contiguous tensor."""
    return rms_norm.twin(x, weight, eps)


@kernel_or_twin
def rms_norm_of_sum(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`total = x + residual`, rounded; and `rms_norm(total)`. Returns the norm and the total, in new tensors.
    x and residual: as x of `rms_norm`, `[num_tokens, hidden]` and of one dtype. Errors are those of `rms_norm`."""
    total = x + residual
    return rms_norm.twin(total, weight, eps), total


@kernel_of(rms_norm)
def _launch_rms_norm(x, weight, eps, out=None):
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    return _launch(x, weight, eps, y, add=False)


@kernel_of(rms_norm_add)
def _launch_rms_norm_add(residual, x, weight, eps, sum_scale=None):
    return _launch(x, weight, eps, residual, add=True, sum_scale=sum_scale)


@kernel_of(rms_norm_heads)
def _launch_rms_norm_heads(x, weight, eps):
    num_tokens, heads, hidden = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.stride(2) != 1 or (heads > 1 and x.stride(1) != hidden) or weight.shape != (hidden,):
        raise _layout_error(x, weight)
    if num_tokens:
        launcher(_rms_norm_kernel, (num_tokens * heads,), has_pdl(x.device))(
            x, weight, y, None, x.stride(0), y.stride(0), eps, HIDDEN=hidden, ADD=False, HEADS=heads, **_sizes(hidden)
        )
    return y


@kernel_of(rms_norm_of_sum)
def _launch_rms_norm_of_sum(x, residual, weight, eps):
    num_tokens, hidden = x.shape
    y, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    for each in (x, residual):
        if each.stride(1) != 1 or weight.shape != (hidden,) or each.shape != x.shape:
            raise _layout_error(each, weight)
    if num_tokens:
        strides = x.stride(0), residual.stride(0)
        launcher(_rms_norm_of_sum_kernel, (num_tokens,))(
            x, residual, weight, y, total, *strides, eps, HIDDEN=hidden, **_sizes(hidden)
        )
    return y, total


def _launch(x: Tensor, weight: Tensor, eps: float, y: Tensor, add: bool, sum_scale: Tensor | None = None) -> Tensor:
    num_tokens, hidden = x.shape
    if x.stride(1) != 1 or weight.shape != (hidden,):
        raise _layout_error(x, weight)
    if y.shape != x.shape or y.stride(1) != 1:
        raise ValueError(
            f"the output must be contiguous in its last dimension and of x's shape {list(x.shape)}, not "
            f"{list(y.shape)} with strides {y.stride()}"
        )
    if num_tokens == 0:
        return y
    launcher(_rms_norm_kernel, (num_tokens,), has_pdl(x.device))(
        x, weight, y, sum_scale, x.stride(0), y.stride(0), eps, HIDDEN=hidden, ADD=add, **_sizes(hidden)
    )
    return y


def _sizes(hidden: int) -> dict[str, int]:
    block = triton.next_power_of_2(hidden)
    # 8 elements a thread are one 16-byte load of a half-precision row.
    return {"BLOCK": block, "num_warps": min(max(block // 256, 1), 16)}


def _layout_error(x: Tensor, weight: Tensor) -> ValueError:
    return ValueError(
        f"x must be contiguous in its last dimension, and weight must be as long: their shapes are {list(x.shape)} "
        f"and {list(weight.shape)}, the strides of x {x.stride()}"
    )
