"""What the linear layers' kernels ask of their arguments."""

from torch import Tensor


def check_layer(x: Tensor, weight: Tensor, bias: Tensor | None, max_tokens: int) -> None:
    """Raise ValueError, beginning with the argument's name, unless x is `[1..max_tokens, K]` with contiguous rows,
    weight a contiguous `[N, K]` of its dtype and bias a contiguous `[N]` or None."""
    if weight.dim() != 2 or not weight.is_contiguous() or weight.numel() == 0:
        raise ValueError(f"weight must be a contiguous [N, K], not empty, not {list(weight.shape)} {weight.stride()}")
    if x.dim() != 2 or not 1 <= len(x) <= max_tokens or x.shape[1] != weight.shape[1] or x.stride(1) != 1:
        raise ValueError(
            f"x must be [1..{max_tokens}, {weight.shape[1]}] with contiguous rows for weight {list(weight.shape)}, "
            f"not {list(x.shape)} with strides {x.stride()}"
        )
    if weight.dtype != x.dtype:
        raise ValueError(f"weight must have x's dtype {x.dtype}, not {weight.dtype}")
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        raise ValueError(f"bias must be a contiguous [{len(weight)}], not {list(bias.shape)}")


def check_result(y: Tensor, x: Tensor, weight: Tensor, silu: bool) -> None:
    """Raise ValueError, beginning with the argument's name, unless y is `[M, N]` of x's dtype with contiguous rows; of
    half as many columns with silu."""
    if silu and len(weight) % 2:
        raise ValueError(f"weight must have an even number of rows, gate and up, not {len(weight)}")
    shape = (len(x), len(weight) // 2 if silu else len(weight))
    if y.shape != shape or y.stride(1) != 1 or y.dtype != x.dtype:
        raise ValueError(
            f"y must be {list(shape)} {x.dtype} with contiguous rows, not {list(y.shape)} {y.dtype} with strides "
            f"{y.stride()}"
        )
