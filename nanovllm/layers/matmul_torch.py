"""The plain twins of the linear layers' kernels: sums in float32, rounded where the kernels round."""

import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.activation import silu_and_mul_torch
from nanovllm.layers.layernorm import rms_norm_torch


def linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Twin of `kernels.split_k`."""
    product = F.linear(x.float(), weight.float())
    return (product if bias is None else product + bias.float()).to(x.dtype)


def linear_silu_torch(x: Tensor, weight: Tensor) -> Tensor:
    """Twin of `kernels.split_k` with `silu`."""
    return silu_and_mul_torch(linear_torch(x, weight))


def linear_add_torch(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    """Twin of `kernels.split_k` and `kernels.gemv` with `add`: `residual` is overwritten."""
    total = residual.float() + F.linear(x.float(), weight.float())
    return residual.copy_(total if bias is None else total + bias.float())


def norm_linear_torch(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Twin of `kernels.gemv` with a norm."""
    return linear_torch(rms_norm_torch(x, norm_weight, eps), weight, bias)


def norm_linear_silu_torch(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Twin of `kernels.gemv` with a norm and `silu`."""
    return linear_silu_torch(rms_norm_torch(x, norm_weight, eps), weight)
