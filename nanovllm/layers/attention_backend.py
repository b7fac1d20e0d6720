"""The back ends that compute attention. All have one interface; the engine chooses one at start-up."""

from abc import ABC, abstractmethod
from importlib.util import find_spec

import torch

from nanovllm.kernels import HAS_TRITON
from nanovllm.kernels.decode_plan import DecodeWorkspace
from nanovllm.layers.attention_torch import decode_attention_torch, prefill_attention_torch
from nanovllm.layers.flash_attn4 import FlashAttn4, load_flash_attn4
from nanovllm.utils.context import Context

if HAS_TRITON:
    from nanovllm.kernels.paged_decode import paged_decode
    from nanovllm.kernels.paged_prefill import paged_prefill


# A call of flash-attn-4 costs the host twice as much as one of our kernels. So it pays only if the device works on a
# layer for longer than the host launches it: for steps of many new tokens, and for any sequence with more keys than
# this (measured on an H200).
_MANY_KEYS = 4096


class AttentionBackend(ABC):
    """What a layer needs of attention. Shapes are those of `Attention`. The caches are
    [num_blocks, block_size, num_kv_heads, head_dim], or None in a prefill before there is a cache.

    Attributes:
        name: the value of `attention_backend` that selects it.
        wants_plan: whether decode reads Context.decode_plan.
        supports_cuda_graphs: whether a decode step can be captured.
        takes_flash_attn4: whether flash-attn-4 may compute its prefills.
        max_short_prompt: tokens of a prompt up to which its own prefill is faster than flash-attn-4 (H200).
        flash_attn4: computes prefills, except of short prompts and few tokens; None if it is not used.
        flash_attn4_min_tokens: new tokens from which on a step is given to it.
    """

    name: str
    wants_plan = False
    supports_cuda_graphs = True
    takes_flash_attn4 = True
    max_short_prompt = 0
    flash_attn4: FlashAttn4 | None = None
    flash_attn4_min_tokens = 0

    @property
    def description(self) -> str:
        if self.flash_attn4 is None:
            return self.name
        return f"{self.name} (prefill: flash-attn-4, in steps of {self.flash_attn4_min_tokens} tokens or more)"

    def prepare(
        self, max_batch_size: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        """Allocate what decode steps of up to max_batch_size rows share. Called once, before the first of them."""
        return None

    def use_flash_attn4(
        self, dtype: torch.dtype, head_dim: int, *, min_tokens: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        """Give prefills, except of short prompts and few tokens, to flash-attn-4 from now on, if it is installed and
        supports this model. min_tokens: new tokens of a step for which it pays. It is not imported, which takes
        seconds, if no step can be long enough for it."""
        self.flash_attn4_min_tokens = min_tokens
        is_reached = max_num_batched_tokens >= self.flash_attn4_min_tokens or max_model_len > _MANY_KEYS
        if self.takes_flash_attn4 and is_reached:
            self.flash_attn4 = load_flash_attn4(dtype, head_dim)

    def prefill_by_flash_attn4(self, q, k, v, k_cache, v_cache, context: Context, scale: float) -> torch.Tensor | None:
        """`prefill` by flash-attn-4; None if the back end's own is faster or flash-attn-4 is not used."""
        longest = context.max_seqlen_k
        is_short = context.block_tables is None and longest <= self.max_short_prompt
        are_few = len(k) < self.flash_attn4_min_tokens and longest <= _MANY_KEYS
        if self.flash_attn4 is None or is_short or are_few:
            return None
        return self.flash_attn4.prefill(q, k, v, k_cache, v_cache, context, scale)

    @abstractmethod
    def prefill(self, q, k, v, k_cache, v_cache, context: Context, scale: float) -> torch.Tensor:
        """Attention of the flat batch of new tokens, each to the keys up to its own."""

    @abstractmethod
    def decode(self, q, k_cache, v_cache, context: Context, scale: float) -> torch.Tensor:
        """Attention of one token a row to its context_lens keys; zeros if that is 0."""


class TorchBackend(AttentionBackend):
    """Plain torch, on any device: the back end for CPUs, and the twin of the others."""

    name = "torch"
    supports_cuda_graphs = False  # It reads lengths on the host.
    takes_flash_attn4 = False

    def prefill(self, q, k, v, k_cache, v_cache, context, scale):
        c = context
        return prefill_attention_torch(
            q, k, v, k_cache, v_cache, c.cu_seqlens_q, c.cu_seqlens_k, c.max_seqlen_q, c.block_tables, scale
        )

    def decode(self, q, k_cache, v_cache, context, scale):
        return decode_attention_torch(q, k_cache, v_cache, context.context_lens, context.block_tables, scale)


class TritonBackend(AttentionBackend):
    """Our own kernels: float32, bfloat16 and float16, any block size that is a power of two from 16."""

    name = "triton"
    wants_plan = True
    max_short_prompt = 256

    def __init__(self):
        self.workspace = None

    def prepare(self, max_batch_size, num_heads, num_kv_heads, head_dim, device):
        self.workspace = DecodeWorkspace(max_batch_size, num_heads, num_kv_heads, head_dim, device)

    def prefill(self, q, k, v, k_cache, v_cache, context, scale):
        out = self.prefill_by_flash_attn4(q, k, v, k_cache, v_cache, context, scale)
        if out is not None:
            return out
        c = context
        return paged_prefill(
            q, k, v, k_cache, v_cache, c.cu_seqlens_q, c.cu_seqlens_k, c.max_seqlen_q, c.block_tables, scale
        )

    def decode(self, q, k_cache, v_cache, context, scale):
        c = context
        arguments = q, k_cache, v_cache, c.context_lens, c.block_tables, scale
        return paged_decode(*arguments, c.decode_plan, self.workspace, pdl=True)


class FlashAttnBackend(AttentionBackend):
    """The flash-attn package (FlashAttention-2, arXiv:2307.08691): bfloat16 and float16, blocks of 256 n."""

    name = "flash_attn"
    max_short_prompt = 128

    def __init__(self):
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

        self.varlen_func = flash_attn_varlen_func
        self.with_kvcache = flash_attn_with_kvcache

    def prefill(self, q, k, v, k_cache, v_cache, context, scale):
        out = self.prefill_by_flash_attn4(q, k, v, k_cache, v_cache, context, scale)
        if out is not None:
            return out
        if context.block_tables is not None:
            k, v = k_cache, v_cache
        return self.varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=context.cu_seqlens_q,
            cu_seqlens_k=context.cu_seqlens_k,
            max_seqlen_q=context.max_seqlen_q,
            max_seqlen_k=context.max_seqlen_k,
            softmax_scale=scale,
            causal=True,
            block_table=context.block_tables,
        )

    def decode(self, q, k_cache, v_cache, context, scale):
        out = self.with_kvcache(
            q.unsqueeze(1),
            k_cache,
            v_cache,
            cache_seqlens=context.context_lens,
            block_table=context.block_tables,
            softmax_scale=scale,
            causal=True,
        )
        return out.squeeze(1)


def select_backend(name: str, device: str, dtype: torch.dtype, head_dim: int, block_size: int) -> AttentionBackend:
    """The back end that `attention_backend=name` selects.

    "auto" is torch on a CPU and triton on a GPU, where its decode is faster than flash-attn 2's for every measured
    batch. Raises ValueError, with the reason, if the named one cannot run this model.
    """
    if name == "auto":
        candidates = ("torch",) if device == "cpu" else ("triton", "flash_attn", "torch")
        name = next(c for c in candidates if _obstacle(c, device, dtype, head_dim, block_size) is None)
    obstacle = _obstacle(name, device, dtype, head_dim, block_size)
    if obstacle is not None:
        raise ValueError(f"attention_backend={name!r}: {obstacle}")
    return {"flash_attn": FlashAttnBackend, "triton": TritonBackend, "torch": TorchBackend}[name]()


def _obstacle(name: str, device: str, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
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
        return "the flash-attn package is not installed: pip install 'nanovllm[flash-attn]', or use triton"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, not {dtype}; use triton"
    if block_size % 256:
        return f"kvcache_block_size={block_size} is not a multiple of 256; use triton"
    if head_dim > 256 or head_dim % 8:
        return f"head_dim {head_dim} is not a multiple of 8 up to 256"
    return None
