"""The back ends that compute attention: one interface, chosen once at start-up."""

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


# New tokens of a step times parameters of a layer on this device, from which on flash-attn-4 is worth its calls: they
# take the host 72 to 81 us, ours 40, and of fewer tokens the device is done with a layer before the next one is
# launched. On an H200 steps of one to three prompts of 2,000 tokens took Qwen3-0.6B 13.9 to 16.4 ms with it and 11.0 to
# 13.9 without, of four 16.1 and 17.4; one of 300 took Qwen3-8B 16.6 and 13.2 ms, of 1,000 23.2 and 23.9. Short prompts
# gain less than the rule says: twenty of 500 took 0.6B 18.0 and 17.6. Over more keys than these it has all steps.
_MIN_LAYER_WORK = 1 << 37
_MANY_KEYS = 4096


class AttentionBackend(ABC):
    """What a layer needs of attention. Shapes as in `Attention`; caches are
    [num_blocks, block_size, num_kv_heads, head_dim], None in a prefill before there is a cache."""

    name: str
    wants_plan = False  # whether decode reads Context.decode_plan
    supports_cuda_graphs = True
    takes_flash_attn4 = True
    flash_attn4: FlashAttn4 | None = None  # computes prefills, but for short prompts and few tokens
    flash_attn4_min_tokens = 0  # new tokens of a step that it is given, unless a sequence has many keys
    max_short_prompt = 0  # tokens; up to here the back end's own kernel is faster than flash-attn-4

    @property
    def description(self) -> str:
        if self.flash_attn4 is None:
            return self.name
        return f"{self.name} (prefill: flash-attn-4, in steps of {self.flash_attn4_min_tokens} tokens or more)"

    def prepare(
        self, max_batch_size: int, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        """Allocate what decode steps of up to max_batch_size rows share, before the first of them."""
        return None

    def use_flash_attn4(
        self, dtype: torch.dtype, head_dim: int, *, layer_params: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        """Hand prefill, but for short prompts and for few tokens, to flash-attn-4 from now on where that is installed
        and takes this model, whose layers have so many parameters on this device. Its import takes a second or more,
        and none where no step of so many tokens is worth it."""
        self.flash_attn4_min_tokens = _MIN_LAYER_WORK // layer_params
        is_reached = max_num_batched_tokens >= self.flash_attn4_min_tokens or max_model_len > _MANY_KEYS
        if self.takes_flash_attn4 and is_reached:
            self.flash_attn4 = load_flash_attn4(dtype, head_dim)

    def prefill_by_flash_attn4(self, q, k, v, k_cache, v_cache, context: Context, scale: float) -> torch.Tensor | None:
        """`prefill` of what flash-attn-4 takes and is faster for; None for the rest."""
        longest = context.max_seqlen_k
        is_short = context.block_tables is None and longest <= self.max_short_prompt
        are_few = len(k) < self.flash_attn4_min_tokens and longest <= _MANY_KEYS
        if self.flash_attn4 is None or is_short or are_few:
            return None
        return self.flash_attn4.prefill(q, k, v, k_cache, v_cache, context, scale)

    @abstractmethod
    def prefill(self, q, k, v, k_cache, v_cache, context: Context, scale: float) -> torch.Tensor:
        """Attention of the flat batch of new tokens, each over the keys up to its own."""

    @abstractmethod
    def decode(self, q, k_cache, v_cache, context: Context, scale: float) -> torch.Tensor:
        """Attention of one token a row over its context_lens keys; zeros where that is 0."""


class TorchBackend(AttentionBackend):
    """Plain torch, on any device: the CPU's back end, and the twin of the others."""

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
    # At head_dim 128 on an H200 200 prompts of 80 tokens take this 90 us and flash-attn-4 202, 64 of 250 109 and 120,
    # 40 of 400 147 and 142.
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
    max_short_prompt = 128  # 128 prompts of 100 tokens take it 89 us and flash-attn-4 124, 64 of 250 134 and 120.

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
    """The back end that `attention_backend=name` stands for.

    "auto" is triton on a GPU, because its decode is faster than flash-attn 2's at every batch size measured
    (docs/performance.md), and torch on a CPU. Raises ValueError where the named one cannot run this model, saying why.
    """
    if name == "auto":
        candidates = ("torch",) if device == "cpu" else ("triton", "flash_attn", "torch")
        name = next(c for c in candidates if _obstacle(c, device, dtype, head_dim, block_size) is None)
    obstacle = _obstacle(name, device, dtype, head_dim, block_size)
    if obstacle is not None:
        raise ValueError(f"attention_backend={name!r}: {obstacle}")
    return {"flash_attn": FlashAttnBackend, "triton": TritonBackend, "torch": TorchBackend}[name]()


def _obstacle(name: str, device: str, dtype: torch.dtype, head_dim: int, block_size: int) -> str | None:
    """Why a back end cannot run here; None where it can."""
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
