"""Linear layers of a small decode batch (1..16 tokens), each fused with what stands before and after it.

Such a layer takes as long as reading its weights; see `gemv_kernel`. Every function accepts `config`, launch constants,
and `pdl`: programmatic dependent launch (see `dependent_launch`; no effect where the device or Triton lacks it).
Weights, norm weights and biases are read before the wait. Rows of x don't influence each other. Equal calls give equal
bits; another number of tokens may round differently.
"""

import torch
from torch import Tensor

from nanovllm.kernels.gemv_kernel import MAX_TOKENS, GemvConfig, launch
from nanovllm.kernels.linear_checks import check_layer, check_result
from nanovllm.kernels.posted_sums import Inboxes

MAX_NORM_SIZE = 8192


def _check_norm(norm_weight: Tensor, size: int) -> None:
    if norm_weight.shape != (size,) or not norm_weight.is_contiguous() or size > MAX_NORM_SIZE:
        raise ValueError(
            f"norm_weight must be a contiguous [{size}] of at most {MAX_NORM_SIZE}, not {list(norm_weight.shape)}"
        )


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """`rms_norm(x) W^T + bias`, the norm (Zhang & Sennrich 2019) rounded to x's dtype, the sum in float32.

    Args:
        x: `[M, K]`, M in 1..16, K at most 8192, float32 or a 16-bit float, any row stride.
        norm_weight: `[K]`, any float dtype.
        eps: added to the mean square.
        weight: `[N, K]`, contiguous, of x's dtype.
        bias: `[N]`, any float dtype, or None.
        config: launch constants.
        pdl: programmatic dependent launch.

    Returns:
        `[M, N]`, contiguous, of x's dtype.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    check_layer("x", x, weight.shape[-1], weight, bias, MAX_TOKENS)
    _check_norm(norm_weight, x.shape[1])
    y = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    launch(x, weight, y, config, pdl, norm_weight=norm_weight, eps=eps, bias=bias)
    return y


def norm_linear_silu(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """`silu(gate) * up` (Shazeer 2020) of `gate, up = norm_linear(x, ...)`, which is rounded to x's dtype in between.

    Args:
        x, norm_weight, eps, config, pdl: as for `norm_linear`.
        weight: `[2 * N, K]`, the gate's rows and then the up's, contiguous, of x's dtype.

    Returns:
        `[M, N]`, contiguous, of x's dtype.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    check_layer("x", x, weight.shape[-1], weight, None, MAX_TOKENS)
    _check_norm(norm_weight, x.shape[1])
    if len(weight) % 2:
        raise ValueError(f"weight must have an even number of rows, gate and up, not {len(weight)}")
    y = torch.empty(len(x), len(weight) // 2, dtype=x.dtype, device=x.device)
    launch(x, weight, y, config, pdl, norm_weight=norm_weight, eps=eps, silu_output=True)
    return y


def linear_post(
    x: Tensor,
    weight: Tensor,
    inboxes: Inboxes,
    index: int,
    bias: Tensor | None = None,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> None:
    """`x W^T + bias`, summed in float32, rounded to x's dtype and posted to all ranks, each of which has to `collect`
    it next.

    Args:
        x: `[M, K]`, M in 1..16, bfloat16 or float16, any row stride.
        weight: `[N, K]`, contiguous, of x's dtype, N even.
        inboxes: of this rank.
        index: of the sum in its step.
        bias, config, pdl: as for `norm_linear`.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    check_layer("x", x, weight.shape[-1], weight, bias, MAX_TOKENS)
    if x.element_size() != 2 or len(weight) % 2:
        raise ValueError(f"weight must be of a 16-bit float with an even number of rows, not {list(weight.shape)}")
    launch(x, weight, None, config, pdl, bias=bias, inboxes=inboxes, index=index)


def linear_add(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    config: GemvConfig | None = None,
    pdl: bool = False,
) -> Tensor:
    """`residual += x W^T + bias` in place, summed in float32 and rounded once.

    Args:
        x: `[M, K]`, M in 1..16, float32 or a 16-bit float, any row stride; shares no memory with residual.
        weight: `[N, K]`, contiguous, of x's dtype.
        residual: `[M, N]` of x's dtype, any row stride. Overwritten.
        bias, config, pdl: as for `norm_linear`.

    Returns:
        `residual` itself.

    Raises:
        ValueError: another shape, layout or dtype; the message begins with the argument's name.
    """
    check_layer("x", x, weight.shape[-1], weight, bias, MAX_TOKENS)
    check_result("residual", residual, x, weight)
    launch(x, weight, residual, config, pdl, bias=bias, add=True)
    return residual
