"""The gated activations of the MLPs (Shazeer 2020): SwiGLU, and GEGLU with the approximation by tanh."""

from torch import Tensor, nn

from nanovllm.kernels.linear_attention.gated_norm import gated_rms_norm
from nanovllm.kernels.sigmoid_gate import sigmoid_gate
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
        of_token: `[num_tokens, 1]`, whose sigmoid multiplies each token's numbers; None for 1.
    """

    def __init__(self, gate_up: Tensor, of_token: Tensor | None = None):
        self.gate_up, self.of_token = gate_up, of_token

    def __len__(self) -> int:
        return len(self.gate_up)

    def value(self) -> Tensor:
        """`[num_tokens, intermediate]`, as `SiluAndMul`, times what `of_token` says."""
        gated = silu_and_mul(self.gate_up)
        return gated if self.of_token is None else sigmoid_gate(gated, self.of_token)


class OutputGate:
    """The gate behind attention, not computed yet: `x * sigmoid(gate)`, or behind linear attention, with a norm,
    `rms_norm(x) * silu(gate)` of each head.

    Attributes:
        x, gate: `[num_tokens, num_heads * head_dim]`. x is overwritten.
        weight, eps: of the norm, `[head_dim]`; None: there is none.
        is_computed: whether x is the result.
    """

    def __init__(self, x: Tensor, gate: Tensor, weight: Tensor | None = None, eps: float = 0.0):
        self.x, self.gate, self.weight, self.eps = x, gate, weight, eps
        self.is_computed = False

    def __len__(self) -> int:
        return len(self.x)

    def value(self) -> Tensor:
        """`[num_tokens, num_heads * head_dim]`, computed once."""
        if not self.is_computed:
            self.is_computed = True
            if self.weight is None:
                sigmoid_gate(self.x, self.gate)
            else:
                gated_rms_norm(self.x, self.gate, self.weight, self.eps)
        return self.x


class GeluTanhAndMul(nn.Module):
    """`gelu(gate) * up`, the gelu by tanh (Hendrycks & Gimpel 2016), computed in float32 and rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        """The same as `SiluAndMul.forward`."""
        return gelu_tanh_and_mul(x)
