"""Weights of 4 bits (`four_bit`) as tensors of floats, for products that have no kernel of their own for them."""

import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.four_bit import UNIT, FourBit, decode, dequantize_torch, scale_of
from nanovllm.kernels.triton_stub import tl, triton

_UNITS = 128  # of a program


@triton.jit
def _dequantize_kernel(
    values, scale, zero, y, num_units, K: tl.constexpr, GROUP: tl.constexpr, E2M1: tl.constexpr,
    UNITS: tl.constexpr, UNIT: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = UNIT // 2
    unit = tl.program_id(0).to(tl.int64) * UNITS + tl.arange(0, UNITS)
    row, first = unit // (K // UNIT), unit % (K // UNIT) * UNIT
    inside = (unit < num_units)[:, None]
    packed = tl.load(values + unit[:, None] * HALF + tl.arange(0, HALF)[None, :], mask=inside, other=0)
    group = row * (K // GROUP) + first // GROUP
    dtype: tl.constexpr = y.dtype.element_ty
    # Where the numbers of 4 bits are decoded, exactly.
    decoded: tl.constexpr = tl.bfloat16 if dtype == tl.float32 else dtype
    low, high = decode(packed, 0, E2M1, decoded, COMPILED), decode(packed, 1, E2M1, decoded, COMPILED)
    factor = scale_of(tl.load(scale + group, mask=unit < num_units, other=0), E2M1)[:, None]
    if not E2M1:
        offset = 136.0 if decoded == tl.bfloat16 else 1032.0
        if zero is not None:
            offset += tl.load(zero + group, mask=unit < num_units, other=0).to(tl.float32)[:, None] - 8.0
        low, high = low.to(tl.float32) - offset, high.to(tl.float32) - offset
    elif dtype == tl.bfloat16:  # A power of two changes no mantissa.
        factor = factor.to(dtype)
    low, high = (low * factor).to(dtype), (high * factor).to(dtype)
    # Columns of a unit side by side, so that a thread writes many at once.
    result = tl.join(low, high).permute(0, 2, 1).reshape(UNITS, UNIT)
    tl.store(y + unit[:, None] * UNIT + tl.arange(0, UNIT)[None, :], result, mask=inside)


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
            UNITS=_UNITS, UNIT=UNIT, COMPILED=y.is_cuda, num_warps=4,
        )  # fmt: skip
    return y
