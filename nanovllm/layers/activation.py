"""The gated activations of the MLPs (Shazeer 2020): SwiGLU, and GEGLU with the approximation by tanh."""

from torch import Tensor, nn

from nanovllm.kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul


class SiluAndMul(nn.Module):
    """`silu(gate) * up` (Shazeer 2020), computed in float32 and rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, 2 * intermediate]` (gate, up) to `[num_tokens, intermediate]`, same dtype."""
        return silu_and_mul(x)


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
        return silu_and_mul(self.gate_up)


class GeluTanhAndMul(nn.Module):
    """`gelu(gate) * up`, the gelu by tanh (Hendrycks & Gimpel 2016), computed in float32 and rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        """The same as `SiluAndMul.forward`."""
        return gelu_tanh_and_mul(x)
