"""The back ends of attention that need a GPU: our Triton kernels, and the flash-attn packages."""

from abc import abstractmethod

import torch

from nanovllm.kernels import HAS_TRITON
from nanovllm.kernels.attention.decode_plan import DecodeWorkspace
from nanovllm.layers.attention.attention import Attention, AttentionBackend
from nanovllm.layers.attention.flash_attn4 import load_flash_attn4
from nanovllm.utils.context import Context

if HAS_TRITON:
    from nanovllm.kernels.attention.paged_decode import has_tma, paged_decode
    from nanovllm.kernels.attention.paged_prefill import paged_prefill


class GpuBackend(AttentionBackend):
    """A back end that leaves prefills to flash-attn-4, except for short prompts, few tokens and layers with a window.

    A call of flash-attn-4 costs the host twice as much as one of our kernels. So it pays only if the device works on a
    layer for longer than the host launches it: for steps of many new tokens, and for sequences with many keys.

    Attributes:
        max_short_prompt: tokens of a prompt up to which its own prefill is faster than flash-attn-4.
        flash_attn4_min_tokens: new tokens from which on a step is given to flash-attn-4.
        max_few_keys: of a sequence; a step with one that has more keys is given to flash-attn-4.
    """

    max_short_prompt = flash_attn4_min_tokens = max_few_keys = 0

    @property
    def description(self) -> str:
        if self.flash_attn4 is None:
            return self.name
        return f"{self.name} (prefill: flash-attn-4, in steps of {self.flash_attn4_min_tokens} tokens or more)"

    def use_flash_attn4(
        self,
        dtype,
        head_dim,
        device,
        *,
        min_tokens,
        max_short_prompt,
        max_few_keys,
        max_num_batched_tokens,
        max_model_len,
    ):
        """Use it from now on, if it is installed and supports this model. It is not imported, which takes seconds, if
        no step can be long enough for it. The first three sizes become attributes."""
        self.flash_attn4_min_tokens, self.max_short_prompt = min_tokens, max_short_prompt
        self.max_few_keys = max_few_keys
        if max_num_batched_tokens >= min_tokens or max_model_len > max_few_keys:
            self.flash_attn4 = load_flash_attn4(dtype, head_dim, device)

    def prefill(self, layer, q, k, v, context):
        longest = context.max_seqlen_k
        is_short = context.block_tables is None and longest <= self.max_short_prompt
        are_few = len(k) < self.flash_attn4_min_tokens and longest <= self.max_few_keys
        reads_fp8 = context.block_tables is not None and layer.kv_scales is not None
        out = None
        if self.flash_attn4 is not None and layer.window is None and not is_short and not are_few and not reads_fp8:
            out = self.flash_attn4.prefill(q, k, v, layer.k_cache, layer.v_cache, context, layer.scale)
        return self.own_prefill(layer, q, k, v, context) if out is None else out

    @abstractmethod
    def own_prefill(self, layer: Attention, q, k, v, context: Context) -> torch.Tensor:
        """`prefill` without flash-attn-4."""


class TritonBackend(GpuBackend):
    """Our own kernels: float32, bfloat16 and float16, any block size that is a power of two from 16, and fp8 caches."""

    name = "triton"
    wants_plan = True

    def prepare(self, constants, max_batch_size, shape):
        self.constants = constants
        num_pieces = constants.num_pieces(max_batch_size, shape.num_kv_heads)
        sizes = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.workspace = DecodeWorkspace(max_batch_size, *sizes, shape.device, num_pieces)

    def own_prefill(self, layer, q, k, v, context):
        lengths = context.cu_seqlens_q, context.cu_seqlens_k, context.max_seqlen_q
        options = context.block_tables, layer.scale, layer.window, layer.kv_scales
        return paged_prefill(q, k, v, layer.k_cache, layer.v_cache, *lengths, *options)

    def decode(self, layer, q, context):
        caches, tables, plan = (layer.k_cache, layer.v_cache), context.block_tables, context.decode_plans[layer.window]
        _, block_size, num_kv_heads, head_dim = layer.k_cache.shape
        tma = has_tma(head_dim, block_size, q.element_size(), q.device)
        config = self.constants.config(len(q), num_kv_heads, tma)
        options = {"pdl": True, "windowed": layer.window is not None, "kv_scales": layer.kv_scales}
        return paged_decode(q, *caches, tables, layer.scale, plan, self.workspace, config, **options)


class FlashAttnBackend(GpuBackend):
    """The flash-attn package (FlashAttention-2, arXiv:2307.08691): bfloat16 and float16, blocks of 256 n."""

    name = "flash_attn"

    def __init__(self):
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen_func = flash_attn_varlen_func
        self.with_kvcache = flash_attn_with_kvcache

    def own_prefill(self, layer, q, k, v, context):
        if context.block_tables is not None:
            k, v = layer.k_cache, layer.v_cache
        return self.varlen_func(
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
        )

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
        )
        return out.squeeze(1)


def _window_size(window: int | None) -> tuple[int, int]:
    """As flash-attn counts: keys before the query's own, and after it; -1 for all."""
    return (-1, -1) if window is None else (window - 1, 0)
