"""RMSNorm: the only normalization of the decoders."""

from typing import Any, cast

import torch
from torch import Tensor, nn

from nanovllm.kernels.rms_norm import rms_norm, rms_norm_add, rms_norm_heads, rms_norm_of_sum


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight`, computed in float32 and rounded once (Zhang & Sennrich 2019).

    In the fast decoder the residual is added before it, by the matrix product (`RowParallelLinear.add`).

    Args:
        hidden_size: length of the normalized (last) dimension.
        eps: added to the mean square.
        offset: added to the weight of the checkpoint when it is loaded. Gemma stores its weights less 1. The sum stays
            in float32.
        dtype: of the weight; None for torch's default, or with an offset float32.
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, offset: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        # What `add_to` multiplies the sum by, `[1]`: another module's parameter; None for 1.
        self.sum_scale: Tensor | None = None
        self.weight = nn.Parameter(
            torch.ones(hidden_size, dtype=torch.float32 if offset else dtype), requires_grad=False
        )
        if offset:
            cast(Any, self.weight).weight_loader = self.weight_loader

    def weight_loader(self, param: nn.Parameter, loaded_weight: Any, shard_id: object = None) -> None:
        param.data.copy_(loaded_weight[...])
        param.data += self.offset

    def rms_forward(self, x: Tensor) -> Tensor:
        """`[num_tokens, hidden_size]` or `[num_tokens, num_heads, hidden_size]`, any float dtype, to a new tensor of
        the same shape and dtype."""
        return (rms_norm_heads if x.dim() == 3 else rms_norm)(x, self.weight, self.eps)

    def add_rms_forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """norm(x + residual) and x + residual, in new tensors; all `[num_tokens, hidden_size]`."""
        return rms_norm_of_sum(x, residual, self.weight, self.eps)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """norm(x); with a residual, norm(x + residual) and x + residual. Overwrites neither."""
        if residual is None:
            return self.rms_forward(x)
        return self.add_rms_forward(x, residual)

    def norm_in_place(self, x: Tensor) -> Tensor:
        """Overwrite x, `[num_tokens, hidden_size]`, with its norm."""
        return rms_norm(x, self.weight, self.eps, x)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """(residual + norm(x)) * sum_scale, overwriting residual; both `[num_tokens, hidden_size]`."""
        return rms_norm_add(residual, x, self.weight, self.eps, self.sum_scale)


class Normed:
    """The RMS norm of the residual stream, computed when it is needed. A matrix product that reads it computes it
    within its own kernel, or asks for `value` first.

    Attributes:
        residual: `[num_tokens, hidden_size]`. It must not change before the norm has been read.
        weight, eps: as in RMSNorm. None where the residual stream is read without a norm.
        is_read_again: whether several products read the norm, in formats that differ. The first one that computes it
            then keeps it for the others.
        quantized: what formats have made of it, by their settings, for the next product that reads it.
    """

    is_read_again = False
    quantized: dict[Any, Any] | None = None

    def __init__(self, residual: Tensor, norm: RMSNorm | None, value: Tensor | None = None):
        """value: the norm, if it has been computed."""
        self.residual = residual
        self.weight: Any = None if norm is None else norm.weight
        self.eps: Any = None if norm is None else norm.eps
        self._norm, self._value = norm, value

    def __len__(self) -> int:
        return len(self.residual)

    @property
    def is_computed(self) -> bool:
        return self._norm is None or self._value is not None

    def keep(self, value: Tensor) -> None:
        """value: the norm, which has been computed."""
        self._value = value

    def value(self) -> Tensor:
        """`[num_tokens, hidden_size]` of the residual's dtype; computed once."""
        if self._norm is None:
            return self.residual
        if self._value is None:
            self._value = rms_norm(self.residual, self._norm.weight, self._norm.eps)
        return self._value


class NormOfSum(Normed):
    """A Normed of a residual stream to which a product's result is still to be added. The kernel that computes the norm
    can do it; whoever else reads the stream first does it before."""

    def __init__(self, residual: Tensor, norm: RMSNorm | None, addend: Tensor):
        """addend: of residual's shape."""
        self._addend: Tensor | None = addend
        super().__init__(residual, norm)

    def __len__(self) -> int:
        return len(self._stream)

    @property
    def residual(self) -> Tensor:
        addend = self.take_addend()
        return self._stream if addend is None else self._stream.add_(addend)

    @residual.setter
    def residual(self, residual: Tensor) -> None:
        self._stream = residual

    def take_addend(self) -> Tensor | None:
        """What the caller must add to the stream, in place; None for nothing."""
        addend, self._addend = self._addend, None
        return addend
