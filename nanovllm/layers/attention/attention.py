"""Attention over the paged KV cache: the layer, and what it asks of a back end."""

from abc import ABC, abstractmethod

import torch
from torch import nn

from nanovllm.layers.attention.decode_constants import DecodeConstants
from nanovllm.layers.attention.flash_attn4 import AttentionShape, FlashAttn4
from nanovllm.utils.context import Context


class AttentionBackend(ABC):
    """Computes attention. The engine chooses one at start-up, by `attention_backend.select_backend`.

    Attributes:
        name: the value of the option `attention_backend` that selects it.
        wants_plan: whether decode reads Context.decode_plans.
        supports_cuda_graphs: whether a decode step can be captured.
        flash_attn4: the package that computes long prefills instead, where it is used.
    """

    name: str
    wants_plan = False
    supports_cuda_graphs = True
    flash_attn4: FlashAttn4 | None = None

    @property
    def description(self) -> str:
        return self.name

    def prepare(self, constants: DecodeConstants, max_batch_size: int, shape: AttentionShape) -> None:
        """Allocate what decode steps of up to max_batch_size rows share. Called once, before the first of them.
        constants: the GPU's."""
        return None

    def use_flash_attn4(self, dtype: torch.dtype, head_dim: int, device: torch.device, **sizes: int) -> None:
        """Give prefills to flash-attn-4 where it is faster (see `GpuBackend`)."""
        return None

    @abstractmethod
    def prefill(self, layer: "Attention", q, k, v, context: Context) -> torch.Tensor:
        """`layer.forward` of the flat batch of new tokens, each to the keys up to its own. k and v hold the numbers
        that the caches hold of them."""

    @abstractmethod
    def decode(self, layer: "Attention", q, context: Context) -> torch.Tensor:
        """`layer.forward` of one token a row to its context_lens keys; zeros if that is 0."""


class Attention(nn.Module):
    """Causal grouped-query attention of one layer, over its slices of the KV cache.

    Args:
        window: the number of keys that a token attends to, its own included (sliding-window attention); None: all.
        scale: factor of the scores; None: `head_dim ** -0.5`.

    Attributes:
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], of q's dtype or float8_e4m3fn, set by the
            model runner; None until then (the warm-up runs without a cache).
        kv_scales: float32 [2, num_kv_heads], of the keys and of the values in a float8 cache; None for any other.
    """

    def __init__(self, head_dim: int, backend: AttentionBackend, window: int | None = None, scale: float | None = None):
        super().__init__()
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.backend = backend
        self.k_cache: torch.Tensor | None = None
        self.v_cache: torch.Tensor | None = None
        self.kv_scales: torch.Tensor | None = None

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: Context) -> torch.Tensor:
        """Attend. The step's new keys and values are in their slots already: `qk_norm_rope_store` wrote them.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; of the step's new tokens,
        after RoPE, any stride between tokens. context: the step's; if q has the last tokens only, its
        `of_last_tokens()`. Returns a tensor like q.
        """
        if context.is_prefill:
            return self.backend.prefill(self, q, k, v, context)
        return self.backend.decode(self, q, context)
