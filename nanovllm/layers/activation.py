"""The gated activations of the MLPs (Shazeer 2020): SwiGLU, and GEGLU with the approximation by tanh."""

import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels import HAS_TRITON, use_kernels

if HAS_TRITON:
    from nanovllm.kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul


def silu_and_mul_torch(x: Tensor) -> Tensor:
    """Twin of `kernels.silu_and_mul.silu_and_mul`."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


def gelu_tanh_and_mul_torch(x: Tensor) -> Tensor:
    """Twin of `kernels.silu_and_mul.gelu_tanh_and_mul`."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.gelu(gate, approximate="tanh") * up).to(x.dtype)


class SiluAndMul(nn.Module):
    """`silu(gate) * up` (Shazeer 2020), computed in float32 and rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, 2 * intermediate]` (gate, up) to `[num_tokens, intermediate]`, same dtype."""
        return silu_and_mul(x) if use_kernels(x) else silu_and_mul_torch(x)


class Gated:
    """`silu(gate) * up`, not computed yet: like `Normed`, for the product that reads it.

    Attributes:
        gate_up: `[num_tokens, 2 * intermediate]`: gate, up.
    """

    def __init__(self, gate_up: Tensor):
        self.gate_up = gate_up

    def __len__(self) -> int:
        return len(self.gate_up)

    def value(self) -> Tensor:
        """`[num_tokens, intermediate]`, as `SiluAndMul`."""
        return _silu_and_mul(self.gate_up)


class GeluTanhAndMul(nn.Module):
    """`gelu(gate) * up`, the gelu by tanh (Hendrycks & Gimpel 2016), computed in float32 and rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        """As `SiluAndMul.forward`."""
        return gelu_tanh_and_mul(x) if use_kernels(x) else gelu_tanh_and_mul_torch(x)


_silu_and_mul = SiluAndMul()
