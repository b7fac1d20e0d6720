"""Attention over the paged KV cache in plain torch: the CPU's back end, and the twin that the kernels are held to."""

import torch
import torch.nn.functional as F

from nanovllm.layers.attention import AttentionBackend
from nanovllm.layers.kv_quantization import dequantize_kv, quantize_kv


class TorchBackend(AttentionBackend):
    """Plain torch, on any device: the back end for CPUs, and the twin of the others."""

    name = "torch"
    supports_cuda_graphs = False  # It reads lengths on the host.

    def prefill(self, layer, q, k, v, context):
        lengths = context.cu_seqlens_q, context.cu_seqlens_k, context.max_seqlen_q
        options = context.block_tables, layer.scale, layer.window, layer.kv_scales
        return prefill_attention_torch(q, k, v, layer.k_cache, layer.v_cache, *lengths, *options)

    def decode(self, layer, q, context):
        options = context.context_lens, context.block_tables, layer.scale, layer.window, layer.kv_scales
        return decode_attention_torch(q, layer.k_cache, layer.v_cache, *options)


def store_kvcache(
    k: torch.Tensor,
    v: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Write keys and values to their slots of the cache. On a GPU `qk_norm_rope_store` contains this step.

    k, v: `[num_tokens, num_kv_heads, head_dim]`. The other arguments are those of `qk_norm_rope_store_torch`.
    """
    if kv_scales is not None:
        k, v = quantize_kv(k, kv_scales[0]), quantize_kv(v, kv_scales[1])
    stored = slot_mapping >= 0
    slots = slot_mapping[stored].long()
    k_cache.view(-1, *k.shape[1:])[slots] = k[stored]
    v_cache.view(-1, *v.shape[1:])[slots] = v[stored]


def prefill_attention_torch(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    block_tables: torch.Tensor | None,
    scale: float,
    window: int | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a flat batch of sequences, one at a time; arguments and result as in `paged_prefill`. Only
    the kernel uses `max_seqlen_q`."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for seq in range(len(starts_q) - 1):
        chunk = slice(starts_q[seq], starts_q[seq + 1])
        len_q, len_k = chunk.stop - chunk.start, starts_k[seq + 1] - starts_k[seq]
        if len_q == 0:
            continue
        num_cached = len_k - len_q
        first_key = 0 if window is None else max(0, num_cached + 1 - window)
        if block_tables is None:
            keys, values = (x[starts_k[seq] + first_key : starts_k[seq + 1]] for x in (k, v))
        else:
            keys, values = _cached(k_cache, v_cache, block_tables[seq], first_key, len_k, kv_scales, q.dtype)
        mask = None
        if num_cached > 0 or (window is not None and window < len_k):
            # is_causal aligns the triangle at the top left; queries after a prefix need it at the bottom right.
            mask = torch.ones(len_q, len(keys), dtype=torch.bool, device=q.device).tril(num_cached - first_key)
            if window is not None:
                mask = mask.triu(num_cached - first_key + 1 - window)
        attended = F.scaled_dot_product_attention(
            *(x.transpose(0, 1).unsqueeze(0) for x in (q[chunk], keys, values)),
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=True,
        )
        out[chunk] = attended.squeeze(0).transpose(0, 1)
    return out


def decode_attention_torch(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    scale: float,
    window: int | None = None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of one query token a row to its context; arguments and result as in `paged_decode`. context_lens: int32
    `[batch_size]`, keys of each row, its own included; 0 gives zeros. window, kv_scales: as in `Attention`.

    Each row is computed alone, over exactly its keys. A batched product would sum in an order that depends on the
    batch's shape and padding, but the rest of the batch must not change a bit of a row's result.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    _, _, num_kv_heads, head_dim = k_cache.shape
    for row, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            continue
        first_key = 0 if window is None else max(0, context_len - window)
        cached = _cached(k_cache, v_cache, block_tables[row], first_key, context_len, kv_scales, q.dtype)
        keys, values = (x.transpose(0, 1) for x in cached)
        # The heads that share a KV head become its queries, which saves a copy of the keys for each of them. The
        # queries are cloned because the products' rounding depends on their alignment, and so on the row's place.
        queries = q[row].clone().reshape(num_kv_heads, -1, head_dim)
        attended = F.scaled_dot_product_attention(
            queries.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0), scale=scale
        )
        out[row] = attended.reshape(-1, head_dim)
    return out


def _cached(
    k_cache, v_cache, block_table: torch.Tensor, first_key: int, end_key: int, kv_scales, dtype: torch.dtype
) -> list[torch.Tensor]:
    """One sequence's keys and values from first_key to before end_key: `[num_keys, num_kv_heads, head_dim]` each."""
    block_size = k_cache.shape[1]
    first_block = first_key // block_size
    blocks = block_table[first_block : -(-end_key // block_size)]
    wanted = slice(first_key - first_block * block_size, end_key - first_block * block_size)
    found = [cache[blocks].flatten(0, 1)[wanted] for cache in (k_cache, v_cache)]
    if kv_scales is None:
        return found
    return [dequantize_kv(x, scales, dtype) for x, scales in zip(found, kv_scales, strict=True)]
