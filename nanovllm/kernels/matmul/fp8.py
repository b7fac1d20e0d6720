"""Quantizes to e4m3: the inputs of fp8 products, with one scale a token or one for each 128 columns of a token.

A program quantizes one token: alone, or after the norm, the activation or the gate before it. What stands before is
rounded to the input's dtype in between, so that the numbers are those of two kernels.
"""

import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.linear_attention.gated_norm import gated_rms_norm
from nanovllm.kernels.matmul.linear_checks import BLOCK
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.sigmoid_gate import sigmoid_gate
from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.kernels.triton_stub import tl, triton

E4M3 = torch.float8_e4m3fn
GROUP = BLOCK
_E4M3_MAX = 448.0
# Up to so many columns, and from so many rows on, a program quantizes several rows.
_SHORT, _MANY_ROWS = 1024, 8192
_SMALLEST_SCALE = 1e-37  # The inverse of a smaller one overflows, or it is flushed to zero.


@triton.jit
def _rounded(value, dtype: tl.constexpr, PAIRS: tl.constexpr):
    """value, float32, rounded to dtype. PAIRS: two at a time, for a dtype of 16 bits; not in Triton's interpreter."""
    rounded = value.to(dtype)
    if PAIRS:
        # Does nothing but demand two numbers in a register. Then the arithmetic units convert two at once, instead of
        # the slow unit of exponentials one.
        rounded = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [rounded], rounded.dtype, is_pure=True, pack=2)
    return rounded.to(tl.float32)


@triton.jit
def _store_quantized(
    value, factor, y, scale, group_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr
):
    """A row of SIZE columns, the scales times factor. y, scale: where the row begins."""
    columns = tl.arange(0, BLOCK)
    groups = tl.reshape(value, (BLOCK // GROUP, GROUP))
    # A factor instead of a division, as in the twin.
    group_scale = tl.max(tl.abs(groups), axis=1) * (1.0 / 448.0)
    # The inverse of a smaller scale would overflow, or the scale be flushed to zero.
    inverse = tl.where(group_scale >= 1e-37, tl.div_rn(tl.full(group_scale.shape, 1.0, tl.float32), group_scale), 0.0)
    quantized = tl.reshape(groups * inverse[:, None], (BLOCK,))
    tl.store(y + columns, quantized.to(y.dtype.element_ty), mask=columns < SIZE)
    group = tl.arange(0, BLOCK // GROUP)
    tl.store(scale + group * group_stride, group_scale * factor, mask=group * GROUP < SIZE)


# Where groups have scales, their stride is the number of tokens.
@triton.jit(do_not_specialize=["group_stride"])
def _quantize_kernel(
    x, addend, norm_weight, gate, normed, y, scale, x_stride, addend_stride, gate_stride, y_stride, scale_stride,
    group_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """GROUP columns have a scale; BLOCK is a multiple of it."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x += row * x_stride
    loaded = tl.load(x + columns, mask=mask, other=0.0)
    value = loaded.to(tl.float32)
    PAIRS: tl.constexpr = PDL and loaded.dtype.primitive_bitwidth == 16
    if addend is not None:
        value += tl.load(addend + row * addend_stride + columns, mask=mask, other=0.0).to(tl.float32)
        value = _rounded(value, loaded.dtype, PAIRS)
        tl.store(x + columns, value.to(loaded.dtype), mask=mask)
    if norm_weight is not None:
        factor = tl.load(norm_weight + columns, mask=mask, other=0.0).to(tl.float32)
        inverse_rms = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
        value = _rounded(value * inverse_rms * factor, loaded.dtype, PAIRS)
        if normed is not None:
            tl.store(normed + row * SIZE + columns, value.to(loaded.dtype), mask=mask)
    if SILU:
        up = tl.load(x + SIZE + columns, mask=mask, other=0.0).to(tl.float32)
        # exp2 and the square of a reciprocal root take half the instructions of exp and a division.
        root = tl.rsqrt(1.0 + tl.exp2(value * -1.4426950408889634))
        value = _rounded(value * (root * root) * up, loaded.dtype, PAIRS)
    factor = 1.0
    if gate is not None:
        factor = 1.0 / (1.0 + tl.exp(-tl.load(gate + row * gate_stride).to(tl.float32)))
    y += row * y_stride
    _store_quantized(value, factor, y, scale + row * scale_stride, group_stride, SIZE, BLOCK, GROUP)


@triton.jit(do_not_specialize=["group_stride"])
def _gate_quantize_kernel(
    x, gate, norm_weight, y, scale, x_stride, gate_stride, y_stride, scale_stride, group_stride, eps,
    SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`gated_rms_norm` of heads of DIM columns, or without a norm_weight `sigmoid_gate`, quantized."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    loaded = tl.load(x + row * x_stride + columns, mask=mask, other=0.0)
    logit = tl.load(gate + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    value = loaded.to(tl.float32)
    PAIRS: tl.constexpr = PDL and loaded.dtype.primitive_bitwidth == 16
    if norm_weight is not None:
        heads = tl.reshape(value, (BLOCK // DIM, DIM))
        inverse_rms = tl.rsqrt(tl.sum(heads * heads, axis=1) / DIM + eps)
        weight = tl.load(norm_weight + tl.arange(0, DIM)).to(tl.float32)
        value = tl.reshape(heads * inverse_rms[:, None] * weight[None, :], (BLOCK,)) * logit
    value = _rounded(value / (1.0 + tl.exp(-logit)), loaded.dtype, PAIRS)
    y += row * y_stride
    _store_quantized(value, 1.0, y, scale + row * scale_stride, group_stride, SIZE, BLOCK, GROUP)


@triton.jit(do_not_specialize=["num_rows", "group_stride"])
def _quantize_rows_kernel(
    x, y, scale, num_rows, x_stride, y_stride, scale_stride, group_stride,
    SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_quantize_kernel` of plain rows that are too short to be worth a program each."""
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (columns < SIZE)
    value = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    groups = tl.reshape(value, (ROWS, BLOCK // GROUP, GROUP))
    group_scale = tl.max(tl.abs(groups), axis=2) * (1.0 / 448.0)
    inverse = tl.where(group_scale >= 1e-37, tl.div_rn(tl.full(group_scale.shape, 1.0, tl.float32), group_scale), 0.0)
    quantized = tl.reshape(groups * inverse[:, :, None], (ROWS, BLOCK))
    tl.store(y + row * y_stride + columns, quantized.to(y.dtype.element_ty), mask=mask)
    group = tl.arange(0, BLOCK // GROUP)[None, :]
    inside = (row < num_rows) & (group * GROUP < SIZE)
    tl.store(scale + row * scale_stride + group * group_stride, group_scale, mask=inside)


@kernel_or_twin
def quantize(x: Tensor, in_groups: bool, unit: int = 1) -> tuple[Tensor, Tensor]:
    """x as `values * scale`.

    Args:
        x: `[num_tokens, K]`, any float dtype. The kernel takes any row stride, contiguous in its last dimension.
        in_groups: whether each 128 columns of a token have a scale, instead of the whole token. K is a multiple of 128.
        unit: the kernel's results have a multiple of so many rows. Those beyond num_tokens hold anything.

    Returns:
        values: e4m3 `[num_rows, K]`, rounded to nearest, ties to even.
        scale: float32 `[num_rows, 1]`, or `[num_rows, K / 128]`, of the kernel with the tokens side by side in memory:
            the largest magnitude divided by 448.

    Raises:
        ValueError: another layout or K.
    """
    if not in_groups:
        return quantize_rows_torch(x)
    num_tokens, K = x.shape
    values, scale = quantize_rows_torch(x.reshape(-1, GROUP))
    return values.view(num_tokens, K), scale.view(num_tokens, K // GROUP)


@kernel_or_twin
def rms_norm_quantize(
    x: Tensor,
    weight: Tensor,
    eps: float,
    in_groups: bool,
    unit: int = 1,
    normed: Tensor | None = None,
    addend: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`quantize(rms_norm(x, weight, eps))`, the norm rounded to x's dtype (Zhang & Sennrich 2019).

    weight: `[K]`.
    normed: contiguous, like x: becomes the norm; None if it is not needed.
    addend: like x, rows contiguous: added to x before, in place; None for none.
    """
    value = rms_norm.twin(x if addend is None else x.add_(addend), weight, eps)
    return quantize.twin(value if normed is None else normed.copy_(value), in_groups)


@kernel_or_twin
def silu_and_mul_quantize(
    x: Tensor, in_groups: bool, unit: int = 1, gate: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`quantize(silu(gate) * up)` of x `[num_tokens, 2 * K]`, gate and up side by side (Shazeer 2020), the product
    rounded to x's dtype. gate: `[num_tokens, 1]`, any float dtype and row stride, whose sigmoid each token's scales are
    multiplied by; None for 1."""
    values, scale = quantize.twin(silu_and_mul.twin(x), in_groups)
    return values, scale if gate is None else scale / (1 + torch.exp(-gate.float()))


@kernel_or_twin
def sigmoid_gate_quantize(x: Tensor, gate: Tensor, in_groups: bool, unit: int = 1) -> tuple[Tensor, Tensor]:
    """`quantize(x * sigmoid(gate))`, the product rounded to x's dtype. gate: like x, of any float dtype and row
    stride. x may be overwritten."""
    return quantize.twin(sigmoid_gate.twin(x, gate), in_groups)


@kernel_or_twin
def gated_rms_norm_quantize(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, in_groups: bool, unit: int = 1
) -> tuple[Tensor, Tensor]:
    """`quantize(gated_rms_norm(x, gate, weight, eps))`, the norm rounded to x's dtype. x may be overwritten."""
    return quantize.twin(gated_rms_norm.twin(x, gate, weight, eps), in_groups)


def quantize_rows_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for each row of `[rows, columns]`; zeros where a row is zero, or so small that the inverse of its scale
    would overflow."""
    # A factor instead of a division, which GPUs round in several ways.
    scale = x.abs().amax(-1, keepdim=True).float() * (1 / _E4M3_MAX)
    inverse = torch.where(scale >= _SMALLEST_SCALE, 1 / scale, 0.0)
    return (x.float() * inverse).to(E4M3), scale


def quantize_blocks_torch(x: Tensor) -> tuple[Tensor, Tensor]:
    """One scale for each 128 x 128 block of `[rows, columns]`, both multiples of 128: `[rows / 128, columns / 128]`."""
    N, K = x.shape
    blocks = x.view(N // GROUP, GROUP, K // GROUP, GROUP).transpose(1, 2).reshape(-1, GROUP * GROUP)
    values, scale = quantize_rows_torch(blocks)
    values = values.view(N // GROUP, K // GROUP, GROUP, GROUP).transpose(1, 2).reshape(N, K)
    return values, scale.view(N // GROUP, K // GROUP)


def dequantize_torch(values: Tensor, scale: Tensor | None) -> Tensor:
    """`values * scale` in float32, `[..., rows, columns]`. scale: `[..., rows, 1]`, or one for each 128 columns of a
    row, or of 128 rows; None for 1."""
    values = values.float()
    if scale is None:
        return values
    num_rows, num_columns = values.shape[-2:]
    if scale.shape[-2:] == (num_rows, 1):
        return values * scale
    if scale.shape[-2] != num_rows:
        scale = scale.repeat_interleave(GROUP, -2)
    return values * scale.repeat_interleave(GROUP, -1)[..., :num_rows, :num_columns]


@kernel_of(quantize)
def _launch_quantize(x, in_groups, unit=1):
    return _launch(x, None, 0.0, x.shape[1], in_groups, unit, silu=False)


@kernel_of(rms_norm_quantize)
def _launch_rms_norm_quantize(x, weight, eps, in_groups, unit=1, normed=None, addend=None):
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"weight must be a contiguous [{x.shape[1]}], not {list(weight.shape)}")
    if normed is not None and (normed.shape != x.shape or normed.dtype != x.dtype or not normed.is_contiguous()):
        raise ValueError(f"normed must be a contiguous {list(x.shape)} of {x.dtype}, not {list(normed.shape)}")
    if addend is not None and (addend.shape != x.shape or addend.stride(1) != 1):
        raise ValueError(f"addend must be {list(x.shape)} with contiguous rows, not {list(addend.shape)}")
    return _launch(x, weight, eps, x.shape[1], in_groups, unit, silu=False, normed=normed, addend=addend)


@kernel_of(silu_and_mul_quantize)
def _launch_silu_and_mul_quantize(x, in_groups, unit=1, gate=None):
    if x.shape[1] % 2:
        raise ValueError(f"x must be [num_tokens, 2 * K], not {list(x.shape)}")
    if gate is not None and gate.shape != (len(x), 1):
        raise ValueError(f"gate must be [{len(x)}, 1], not {list(gate.shape)}")
    return _launch(x, None, 0.0, x.shape[1] // 2, in_groups, unit, silu=True, gate=gate)


@kernel_of(sigmoid_gate_quantize)
def _launch_sigmoid_gate_quantize(x, gate, in_groups, unit=1):
    return _launch_gate(x, gate, None, 0.0, in_groups, unit)


@kernel_of(gated_rms_norm_quantize)
def _launch_gated_rms_norm_quantize(x, gate, weight, eps, in_groups, unit=1):
    return _launch_gate(x, gate, weight, eps, in_groups, unit)


def _results(x: Tensor, size: int, in_groups: bool, unit: int) -> tuple[Tensor, Tensor]:
    """Where the kernels write. Raises ValueError for an x that they do not take."""
    if x.stride(1) != 1 or (in_groups and size % GROUP):
        raise ValueError(
            f"x must have contiguous rows, in groups of a multiple of {GROUP} columns, not {list(x.shape)} with "
            f"strides {x.stride()}"
        )
    num_rows = triton.cdiv(len(x), unit) * unit
    y = torch.empty(num_rows, size, dtype=E4M3, device=x.device)
    shape = (size // GROUP, num_rows) if in_groups else (num_rows, 1)
    scale = torch.empty(shape, dtype=torch.float32, device=x.device)
    return y, scale.t() if in_groups else scale


def _num_warps(block: int) -> int:
    """Each warp repeats the instructions of the reductions, so a thread holds up to 32 numbers of a long row."""
    return min(max(block // 256, 1), max(block // 1024, 4), 16)


def _launch(
    x: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    size: int,
    in_groups: bool,
    unit: int,
    silu: bool,
    normed: Tensor | None = None,
    gate: Tensor | None = None,
    addend: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    num_tokens = len(x)
    y, scale = _results(x, size, in_groups, unit)
    if num_tokens == 0:
        return y, scale
    block = max(triton.next_power_of_2(size), GROUP)
    if norm_weight is None and not silu and block <= _SHORT and num_tokens >= _MANY_ROWS:
        rows = _SHORT * 4 // block
        launcher(_quantize_rows_kernel, (triton.cdiv(num_tokens, rows),), has_pdl(x.device))(
            x, y, scale, num_tokens, x.stride(0), y.stride(0), scale.stride(0), scale.stride(1),
            SIZE=size, ROWS=rows, BLOCK=block, GROUP=GROUP if in_groups else block, num_warps=4,
        )  # fmt: skip
        return y, scale
    addend_stride, gate_stride = (0 if each is None else each.stride(0) for each in (addend, gate))
    launcher(_quantize_kernel, (num_tokens,), has_pdl(x.device))(
        x, addend, norm_weight, gate, normed, y, scale, x.stride(0), addend_stride, gate_stride, y.stride(0),
        scale.stride(0), scale.stride(1), eps,
        SIZE=size, BLOCK=block, GROUP=GROUP if in_groups else block, SILU=silu, num_warps=_num_warps(block),
    )  # fmt: skip
    return y, scale


def _launch_gate(
    x: Tensor, gate: Tensor, norm_weight: Tensor | None, eps: float, in_groups: bool, unit: int
) -> tuple[Tensor, Tensor]:
    num_tokens, size = x.shape
    dim = size if norm_weight is None else len(norm_weight)
    if gate.shape != x.shape or gate.stride(1) != 1 or size % dim or (dim & (dim - 1) and norm_weight is not None):
        raise ValueError(
            f"gate must be {list(x.shape)} with contiguous rows, of heads of a power of two, not {list(gate.shape)} "
            f"with strides {gate.stride()} and heads of {dim}"
        )
    y, scale = _results(x, size, in_groups, unit)
    if num_tokens == 0:
        return y, scale
    block = max(triton.next_power_of_2(size), GROUP)
    launcher(_gate_quantize_kernel, (num_tokens,), has_pdl(x.device))(
        x, gate, norm_weight, y, scale, x.stride(0), gate.stride(0), y.stride(0), scale.stride(0), scale.stride(1), eps,
        SIZE=size, DIM=dim if norm_weight is not None else block, BLOCK=block, GROUP=GROUP if in_groups else block,
        num_warps=_num_warps(block),
    )  # fmt: skip
    return y, scale
