"""A gate on a layer's output: `x * sigmoid(gate)`."""

import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.triton_stub import tl, triton

_BLOCK = 1024  # 4 warps, where each thread loads 16 bytes in half precision


@triton.jit
def _sigmoid_gate_kernel(
    x, gate, x_stride, gate_stride, width, IS_ONE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    x_at = x + row * x_stride + columns
    value = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    gate_row = gate + row * gate_stride
    logit = tl.load(gate_row + (columns * 0 if IS_ONE else columns), mask=mask, other=0.0).to(tl.float32)
    tl.store(x_at, (value / (1.0 + tl.exp(-logit))).to(x.dtype.element_ty), mask=mask)


@kernel_or_twin
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """`x * sigmoid(gate)`, in float32 and rounded once, overwriting x. Returns x.

    x: `[num_tokens, width]`. gate: `[num_tokens, width]`, or `[num_tokens, 1]` for one number a token. Both any float
    dtype and row stride, contiguous in the last dimension. The kernel raises ValueError for other shapes or strides.
    """
    # torch.sigmoid gives the last numbers of a tensor other bits than the rest; its exp does not.
    return x.copy_(x.float() / (1 + torch.exp(-gate.float())))


@kernel_of(sigmoid_gate)
def _launch_sigmoid_gate(x, gate):
    num_tokens, width = x.shape
    if gate.shape not in ((num_tokens, width), (num_tokens, 1)):
        raise ValueError(f"gate must be [{num_tokens}, {width}] or [{num_tokens}, 1], not {list(gate.shape)}")
    if (width > 1 and x.stride(1) != 1) or (gate.shape[1] > 1 and gate.stride(1) != 1):
        raise ValueError(f"x and gate must have contiguous rows, not the strides {x.stride()} and {gate.stride()}")
    if x.numel() == 0:
        return x
    grid = (num_tokens, triton.cdiv(width, _BLOCK))
    launcher(_sigmoid_gate_kernel, grid, has_pdl(x.device))(
        x, gate, x.stride(0), gate.stride(0), width, IS_ONE=gate.shape[1] == 1, BLOCK=_BLOCK, num_warps=4
    )
    return x
