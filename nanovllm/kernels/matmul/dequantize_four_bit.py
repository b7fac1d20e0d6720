"""Weights of 4 bits (`four_bit`) as tensors of floats, for products that have no kernel of their own for them."""

import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.four_bit import UNIT, FourBit, dequantize_torch, scale_of
from nanovllm.kernels.triton_stub import tl, triton

_UNITS = 128  # of a program


@triton.jit
def _dequantize_kernel(
    values, scale, zero, y, num_units, K: tl.constexpr, GROUP: tl.constexpr, E2M1: tl.constexpr,
    UNITS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = UNIT // 2
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    row, first = unit // (K // UNIT), unit % (K // UNIT) * UNIT
    inside = (unit < num_units)[:, None]
    column = tl.arange(0, HALF)[None, :]
    packed = tl.load(values + unit[:, None] * HALF + column, mask=inside, other=0).to(tl.int32)
    group = row * (K // GROUP) + first // GROUP
    factor = scale_of(tl.load(scale + group, mask=unit < num_units, other=0), E2M1)[:, None]
    offset = 8.0
    if zero is not None:
        offset = tl.load(zero + group, mask=unit < num_units, other=0).to(tl.float32)[:, None]
    for half in tl.static_range(2):
        code = (packed >> (4 * half)) & 15
        if E2M1:
            magnitude = (code & 7).to(tl.float32)
            # From 4 on, a number is (2 + mantissa) * 2^(exponent - 2). Below, numbers are halves.
            large = (2.0 + (code & 1).to(tl.float32)) * tl.where((code & 7) >= 6, 2.0, 1.0)
            number = tl.where(magnitude < 4, magnitude * 0.5, large)
            number = tl.where(code >= 8, -number, number)
        else:
            number = code.to(tl.float32) - offset
        result = (number * factor).to(y.dtype.element_ty)
        tl.store(y + unit[:, None] * UNIT + half * HALF + column, result, mask=inside)


@kernel_or_twin
def dequantize(weight: FourBit, dtype: torch.dtype) -> Tensor:
    """The numbers of a weight, a new tensor of its shape, computed in float32 and rounded once. The kernel raises
    ValueError if K is no multiple of 32, or a tensor is not contiguous."""
    return dequantize_torch(weight).to(dtype)


@kernel_of(dequantize)
def _launch_dequantize(weight, dtype):
    K = weight.shape[-1]
    if K % UNIT or not all(each is None or each.is_contiguous() for each in weight):
        raise ValueError(f"weight must be contiguous with a K that is a multiple of {UNIT}, not {list(weight.shape)}")
    y = torch.empty(weight.shape, dtype=dtype, device=weight.values.device)
    num_units = y.numel() // UNIT
    if num_units:
        launcher(_dequantize_kernel, (triton.cdiv(num_units, _UNITS),))(
            weight.values, weight.scale, weight.zero, y, num_units, K=K, GROUP=weight.group, E2M1=weight.is_e2m1,
            UNITS=_UNITS, UNIT=UNIT, num_warps=4,
        )  # fmt: skip
    return y
