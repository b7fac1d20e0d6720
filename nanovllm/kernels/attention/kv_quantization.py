"""Keys and values in 8 bits: what the store kernel and the attention kernels compute, in plain torch.

A value x of a KV head is stored as the e4m3 number nearest to x / scale, and read as that number times the scale.
Scales are powers of two, so a stored value is exact in bfloat16, float16 and float32: wherever it is read from, the
cache or the step's own keys and values after `round_to_cache`, it is the same number.
"""

import torch

KV_DTYPE = torch.float8_e4m3fn
E4M3_MAX = 448.0


def quantize_kv(x: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """x: `[..., num_kv_heads, head_dim]`; scales: float32 `[num_kv_heads]`. Returns float8_e4m3fn like x; values past
    the largest are clamped, and NaN stays NaN."""
    return (x.float() / scales[:, None]).clamp(-E4M3_MAX, E4M3_MAX).to(KV_DTYPE)


def dequantize_kv(x: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `quantize_kv` has made, as numbers of another dtype."""
    return (x.float() * scales[:, None]).to(dtype)


def round_to_cache(x: torch.Tensor, scales: torch.Tensor) -> None:
    """Overwrite keys or values with those that the cache holds of them."""
    x.copy_(dequantize_kv(quantize_kv(x, scales), scales, x.dtype))
