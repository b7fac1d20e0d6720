"""What the linear layers' kernels ask of their arguments."""

import torch
from torch import Tensor

BLOCK = 128  # rows and columns of a weight in e4m3 that share a scale, if a row has more than one
MAX_NORM_SIZE = 8192  # columns of an input whose norm a kernel for a few tokens computes beside the product


def check_layer(x: Tensor, weight: Tensor, bias: Tensor | None, max_tokens: int, scale: Tensor | None = None) -> None:
    """Raise ValueError, beginning with the argument's name, unless x is `[1..max_tokens, K]` with contiguous rows,
    weight a contiguous `[N, K]` of its dtype, or with a scale of e4m3, and bias a contiguous `[N]` or None."""
    if weight.dim() != 2 or not weight.is_contiguous() or weight.numel() == 0:
        raise ValueError(f"weight must be a contiguous [N, K], not empty, not {list(weight.shape)} {weight.stride()}")
    if x.dim() != 2 or not 1 <= len(x) <= max_tokens or x.shape[1] != weight.shape[1] or x.stride(1) != 1:
        raise ValueError(
            f"x must be [1..{max_tokens}, {weight.shape[1]}] with contiguous rows for weight {list(weight.shape)}, "
            f"not {list(x.shape)} with strides {x.stride()}"
        )
    dtype = x.dtype if scale is None else torch.float8_e4m3fn
    if weight.dtype != dtype:
        needed = f"x's dtype {dtype}" if scale is None else f"dtype {dtype}"
        raise ValueError(f"weight must have {needed}, not {weight.dtype}")
    if scale is not None:
        _check_weight_scale(weight, scale)
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"bias must be a contiguous [{len(weight)}], not {list(bias.shape)}")


def check_norm(norm_weight: Tensor | None, K: int) -> None:
    """Raise ValueError unless norm_weight is a contiguous `[K]`, K at most MAX_NORM_SIZE, or None."""
    if norm_weight is not None and (norm_weight.shape != (K,) or not norm_weight.is_contiguous() or K > MAX_NORM_SIZE):
        raise ValueError(
            f"norm_weight must be a contiguous [{K}] of at most {MAX_NORM_SIZE}, not {list(norm_weight.shape)}"
        )


def _check_weight_scale(weight: Tensor, scale: Tensor) -> None:
    N, K = weight.shape
    shapes = [(N, 1)] if N % BLOCK or K % BLOCK else [(N, 1), (N // BLOCK, K // BLOCK)]
    if tuple(scale.shape) not in shapes or not scale.is_contiguous() or scale.dtype != torch.float32:
        raise ValueError(
            f"weight_scale must be a contiguous float32 of one of {shapes}, not {list(scale.shape)} {scale.dtype}"
        )


def check_scaled_layer(
    x: Tensor, x_scale: Tensor | None, weight: Tensor, weight_scale: Tensor, bias: Tensor | None
) -> None:
    """`check_layer` of an x and a weight in e4m3, with a scale for each row of both, or for blocks of the weight and
    groups of x's columns."""
    check_layer(x, weight, bias, max(len(x), 1), weight_scale)
    if x.dtype != torch.float8_e4m3fn:
        raise ValueError(f"x must be torch.float8_e4m3fn for a weight with scales, not {x.dtype}")
    shape = (len(x), 1) if weight_scale.shape == (len(weight), 1) else (len(x), x.shape[1] // BLOCK)
    if x_scale is None or x_scale.shape != shape or x_scale.dtype != torch.float32:
        found = None if x_scale is None else f"{list(x_scale.shape)} {x_scale.dtype}"
        raise ValueError(f"x_scale must be float32 {list(shape)}, not {found}")


def check_result(y: Tensor, x: Tensor, weight: Tensor, silu: bool, dtype: torch.dtype | None = None) -> None:
    """Raise ValueError, beginning with the argument's name, unless y is `[M, N]` of a dtype, x's by default, with
    contiguous rows; of half as many columns with silu."""
    dtype = dtype or x.dtype
    if silu and len(weight) % 2:
        raise ValueError(f"weight must have an even number of rows, gate and up, not {len(weight)}")
    shape = (len(x), len(weight) // 2 if silu else len(weight))
    if y.shape != shape or y.stride(1) != 1 or y.dtype != dtype:
        raise ValueError(
            f"y must be {list(shape)} {dtype} with contiguous rows, not {list(y.shape)} {y.dtype} with strides "
            f"{y.stride()}"
        )
