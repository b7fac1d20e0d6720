"""The activations over a fused gate-and-up projection: SwiGLU, and GEGLU with the approximation by tanh."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.triton_stub import tl, triton

# 4 warps, where each thread loads 16 bytes of gate and 16 bytes of up, in half precision.
_BLOCK = 1024


class Activation(NamedTuple):
    """What an expert computes of its gate and up: SwiGLU, `silu(gate) * up`, unless it says otherwise.

    Attributes:
        is_gelu: GEGLU, the gelu by tanh.
        alpha, limit: of gpt-oss's `gate * sigmoid(alpha * gate) * (up + 1)`, of a gate of at most `limit` and an up
            from -limit to limit.
    """

    is_gelu: bool = False
    alpha: float | None = None
    limit: float | None = None

    @property
    def constants(self) -> dict[str, float | None]:
        """As kernels take it."""
        return {"GELU": self.is_gelu, "ALPHA": self.alpha, "LIMIT": self.limit}


SWIGLU, GEGLU = Activation(), Activation(is_gelu=True)


@triton.jit
def gated(gate, up, GELU: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """An `Activation` of float32 numbers, compiled in."""
    if GELU:
        # (1 + tanh(z)) / 2 = sigmoid(2 z), here with 2 * sqrt(2 / pi).
        logit = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        result = gate / (1.0 + tl.exp(-logit)) * up
    elif LIMIT is None:
        result = gate / (1.0 + tl.exp(-gate)) * up
    else:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        result = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + 1.0)
    return result


@triton.jit
def _activate_and_mul_kernel(
    x, y, x_stride, intermediate, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < intermediate
    gate_row = x + row * x_stride
    gate = tl.load(gate_row + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_row + intermediate + columns, mask=mask, other=0.0).to(tl.float32)
    product = gated(gate, up, GELU, None, None)
    tl.store(y + row * intermediate + columns, product.to(y.dtype.element_ty), mask=mask)


@kernel_or_twin
def silu_and_mul(x: Tensor) -> Tensor:
    """`silu(gate) * up` where x holds gate and up side by side (Shazeer 2020); float32 inside, rounded once.

    x: `[num_tokens, 2 * intermediate]`, any float dtype and row stride, contiguous in its last dimension. Returns
    `[num_tokens, intermediate]`, contiguous, of x's dtype. The kernel raises ValueError if the last dimension is odd or
    strided.
    """
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


@kernel_or_twin
def gelu_tanh_and_mul(x: Tensor) -> Tensor:
    """`gelu(gate) * up`, the gelu by tanh (Hendrycks & Gimpel 2016); otherwise like `silu_and_mul`."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


def gated_torch(x: Tensor, activation: Activation) -> Tensor:
    """The twin of `gated`, of gate and up side by side: `[num_tokens, 2 * intermediate]`."""
    if activation.alpha is None or activation.limit is None:
        return gelu_tanh_and_mul.twin(x) if activation.is_gelu else silu_and_mul.twin(x)
    gate, up = x.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    # As in `sigmoid_gate`'s twin.
    return (gate / (1 + torch.exp(-activation.alpha * gate)) * (up + 1)).to(x.dtype)


@kernel_of(silu_and_mul)
def _launch_silu_and_mul(x):
    return _launch(x, gelu=False)


@kernel_of(gelu_tanh_and_mul)
def _launch_gelu_tanh_and_mul(x):
    return _launch(x, gelu=True)


def _launch(x: Tensor, gelu: bool) -> Tensor:
    num_tokens, width = x.shape
    if width % 2 or (width > 1 and x.stride(1) != 1):
        raise ValueError(f"x must be [num_tokens, 2 * intermediate] with contiguous rows, not {list(x.shape)}")
    intermediate = width // 2
    y = torch.empty(num_tokens, intermediate, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    grid = (num_tokens, triton.cdiv(intermediate, _BLOCK))
    launcher(_activate_and_mul_kernel, grid, has_pdl(x.device))(
        x, y, x.stride(0), intermediate, GELU=gelu, BLOCK=_BLOCK, num_warps=4
    )
    return y
