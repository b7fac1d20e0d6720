"""RMSNorm: the only normalization in Qwen models."""

import torch
from torch import Tensor, nn

from nanovllm.kernels import HAS_TRITON, use_kernels

if HAS_TRITON:
    from nanovllm.kernels.rms_norm import rms_norm


def rms_norm_torch(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Twin of `kernels.rms_norm.rms_norm`; x may have any number of leading dimensions."""
    value = x.float()
    inverse_rms = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    return (value * inverse_rms * weight.float()).to(x.dtype)


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, computed in float32 and rounded once (Zhang & Sennrich 2019).

    The residual is added before it, by the matrix product (`RowParallelLinear.add_to`).

    Args:
        hidden_size: length of the normalized (last) dimension.
        eps: added to the mean square.
    """

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, hidden_size]`, any float dtype, to the same shape and dtype."""
        norm = rms_norm if use_kernels(x) else rms_norm_torch
        return norm(x, self.weight, self.eps)


class Normed:
    """The RMS norm of the residual stream, not computed yet. The product that reads it computes it within its kernel,
    or asks for its value first.

    Attributes:
        residual: `[num_tokens, hidden_size]`. It must not change before the norm has been read.
        weight, eps: as in RMSNorm.
    """

    def __init__(self, residual: Tensor, norm: RMSNorm, value: Tensor | None = None):
        """value: the norm, if it has been computed."""
        self.residual, self.weight, self.eps = residual, norm.weight, norm.eps
        self._norm, self._value = norm, value

    def __len__(self) -> int:
        return len(self.residual)

    @property
    def is_computed(self) -> bool:
        return self._value is not None

    def value(self) -> Tensor:
        """`[num_tokens, hidden_size]` of the residual's dtype; computed once."""
        if self._value is None:
            self._value = self._norm(self.residual)
        return self._value
