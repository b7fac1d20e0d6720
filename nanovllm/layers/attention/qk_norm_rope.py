"""What happens to q, k and v between their projection and attention: norms, RoPE and the KV cache write."""

import torch
from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.kernels.rms_norm import rms_norm_torch
from nanovllm.layers.attention.kv_quantization import round_to_cache
from nanovllm.layers.attention.rotary_embedding import apply_rotary_emb
from nanovllm.layers.attention.torch_backend import store_kvcache

if HAS_TRITON:
    from nanovllm.kernels.attention import qk_norm_rope as kernels


def qk_norm_rope_store_torch(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin_cache: Tensor | None,
    positions: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
    kv_scales: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Normalizes and rotates q and k inside qkv, and stores k and v in the paged cache; the kernel's twin.

    Each head of q and k is RMS-normalized, if there are weights for that, and rotated at its token's position, if there
    is a table, in float32 with one rounding at the end. With an fp8 cache, k and v are then rounded to what the cache
    holds of them, so that a prefill without a cached prefix computes the same from them as one that reads the cache.

    Args:
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, contiguous: q, then k, then v. Overwritten.
        q_weight: `[head_dim]`, or None for no norm.
        k_weight: `[head_dim]`, or None for no norm.
        eps: added to the mean square of a head.
        cos_sin_cache: float32 `[max_position, rotary_dim]`, the table of a `RotaryEmbedding`, which rotates the first
            dimensions of each head; None for no rotation.
        positions: int32 or int64 `[num_tokens]`, each below max_position.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous; None stores nothing.
        v_cache: like k_cache.
        slot_mapping: int32 or int64 `[num_tokens]`: block * block_size + offset; negative stores nothing.
        kv_scales: float32 `[2, num_kv_heads]`, powers of two, if the caches are of float8_e4m3fn; else None.
        num_heads: query heads of this rank.
        num_kv_heads: key heads (and value heads) of this rank.
    """
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    qk, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    k = qk[:, num_heads:]
    # In float32 up to the end, so that half-precision values are rounded once.
    value = qk.float()
    if q_weight is not None or k_weight is not None:
        weights = zip(value.split((num_heads, num_kv_heads), dim=1), (q_weight, k_weight), strict=True)
        parts = [part if weight is None else rms_norm_torch(part, weight, eps) for part, weight in weights]
        value = torch.cat(parts, dim=1)
    if cos_sin_cache is not None:
        value = apply_rotary_emb(value, *cos_sin_cache[positions].chunk(2, dim=-1))
    qk.copy_(value)
    if k_cache is not None:
        if kv_scales is not None:
            round_to_cache(k, kv_scales[0])
            round_to_cache(v, kv_scales[1])
        store_kvcache(k, v, k_cache, v_cache, slot_mapping, kv_scales)


def qk_norm_rope_store(qkv: Tensor, *args, pdl: bool = False) -> None:
    """`qk_norm_rope_store_torch`, by one kernel on a GPU. pdl: use a dependent launch (`kernels.dependent_launch`)."""
    if use_kernels(qkv):
        kernels.qk_norm_rope_store(qkv, *args, pdl)
    else:
        qk_norm_rope_store_torch(qkv, *args)
