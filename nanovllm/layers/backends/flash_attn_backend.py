"""Attention by the flash-attn package."""

from importlib.util import find_spec

import torch

from nanovllm.layers.backends.gpu_backend import GpuBackend


class FlashAttnBackend(GpuBackend):
    """The flash-attn package (FlashAttention-2, arXiv:2307.08691): bfloat16 and float16, blocks of 256 n."""

    name = "flash_attn"

    @classmethod
    def obstacle(cls, shape):
        obstacle = super().obstacle(shape)
        if obstacle is not None:
            return obstacle
        if find_spec("flash_attn_2_cuda") is None:
            return "the flash-attn package is not installed: pip install flash-attn, or use triton"
        if shape.dtype not in (torch.bfloat16, torch.float16):
            return f"takes bfloat16 and float16, not {shape.dtype}; use triton"
        if shape.is_fp8_cache:
            return "reads no fp8 KV cache; use triton"
        if shape.block_size % 256:
            return f"kvcache_block_size={shape.block_size} is not a multiple of 256; use triton"
        if shape.head_dim > 256 or shape.head_dim % 8:
            return f"head_dim {shape.head_dim} is not a multiple of 8 up to 256"
        return None

    def __init__(self):
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen_func = flash_attn_varlen_func
        self.with_kvcache = flash_attn_with_kvcache

    def own_prefill(self, layer, q, k, v, context):
        if context.block_tables is not None:
            k, v = layer.k_cache, layer.v_cache
        out = self.varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=context.cu_seqlens_q,
            cu_seqlens_k=context.cu_seqlens_k,
            max_seqlen_q=context.max_seqlen_q,
            max_seqlen_k=context.max_seqlen_k,
            softmax_scale=layer.scale,
            causal=True,
            window_size=_window_size(layer.window),
            block_table=context.block_tables,
            return_attn_probs=layer.sinks is not None,
        )
        if layer.sinks is None:
            return out
        out, log_sums, _ = out
        return _with_sinks(out, log_sums.t(), layer.sinks)

    def decode(self, layer, q, context):
        out = self.with_kvcache(
            q.unsqueeze(1),
            layer.k_cache,
            layer.v_cache,
            cache_seqlens=context.context_lens,
            block_table=context.block_tables,
            softmax_scale=layer.scale,
            causal=True,
            window_size=_window_size(layer.window),
            return_softmax_lse=layer.sinks is not None,
        )
        if layer.sinks is None:
            return out.squeeze(1)
        out, log_sums = out
        return _with_sinks(out.squeeze(1), log_sums.squeeze(-1), layer.sinks)


def _with_sinks(out: torch.Tensor, log_sums: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Attention `[num_tokens, num_heads, head_dim]` with sinks in the sums of its softmax, made of one without.
    log_sums: the logarithms of the sums without, float32 `[num_tokens, num_heads]`."""
    return out * torch.sigmoid(log_sums - sinks.float()).unsqueeze(-1).to(out.dtype)


def _window_size(window: int | None) -> tuple[int, int]:
    """The window as flash-attn counts it: keys before the query's own, and after it; -1 for all."""
    return (-1, -1) if window is None else (window - 1, 0)
