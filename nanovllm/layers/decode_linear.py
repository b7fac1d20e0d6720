"""Linear layers of a small decode batch, though not as small as `skinny_linear`'s, with the activation or the residual
addition that follows. Their kernels ask for the weights while the norm or the attention before them still runs."""

from functools import cache

import torch
from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.layers.activation import silu_and_mul_torch
from nanovllm.layers.skinny_linear import linear_add_torch, linear_torch
from nanovllm.utils.context import get_context

if HAS_TRITON:
    from nanovllm.kernels import decode_linear as kernels
    from nanovllm.kernels import decode_linear_kernel
    from nanovllm.kernels.dependent_launch import has_pdl

_MIN_TOKENS = 9  # fewer are `skinny_linear`'s, or cuBLAS's in wide models
_FEW_ROWS = 1024  # Qwen3-0.6B's o and down, the only ones measured with more than 64 tokens that gained
MAX_WEIGHTS = 1 << 23  # elements; gains were measured up to 6 million, losses from 2^23
_ALIGNMENT = 16  # columns; other rows are read two bytes at a time


@cache
def _is_hopper(device: torch.device) -> bool:
    return has_pdl(device) and torch.cuda.get_device_capability(device)[0] == 9


def linear_silu_torch(x: Tensor, weight: Tensor) -> Tensor:
    """Twin of `kernels.decode_linear.linear_silu`."""
    return silu_and_mul_torch(linear_torch(x, weight))


def most_tokens(num_rows: int) -> int:
    """How many tokens the kernels are faster for than cuBLAS, with a weight of so many rows: where they are few, K in
    splits keeps all multiprocessors busy."""
    return decode_linear_kernel.MAX_TOKENS if num_rows <= _FEW_ROWS else decode_linear_kernel.TILE_TOKENS


def is_small_batch(num_tokens: int, weight: Tensor) -> bool:
    """Whether the kernels are the fast way to multiply num_tokens with a weight `[N, K]`: in a decode step of 9 to 64
    sequences, or up to 128 where N is small, and for weights of megabytes, on Hopper. There, with dependent launches, a
    layer of Qwen3-0.6B's products takes 22 to 24 us for up to 64 tokens where cuBLAS takes 31, and 31 for 128 where it
    takes 33; for more tokens, or for Qwen3-8B's weights, cuBLAS is as fast or faster (docs/performance.md). Other chips
    were not measured, and some have too little shared memory."""
    return (
        use_kernels(weight)
        and weight.numel() < MAX_WEIGHTS
        and _MIN_TOKENS <= num_tokens <= most_tokens(len(weight))
        and weight.dtype in kernels.DTYPES
        and weight.shape[1] % _ALIGNMENT == 0
        and _is_hopper(weight.device)
        and not get_context().is_prefill
    )


def make_arrivals() -> Tensor | None:
    """The counters of a layer's launches, on the default device. Each layer has its own and allocates them when it is
    made: a CUDA graph must not."""
    return decode_linear_kernel.make_arrivals() if HAS_TRITON else None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    arrivals: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """`x W^T + bias`, by kernel or by twin.

    Args:
        x: `[num_tokens, K]`; 1..128 tokens of a 16-bit float for the kernel.
        weight: `[N, K]` of x's dtype.
        bias: `[N]`, or None.
        out: `[num_tokens, N]` for the result, or None.
        arrivals: what `make_arrivals` gave to this layer.
        pdl: programmatic dependent launch, under the rule that `kernels.dependent_launch` states.

    Returns:
        `out`, or a new `[num_tokens, N]` of x's dtype.
    """
    if use_kernels(x):
        return kernels.linear(x, weight, bias, out, arrivals=arrivals, pdl=pdl)
    y = linear_torch(x, weight, bias)
    return y if out is None else out.copy_(y)


def linear_silu(x: Tensor, weight: Tensor, arrivals: Tensor | None = None, pdl: bool = False) -> Tensor:
    """`silu(gate) * up` (Shazeer 2020) of `gate, up = x W^T`, by kernel or by twin.

    Args:
        x, arrivals, pdl: as for `linear`.
        weight: `[2 * N, K]` of x's dtype, the gate's rows and then the up's.

    Returns:
        `[num_tokens, N]` of x's dtype.
    """
    if use_kernels(x):
        return kernels.linear_silu(x, weight, arrivals=arrivals, pdl=pdl)
    return linear_silu_torch(x, weight)


def linear_add(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    arrivals: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """`residual += x W^T + bias`, by kernel or by twin.

    Args:
        x, weight, bias, arrivals, pdl: as for `linear`.
        residual: `[num_tokens, N]` of x's dtype. Overwritten, and returned.
    """
    if use_kernels(x):
        return kernels.linear_add(x, weight, residual, bias, arrivals=arrivals, pdl=pdl)
    return linear_add_torch(x, weight, residual, bias)
