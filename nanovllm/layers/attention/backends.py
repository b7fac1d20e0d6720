"""Which back end computes attention."""

from importlib.util import find_spec

import torch

from nanovllm.kernels import HAS_TRITON
from nanovllm.layers.attention.attention import AttentionBackend
from nanovllm.layers.attention.gpu_backends import FlashAttnBackend, TritonBackend
from nanovllm.layers.attention.torch_backend import TorchBackend


def select_backend(
    name: str, device: str, dtype: torch.dtype, head_dim: int, block_size: int, is_fp8_cache: bool = False
) -> AttentionBackend:
    """The back end that `attention_backend=name` selects.

    "auto" is torch on a CPU and triton on a GPU, where its decode is faster than flash-attn 2's for every measured
    batch. Raises ValueError, with the reason, if the named one cannot run this model.
    """
    case = device, dtype, head_dim, block_size, is_fp8_cache
    if name == "auto":
        candidates = ("torch",) if device == "cpu" else ("triton", "flash_attn", "torch")
        name = next(c for c in candidates if _obstacle(c, *case) is None)
    obstacle = _obstacle(name, *case)
    if obstacle is not None:
        raise ValueError(f"attention_backend={name!r}: {obstacle}")
    return {"flash_attn": FlashAttnBackend, "triton": TritonBackend, "torch": TorchBackend}[name]()


def _obstacle(
    name: str, device: str, dtype: torch.dtype, head_dim: int, block_size: int, is_fp8_cache: bool
) -> str | None:
    """Why a back end cannot run here; None if it can."""
    if name == "torch":
        return None
    if device == "cpu":
        return "needs a CUDA device; on a CPU use torch"
    if not HAS_TRITON:
        return "needs the triton package, which is not installed"
    if name == "triton":
        return None if head_dim <= 256 else f"head_dim {head_dim} is more than 256"
    if find_spec("flash_attn_2_cuda") is None:
        return "the flash-attn package is not installed: pip install flash-attn, or use triton"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, not {dtype}; use triton"
    if is_fp8_cache:
        return "reads no fp8 KV cache; use triton"
    if block_size % 256:
        return f"kvcache_block_size={block_size} is not a multiple of 256; use triton"
    if head_dim > 256 or head_dim % 8:
        return f"head_dim {head_dim} is not a multiple of 8 up to 256"
    return None
