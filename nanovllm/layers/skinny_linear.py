"""Linear layers of a small decode batch, fused with the norm, activation and residual addition around them."""

import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.layers.activation import silu_and_mul_torch
from nanovllm.layers.layernorm import rms_norm_torch

if HAS_TRITON:
    from nanovllm.kernels import skinny_linear as kernels

# Wider models than Qwen3-0.6B are left to cuBLAS from three tokens on. On an H200 a step of two sequences took the
# kernels 1.46 ms (Qwen3-1.7B), 2.92 (4B), 4.46 (8B) and 2.92 (8B over two GPUs), cuBLAS 1.65, 3.09, 4.65 and 2.96; a
# step of four 1.76, 3.43, 5.08 and 3.53, cuBLAS 1.70, 3.12, 4.71 and 3.11 (docs/data/small-batches.json).
_MAX_COLUMNS = 1024
_MAX_TOKENS_OF_WIDE = 2


def norm_linear_torch(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Twin of `kernels.skinny_linear.norm_linear`."""
    product = F.linear(rms_norm_torch(x, norm_weight, eps).float(), weight.float())
    return (product if bias is None else product + bias.float()).to(x.dtype)


def norm_linear_silu_torch(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Twin of `kernels.skinny_linear.norm_linear_silu`."""
    return silu_and_mul_torch(norm_linear_torch(x, norm_weight, eps, weight))


def linear_torch(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Twin of `kernels.decode_linear.linear`."""
    product = F.linear(x.float(), weight.float())
    return (product if bias is None else product + bias.float()).to(x.dtype)


def linear_add_torch(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    """Twin of `kernels.skinny_linear.linear_add`: `residual` is overwritten."""
    total = residual.float() + F.linear(x.float(), weight.float())
    return residual.copy_(total if bias is None else total + bias.float())


def is_skinny(x: Tensor) -> bool:
    """Whether x `[num_tokens, ...]` is few enough tokens, in the right place, for the kernels to be the fast way."""
    return use_kernels(x) and len(x) <= kernels.MAX_TOKENS


def is_worth_it(num_tokens: int, weight: Tensor) -> bool:
    """Whether a step of so few tokens as `is_skinny` says gains by the kernels, in a model whose gate and up projection
    is this weight `[N, K]`, or this rank's rows of it."""
    return weight.shape[1] <= _MAX_COLUMNS or num_tokens <= _MAX_TOKENS_OF_WIDE


def norm_linear(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, bias: Tensor | None = None, pdl: bool = False
) -> Tensor:
    """`rms_norm(x) W^T + bias`, by kernel or by twin.

    Args:
        x: `[num_tokens, K]`; 1..16 tokens for the kernel.
        norm_weight: `[K]`.
        eps: added to the mean square.
        weight: `[N, K]` of x's dtype.
        bias: `[N]`, or None.
        pdl: programmatic dependent launch, under the rule that `kernels.dependent_launch` states.

    Returns:
        `[num_tokens, N]` of x's dtype.
    """
    if use_kernels(x):
        return kernels.norm_linear(x, norm_weight, eps, weight, bias, pdl=pdl)
    return norm_linear_torch(x, norm_weight, eps, weight, bias)


def norm_linear_silu(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, pdl: bool = False) -> Tensor:
    """`silu(gate) * up` of `gate, up = rms_norm(x) W^T`, by kernel or by twin.

    Args:
        x, norm_weight, eps, pdl: as for `norm_linear`.
        weight: `[2 * N, K]` of x's dtype, the gate's rows and then the up's.

    Returns:
        `[num_tokens, N]` of x's dtype.
    """
    if use_kernels(x):
        return kernels.norm_linear_silu(x, norm_weight, eps, weight, pdl=pdl)
    return norm_linear_silu_torch(x, norm_weight, eps, weight)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None, pdl: bool = False) -> Tensor:
    """`residual += x W^T + bias`, by kernel or by twin.

    Args:
        x: `[num_tokens, K]`; 1..16 tokens for the kernel.
        weight: `[N, K]` of x's dtype.
        residual: `[num_tokens, N]` of x's dtype. Overwritten, and returned.
        bias, pdl: as for `norm_linear`.
    """
    if use_kernels(x):
        return kernels.linear_add(x, weight, residual, bias, pdl=pdl)
    return linear_add_torch(x, weight, residual, bias)
