"""Linear layers of a decode batch of up to 128 tokens, with the activation or the residual addition that follows.

Every function accepts `config`, launch constants, `arrivals`, the counters that launches with splits of K share
(`make_arrivals`; made for the call if None, which costs a launch), and `pdl`: programmatic dependent launch (see
`dependent_launch`; no effect where the device or Triton lacks it). Weights and biases are read before the wait. Rows
of x don't influence each other. Equal calls give equal bits; another number of tokens may round differently.
"""

import torch
from torch import Tensor

from nanovllm.kernels.linear_checks import check_layer, check_result
from nanovllm.kernels.split_k_kernel import MAX_TOKENS, SplitKConfig, launch

DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT = 16  # columns; other rows are read two bytes at a time


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    check_layer("x", x, weight.shape[-1], weight, bias, MAX_TOKENS)
    if x.dtype not in DTYPES:
        raise ValueError(f"x must be bfloat16 or float16, not {x.dtype}")


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    config: SplitKConfig | None = None,
    arrivals: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """`x W^T + bias`, summed in float32.

    Args:
        x: `[M, K]`, M in 1..128, bfloat16 or float16, any row stride; rows of a multiple of 8 elements, 8 elements
            apart and aligned to 16 bytes are read fast.
        weight: `[N, K]`, contiguous, of x's dtype.
        bias: `[N]`, any float dtype, or None.
        out: `[M, N]` of x's dtype, any row stride, for the result; None makes one.
        config: launch constants.
        arrivals: int32 counters, all zero.
        pdl: programmatic dependent launch.

    Returns:
        `out`, or a contiguous `[M, N]` of x's dtype.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    _check(x, weight, bias)
    if out is None:
        out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    check_result("out", out, x, weight)
    launch(x, weight, out, config, arrivals, pdl, bias=bias)
    return out


def linear_silu(
    x: Tensor,
    weight: Tensor,
    config: SplitKConfig | None = None,
    arrivals: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """`silu(gate) * up` (Shazeer 2020) of `gate, up = linear(x, weight)`, which is rounded to x's dtype in between.

    Args:
        x, config, arrivals, pdl: as for `linear`.
        weight: `[2 * N, K]`, the gate's rows and then the up's, contiguous, of x's dtype.

    Returns:
        `[M, N]`, contiguous, of x's dtype.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    _check(x, weight, None)
    if len(weight) % 2:
        raise ValueError(f"weight must have an even number of rows, gate and up, not {len(weight)}")
    y = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    launch(x, weight, y, config, arrivals, pdl, silu=True)
    return y


def linear_add(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    config: SplitKConfig | None = None,
    arrivals: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """`residual += x W^T + bias` in place, summed in float32 and rounded once.

    Args:
        x: as for `linear`; shares no memory with residual.
        weight, bias, config, arrivals, pdl: as for `linear`.
        residual: `[M, N]` of x's dtype, any row stride. Overwritten.

    Returns:
        `residual` itself.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    _check(x, weight, bias)
    check_result("residual", residual, x, weight)
    launch(x, weight, residual, config, arrivals, pdl, bias=bias, add=True)
    return residual
