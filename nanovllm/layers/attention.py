"""Attention over the paged KV cache."""

from torch import Tensor, nn

from nanovllm.layers.backends.backend import AttentionBackend
from nanovllm.utils.context import Context


class Attention(nn.Module):
    """Causal grouped-query attention of one layer, over its slices of the KV cache.

    Args:
        window: the number of keys that a token attends to, its own included (sliding-window attention); None: all.
        scale: factor of the scores; None: `head_dim ** -0.5`.
        sinks: `[num_heads]` of this rank, as in `kernels.attention.paged_cache`; None: none. They are another module's
            parameter.

    Attributes:
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], of q's dtype or float8_e4m3fn, set by the
            KV cache's store; None until then (the warm-up runs without a cache).
        kv_scales: float32 [2, num_kv_heads], of the keys and of the values in a float8 cache; None for any other.
    """

    sinks: Tensor | None

    def __init__(
        self,
        head_dim: int,
        backend: AttentionBackend,
        window: int | None = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ):
        super().__init__()
        vars(self)["sinks"] = sinks  # past nn.Module, which would list them a second time
        self.scale = head_dim**-0.5 if scale is None else scale
        self.window = window
        self.backend = backend
        self.k_cache: Tensor | None = None
        self.v_cache: Tensor | None = None
        self.kv_scales: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, context: Context) -> Tensor:
        """Attend. The step's new keys and values are in their slots already: `qk_norm_rope_store` wrote them.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim]; of the step's new tokens,
        after RoPE, any stride between tokens. context: the step's; if q has the last tokens only, its
        `of_last_tokens()`. Returns a tensor like q.
        """
        if context.is_prefill:
            return self.backend.prefill(self, q, k, v, context)
        return self.backend.decode(self, q, context)
