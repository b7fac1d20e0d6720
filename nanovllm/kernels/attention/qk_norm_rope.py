"""Everything between the QKV projection and attention in one launch: q/k norms, RoPE and the KV cache write."""

import torch
from torch import Tensor, float8_e4m3fn

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.attention.kv_quantization import quantize_kv, round_to_cache
from nanovllm.kernels.attention.paged_cache import check_scales
from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.kernels.triton_stub import tl, triton


@triton.jit
def _to_e4m3(x, inverse_scale):
    """`kv_quantization.quantize_kv`."""
    scaled = x.to(tl.float32) * inverse_scale
    return tl.clamp(scaled, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv, q_weight, k_weight, cos_sin_cache, positions, k_cache, v_cache, slot_mapping, kv_scales, query_scales, eps,
    ROW: tl.constexpr, NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, HEADS_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_VALUE_NORM: tl.constexpr, HAS_CACHE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    ROTARY_HALF: tl.constexpr = ROTARY_DIM // 2
    IS_PARTIAL: tl.constexpr = (ROTARY_DIM > 0) & (ROTARY_DIM < HEAD_DIM)
    Q_GROUPS: tl.constexpr = (NUM_HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    # A group's heads are all of q, all of k, or all of v.
    is_q = group < Q_GROUPS
    is_v = group >= Q_GROUPS + KV_GROUPS
    first_group = tl.where(is_q, 0, tl.where(is_v, Q_GROUPS + KV_GROUPS, Q_GROUPS))
    heads = ((group - first_group) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK))[:, None]
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (heads < tl.where(is_q, NUM_HEADS, NUM_KV_HEADS)) & (pair < HALF)
    # A pair is (dim, dim + shift). The dimensions that are not rotated make up the last pairs.
    dim = pair
    shift = HALF
    rotated = mask
    if IS_PARTIAL:
        dim = tl.where(pair < ROTARY_HALF, pair, pair + ROTARY_HALF)
        shift = tl.where(pair < ROTARY_HALF, ROTARY_HALF, HALF - ROTARY_HALF)
        rotated = mask & (pair < ROTARY_HALF)
    offsets = heads * HEAD_DIM + dim
    dtype: tl.constexpr = qkv.dtype.element_ty
    heads_before = tl.where(is_q, 0, tl.where(is_v, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    first_at = qkv + token * ROW + heads_before * HEAD_DIM + offsets
    if HAS_CACHE:
        slot = tl.load(slot_mapping + token).to(tl.int64)
        cached_at = slot * (NUM_KV_HEADS * HEAD_DIM) + offsets
        if kv_scales is not None:
            scales_at = kv_scales + tl.where(is_v, NUM_KV_HEADS, 0) + heads
            scale = tl.load(scales_at, mask=heads < NUM_KV_HEADS, other=1.0)
            inverse_scale = tl.div_rn(1.0, scale)  # exact, for the scale is a power of two

    if is_v:
        if HAS_CACHE or HAS_VALUE_NORM:
            if PDL:
                gdc_wait()
            first_values = tl.load(first_at, mask=mask, other=0.0)
            second_values = tl.load(first_at + shift, mask=mask, other=0.0)
        if HAS_VALUE_NORM:
            squares = first_values.to(tl.float32) * first_values.to(tl.float32)
            squares += second_values.to(tl.float32) * second_values.to(tl.float32)
            value_scale = tl.rsqrt(tl.sum(squares, axis=1) / HEAD_DIM + eps)[:, None]
            first_values = (first_values.to(tl.float32) * value_scale).to(dtype)
            second_values = (second_values.to(tl.float32) * value_scale).to(dtype)
            if kv_scales is None:
                tl.store(first_at, first_values, mask=mask)
                tl.store(first_at + shift, second_values, mask=mask)
        if HAS_CACHE:
            if kv_scales is not None:
                first_values = _to_e4m3(first_values, inverse_scale)
                second_values = _to_e4m3(second_values, inverse_scale)
                tl.store(first_at, (first_values.to(tl.float32) * scale).to(dtype), mask=mask)
                tl.store(first_at + shift, (second_values.to(tl.float32) * scale).to(dtype), mask=mask)
            if slot >= 0:
                tl.store(v_cache + cached_at, first_values, mask=mask)
                tl.store(v_cache + cached_at + shift, second_values, mask=mask)
    else:
        # A table row is loaded once for each head, after the first one from the L1 cache. A row loaded once would have
        # to be spread over the tile through shared memory, at two barriers a row.
        if ROTARY_DIM > 0:
            in_row = heads * 0 + pair
            table_row = cos_sin_cache + tl.load(positions + token).to(tl.int64) * ROTARY_DIM
            cos = tl.load(table_row + in_row, mask=rotated, other=1.0 if IS_PARTIAL else 0.0)
            sin = tl.load(table_row + ROTARY_HALF + in_row, mask=rotated, other=0.0)
        if HAS_NORM:
            weight = q_weight
            if not is_q:
                weight = k_weight
            in_head = heads * 0 + dim
            first_scale = tl.load(weight + in_head, mask=mask, other=0.0).to(tl.float32)
            second_scale = tl.load(weight + shift + in_head, mask=mask, other=0.0).to(tl.float32)
        if PDL:
            gdc_wait()
        first = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(first_at + shift, mask=mask, other=0.0).to(tl.float32)
        if HAS_NORM:
            inverse_rms = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)
            first = first * inverse_rms[:, None] * first_scale
            second = second * inverse_rms[:, None] * second_scale
        if ROTARY_DIM > 0:
            first, second = first * cos - second * sin, second * cos + first * sin
        if query_scales is not None:
            query_scale = tl.load(query_scales + tl.load(positions + token))
            query_scale = tl.where(is_q, query_scale, 1.0)
            first, second = first * query_scale, second * query_scale
        first, second = first.to(dtype), second.to(dtype)
        first_key, second_key = first, second
        if HAS_CACHE:  # noqa: SIM102 (no cache, no scales)
            if kv_scales is not None:
                first_key, second_key = _to_e4m3(first, inverse_scale), _to_e4m3(second, inverse_scale)
                first = tl.where(is_q, first, (first_key.to(tl.float32) * scale).to(dtype))
                second = tl.where(is_q, second, (second_key.to(tl.float32) * scale).to(dtype))
        tl.store(first_at, first, mask=mask)
        tl.store(first_at + shift, second, mask=mask)
        if HAS_CACHE:  # noqa: SIM102 (no cache, no slot)
            if (not is_q) & (slot >= 0):
                tl.store(k_cache + cached_at, first_key, mask=mask)
                tl.store(k_cache + cached_at + shift, second_key, mask=mask)


@kernel_or_twin
def qk_norm_rope_store(
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
    pdl: bool = False,
    query_scales: Tensor | None = None,
    has_value_norm: bool = False,
) -> None:
    """Normalizes and rotates q and k inside qkv, and stores k and v in the paged cache.

    Each head of q and k is RMS-normalized, if there are weights for that, and rotated at its token's position, if there
    is a table, in float32 with one rounding at the end. With an fp8 cache, k and v are then rounded to what the cache
    holds of them, so that a prefill without a cached prefix computes the same from them as one that reads the cache.

    Args:
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`: q, then k, then v, in contiguous rows with any
            stride between them. Overwritten.
        q_weight: `[head_dim]`, or None for no norm.
        k_weight: `[head_dim]`, or None for no norm.
        eps: added to the mean square of a head.
        cos_sin_cache: float32 `[max_position, 1, rotary_dim]`, the table of a `RotaryEmbedding`, which rotates the
            first dimensions of each head; None for no rotation.
        positions: int32 or int64 `[num_tokens]`, each below max_position.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous; None stores nothing.
        v_cache: like k_cache.
        slot_mapping: int32 or int64 `[num_tokens]`: block * block_size + offset; negative stores nothing.
        kv_scales: float32 `[2, num_kv_heads]`, powers of two, if the caches are of float8_e4m3fn; else None.
        num_heads: query heads of this rank.
        num_kv_heads: key heads (and value heads) of this rank.
        pdl: programmatic dependent launch (see `dependent_launch`); all but qkv is read before the wait.
        query_scales: float32 `[max_position]`, what q is multiplied by at each position after its rotation; None for 1.
        has_value_norm: whether each head of v is RMS-normalized, without a weight, and stored so.

    The kernel raises ValueError if it would read or write outside qkv or the caches. Positions and slots are not
    checked.
    """
    head_dim = qkv.shape[1] // (num_heads + 2 * num_kv_heads)
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim)
    qk, v = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    k = qk[:, num_heads:]
    # In float32 up to the end, so that half-precision values are rounded once.
    value = qk.float()
    if q_weight is not None or k_weight is not None:
        weights = zip(value.split((num_heads, num_kv_heads), dim=1), (q_weight, k_weight), strict=True)
        parts = [part if weight is None else rms_norm.twin(part, weight, eps) for part, weight in weights]
        value = torch.cat(parts, dim=1)
    if cos_sin_cache is not None:
        value = apply_rotary_emb(value, *cos_sin_cache[positions].chunk(2, dim=-1))
    if query_scales is not None:
        value[:, :num_heads] *= query_scales[positions, None, None]
    qk.copy_(value)
    if has_value_norm:
        v.copy_(rms_norm.twin(v, torch.ones(head_dim, device=v.device), eps))
    if k_cache is not None and v_cache is not None and slot_mapping is not None:
        stored = slot_mapping >= 0
        slots = slot_mapping[stored].long()
        for part, (x, cache) in enumerate(((k, k_cache), (v, v_cache))):
            held = x
            if kv_scales is not None:
                round_to_cache(x, kv_scales[part])
                held = quantize_kv(x, kv_scales[part])
            cache.view(-1, *x.shape[1:])[slots] = held[stored]


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the pairs (i, i + rotary_dim / 2) of each head of x `[num_tokens, heads, head_dim]`, in float32, rounded
    once. cos, sin: float32 `[num_tokens, 1, rotary_dim / 2]`. The dimensions from rotary_dim on stay as they are.
    Returns a tensor of x's shape and dtype."""
    rotary_dim = 2 * cos.shape[-1]
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
    return rotated if rotary_dim == x.shape[-1] else torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


@kernel_of(qk_norm_rope_store)
def _launch_qk_norm_rope_store(
    qkv, q_weight, k_weight, eps, cos_sin_cache, positions, k_cache, v_cache, slot_mapping, kv_scales,
    num_heads, num_kv_heads, pdl=False, query_scales=None, has_value_norm=False,
):  # fmt: skip
    (num_tokens, width), all_heads = qkv.shape, num_heads + 2 * num_kv_heads
    head_dim = width // all_heads
    if width % (2 * all_heads) or qkv.stride(1) != 1:
        raise ValueError(f"qkv must be contiguous rows of {all_heads} heads of an even size, not {list(qkv.shape)}")
    rotary_dim = 0 if cos_sin_cache is None else cos_sin_cache.shape[-1]
    if rotary_dim > head_dim or rotary_dim % 2:
        raise ValueError(f"cos_sin_cache must have an even number of columns up to {head_dim}, not {rotary_dim}")
    for cache in () if k_cache is None else (k_cache, v_cache):
        dtype = qkv.dtype if kv_scales is None else float8_e4m3fn
        if cache.shape[2:] != (num_kv_heads, head_dim) or not cache.is_contiguous() or cache.dtype != dtype:
            raise ValueError(
                f"caches must be contiguous [num_blocks, block_size, {num_kv_heads}, {head_dim}] of {dtype}, "
                f"not {list(cache.shape)} of {cache.dtype}"
            )
    check_scales(kv_scales, num_kv_heads, is_fp8=kv_scales is not None)
    if num_tokens == 0:
        return
    # 8 heads of 128 are two warps, with one 16-byte load of each half a thread. That is small enough for a single token
    # to spread over several multiprocessors, and large enough for 16,000 tokens to fill all of their threads.
    heads_block = min(8, triton.next_power_of_2(num_heads))
    half_block = triton.next_power_of_2(head_dim // 2)
    has_cache = k_cache is not None
    q_groups, kv_groups = triton.cdiv(num_heads, heads_block), triton.cdiv(num_kv_heads, heads_block)
    grid = (num_tokens, q_groups + kv_groups * (2 if has_cache or has_value_norm else 1))
    launcher(_qk_norm_rope_store_kernel, grid, pdl and has_pdl(qkv.device))(
        qkv, q_weight, k_weight, cos_sin_cache, positions, k_cache, v_cache, slot_mapping, kv_scales, query_scales, eps,
        ROW=qkv.stride(0), NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim,
        HALF_BLOCK=half_block, HEADS_BLOCK=heads_block, HAS_NORM=q_weight is not None,
        HAS_VALUE_NORM=has_value_norm, HAS_CACHE=has_cache,
        num_warps=min(max(heads_block * half_block // 256, 1), 8),
    )  # fmt: skip
