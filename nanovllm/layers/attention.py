"""Attention over the paged KV cache."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from nanovllm.kernels.attention.store_kvcache import store_kvcache, store_kvcache_kernel
from nanovllm.layers.backends.backend import AttentionBackend, AttentionShape
from nanovllm.layers.backends.choice import backend_by_hand
from nanovllm.utils.context import Context, get_context

__all__ = ["Attention", "store_kvcache", "store_kvcache_kernel"]


class Attention(nn.Module):
    """Causal grouped-query attention of one layer, over its slices of the KV cache.

    Args:
        num_heads, num_kv_heads: of this rank.
        scale: factor of the scores, usually `head_dim ** -0.5`.
        backend: what computes it; None: one is chosen when the layer is used, by device, dtype and cache.
        window: the number of keys that a token attends to, its own included (sliding-window attention); None: all.
        sinks: `[num_heads]` of this rank, as in `kernels.attention.paged_cache`; None: none. They are another module's
            parameter.

    Attributes:
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], of q's dtype or float8_e4m3fn, set by the
            KV cache's store; empty until then (the warm-up runs without a cache).
        kv_scales: float32 [2, num_kv_heads], of the keys and of the values in a float8 cache; None for any other.
        get_context: gives the step's context. The store may set another, for tables of its own.
    """

    sinks: Tensor | None
    get_context: Callable[[], Context]

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scale: float,
        num_kv_heads: int,
        backend: AttentionBackend | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ):
        super().__init__()
        vars(self)["sinks"] = sinks  # past nn.Module, which would list them a second time
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_dim, self.scale = head_dim, scale
        self.window = window
        self.get_context = get_context
        self.backend = backend
        self.k_cache = self.v_cache = torch.tensor([])
        self.kv_scales: Tensor | None = None
        self._chosen: tuple[AttentionShape, AttentionBackend] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write the step's new keys and values to their slots, if there is a cache, and attend.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; of the step's new tokens,
        after RoPE, any stride between tokens. The heads may be flat: [num_tokens, num_heads * head_dim]. Returns a
        tensor like q. Raises ValueError for a float8 cache, which `qk_norm_rope_store` alone writes.
        """
        context, shape = self.get_context(), q.shape
        q = q.view(len(q), self.num_heads, self.head_dim)
        k, v = (x.view(len(x), self.num_kv_heads, self.head_dim) for x in (k, v))
        if self.k_cache.numel():
            if self.kv_scales is not None:
                raise ValueError("Attention.forward writes no float8 KV cache; use one of the model's dtype")
            if context.slot_mapping is None:
                raise ValueError("there is a KV cache, but the context has no slot_mapping: see set_context")
            store_kvcache(k, v, self.k_cache, self.v_cache, context.slot_mapping)
        return self.attend(q, k, v, context).view(shape)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attend alone. The step's new keys and values are in their slots already: `qk_norm_rope_store` wrote them.

        q, k, v: as for forward, with heads. context: the step's; if q has the last tokens only, its
        `of_last_tokens()`. Returns a tensor like q.
        """
        backend = self.backend or self._choose(q)
        if context.is_prefill:
            return backend.prefill(self, q, k, v, context)
        return backend.decode(self, q, context)

    def _choose(self, q: Tensor) -> AttentionBackend:
        """The back end of a layer that was given none. It may change when the layer gets a cache."""
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        block_size = self.k_cache.shape[1] if self.k_cache.numel() else None
        shape = AttentionShape(*heads, block_size or 256, q.dtype, q.device)
        if self._chosen is None or self._chosen[0] != shape:
            self._chosen = shape, backend_by_hand(shape)
        return self._chosen[1]
