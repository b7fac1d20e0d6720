"""Attention over the paged KV cache."""

import torch
from torch import nn

from nanovllm.layers.attention_backend import AttentionBackend
from nanovllm.utils.context import Context


class Attention(nn.Module):
    """Causal grouped-query attention of one layer, over its slices of the KV cache.

    Attributes:
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], set by the model runner; None until
            then (the warm-up runs without a cache).
    """

    def __init__(self, head_dim: int, backend: AttentionBackend):
        super().__init__()
        self.scale = head_dim**-0.5
        self.backend = backend
        self.k_cache: torch.Tensor | None = None
        self.v_cache: torch.Tensor | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> torch.Tensor:
        """Attend. The step's new keys and values are in their slots already: `qk_norm_rope_store` wrote them.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; of the step's new tokens,
        after RoPE, any stride between tokens. context: the step's, or with q of the last tokens its `of_last_tokens()`.
        Returns a tensor like q.
        """
        if context.is_prefill:
            return self.backend.prefill(q, k, v, self.k_cache, self.v_cache, context, self.scale)
        return self.backend.decode(q, self.k_cache, self.v_cache, context, self.scale)
