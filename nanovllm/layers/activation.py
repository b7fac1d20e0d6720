"""SwiGLU (Shazeer 2020), the activation of Qwen's MLP."""

import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels import HAS_TRITON, use_kernels

if HAS_TRITON:
    from nanovllm.kernels.silu_and_mul import silu_and_mul


def silu_and_mul_torch(x: Tensor) -> Tensor:
    """Twin of `kernels.silu_and_mul.silu_and_mul`."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate) * up).to(x.dtype)


class SiluAndMul(nn.Module):
    """`silu(gate) * up` (Shazeer 2020), computed in float32 and rounded once."""

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, 2 * intermediate]` (gate, up) to `[num_tokens, intermediate]`, same dtype."""
        return silu_and_mul(x) if use_kernels(x) else silu_and_mul_torch(x)
