"""Everything between the QKV projection and attention in one launch: q/k norm, rotation, KV cache write."""

import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.dependent_launch import gdc_launch_dependents, gdc_wait, has_pdl
from nanovllm.kernels.launch import launcher


@triton.jit
def _load_early(
    weight, table_row, heads, mask, HEAD_DIM: tl.constexpr, HALF_BLOCK: tl.constexpr, HAS_NORM: tl.constexpr
):
    """The rotation's cosines and sines and the norm's weights, `[heads, HALF_BLOCK]` of each half."""
    HALF: tl.constexpr = HEAD_DIM // 2
    # A table row is loaded once for each head, from the L1 cache after the first: a row loaded once would
    # have to be spread over the tile through shared memory, at two barriers a row.
    in_row = heads[:, None] * 0 + tl.arange(0, HALF_BLOCK)[None, :]
    cos = tl.load(table_row + in_row, mask=mask, other=0.0)
    sin = tl.load(table_row + HALF + in_row, mask=mask, other=0.0)
    first_scale = cos
    second_scale = sin
    if HAS_NORM:
        first_scale = tl.load(weight + in_row, mask=mask, other=0.0).to(tl.float32)
        second_scale = tl.load(weight + HALF + in_row, mask=mask, other=0.0).to(tl.float32)
    return cos, sin, first_scale, second_scale


@triton.jit
def _norm_rotate(
    heads_start,
    heads,
    mask,
    cos,
    sin,
    first_scale,
    second_scale,
    eps,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Normalizes and rotates heads in place; returns the rotated halves, `[heads, HALF_BLOCK]`, as stored."""
    HALF: tl.constexpr = HEAD_DIM // 2
    first_at = heads_start + heads[:, None] * HEAD_DIM + tl.arange(0, HALF_BLOCK)[None, :]
    first = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(first_at + HALF, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse_rms = tl.rsqrt(tl.sum(first * first + second * second, axis=1) / HEAD_DIM + eps)
        first = first * inverse_rms[:, None] * first_scale
        second = second * inverse_rms[:, None] * second_scale
    dtype: tl.constexpr = heads_start.dtype.element_ty
    rotated_first = (first * cos - second * sin).to(dtype)
    rotated_second = (second * cos + first * sin).to(dtype)
    tl.store(first_at, rotated_first, mask=mask)
    tl.store(first_at + HALF, rotated_second, mask=mask)
    return rotated_first, rotated_second


@triton.jit
def _qk_norm_rope_store_kernel(
    qkv,
    q_weight,
    k_weight,
    cos_sin_cache,
    positions,
    k_cache,
    v_cache,
    slot_mapping,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_CACHE: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    Q_GROUPS: tl.constexpr = (NUM_HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    KV_GROUPS: tl.constexpr = (NUM_KV_HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
    row = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    lane = tl.arange(0, HEADS_BLOCK)
    pair = tl.arange(0, HALF_BLOCK)
    in_head = (pair < HALF)[None, :]
    if HAS_CACHE:
        slot = tl.load(slot_mapping + token).to(tl.int64)

    # A program's heads are all of one kind, so these branches never diverge within it. In each the wait stands below
    # what may be read early.
    if group < Q_GROUPS + KV_GROUPS:
        table_row = cos_sin_cache + tl.load(positions + token).to(tl.int64) * HEAD_DIM
        if group < Q_GROUPS:
            heads = group * HEADS_BLOCK + lane
            mask = (heads < NUM_HEADS)[:, None] & in_head
            cos, sin, scale1, scale2 = _load_early(q_weight, table_row, heads, mask, HEAD_DIM, HALF_BLOCK, HAS_NORM)
            if PDL:
                gdc_wait()
            _norm_rotate(row, heads, mask, cos, sin, scale1, scale2, eps, HEAD_DIM, HALF_BLOCK, HAS_NORM)
        else:
            heads = (group - Q_GROUPS) * HEADS_BLOCK + lane
            mask = (heads < NUM_KV_HEADS)[:, None] & in_head
            cos, sin, scale1, scale2 = _load_early(k_weight, table_row, heads, mask, HEAD_DIM, HALF_BLOCK, HAS_NORM)
            if PDL:
                gdc_wait()
            k_row = row + NUM_HEADS * HEAD_DIM
            first, second = _norm_rotate(
                k_row, heads, mask, cos, sin, scale1, scale2, eps, HEAD_DIM, HALF_BLOCK, HAS_NORM
            )
            if HAS_CACHE:  # noqa: SIM102 (no cache, no slot)
                if slot >= 0:
                    cached_at = k_cache + slot * (NUM_KV_HEADS * HEAD_DIM)
                    cached_at += heads[:, None] * HEAD_DIM + pair[None, :]
                    tl.store(cached_at, first, mask=mask)
                    tl.store(cached_at + HALF, second, mask=mask)
    elif HAS_CACHE:
        heads = (group - Q_GROUPS - KV_GROUPS) * HEADS_BLOCK + lane
        mask = (heads < NUM_KV_HEADS)[:, None] & in_head
        offsets = heads[:, None] * HEAD_DIM + pair[None, :]
        v_row = row + (NUM_HEADS + NUM_KV_HEADS) * HEAD_DIM
        if PDL:
            gdc_wait()
        first = tl.load(v_row + offsets, mask=mask)
        second = tl.load(v_row + offsets + HALF, mask=mask)
        if slot >= 0:
            cached_at = v_cache + slot * (NUM_KV_HEADS * HEAD_DIM) + offsets
            tl.store(cached_at, first, mask=mask)
            tl.store(cached_at + HALF, second, mask=mask)


def qk_norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    cos_sin_cache: Tensor,
    positions: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    pdl: bool = False,
) -> None:
    """Turns a projection's output into attention's input, in place, and files k and v in the paged cache.

    Each head of q and k is RMS-normalized (where there are weights: Qwen3 has them, Qwen2 has not) and
    rotated at its token's position, all in float32 with one rounding at the end; v is left as it is. Then the
    token's k and v go to its slot of the caches.

    Args:
        qkv: `[num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]`, contiguous: q, then k, then v.
            Overwritten.
        q_weight: `[head_dim]`, or None for no norm.
        k_weight: `[head_dim]`, or None for no norm.
        eps: added to the mean square of a head.
        cos_sin_cache: float32 `[max_position, head_dim]`, contiguous, of a `RotaryEmbedding`.
        positions: int32 or int64 `[num_tokens]`, each in 0..max_position - 1: not checked on a GPU.
        k_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous, of qkv's dtype; None stores
            nothing.
        v_cache: like k_cache.
        slot_mapping: int32 or int64 `[num_tokens]`: block * block_size + offset; negative stores nothing.
        num_heads: query heads of this rank.
        num_kv_heads: key heads (and value heads) of this rank.
        pdl: programmatic dependent launch (see `dependent_launch`); all but qkv is read before the wait.

    Raises:
        ValueError: on a shape, stride or dtype other than these, or if only one of a pair of arguments is
            None.
    """
    head_dim = cos_sin_cache.shape[1]
    check_arguments(qkv, q_weight, k_weight, cos_sin_cache, k_cache, v_cache, slot_mapping, num_heads, num_kv_heads)
    num_tokens = qkv.shape[0]
    if num_tokens == 0:
        return
    # 8 heads of 128 are two warps with one 16-byte load of each half a thread: small enough that a single
    # token spreads over several SMs, large enough that 16k tokens fill every SM's 2048 threads.
    heads_block = min(8, triton.next_power_of_2(num_heads))
    half_block = triton.next_power_of_2(head_dim // 2)
    has_cache = k_cache is not None
    q_groups, kv_groups = triton.cdiv(num_heads, heads_block), triton.cdiv(num_kv_heads, heads_block)
    grid = (num_tokens, q_groups + kv_groups * (2 if has_cache else 1))
    launcher(_qk_norm_rope_store_kernel, grid, pdl and has_pdl(qkv.device))(
        qkv,
        q_weight,
        k_weight,
        cos_sin_cache,
        positions,
        k_cache,
        v_cache,
        slot_mapping,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=half_block,
        HEADS_BLOCK=heads_block,
        HAS_NORM=q_weight is not None,
        HAS_CACHE=has_cache,
        num_warps=min(max(heads_block * half_block // 256, 1), 8),
    )


def check_arguments(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_sin_cache: Tensor,
    k_cache: Tensor | None,
    v_cache: Tensor | None,
    slot_mapping: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
) -> None:
    """Raises ValueError where `qk_norm_rope_store` would read or write outside its tensors."""
    head_dim = cos_sin_cache.shape[1]
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dim() != 2 or qkv.shape[1] != width or not qkv.is_contiguous():
        raise ValueError(f"qkv must be a contiguous [num_tokens, {width}], not {list(qkv.shape)}")
    if head_dim % 2 or not cos_sin_cache.is_contiguous():
        raise ValueError(f"cos_sin_cache must be contiguous with an even width, not {list(cos_sin_cache.shape)}")
    if (q_weight is None) != (k_weight is None):
        raise ValueError("q_weight and k_weight must both be given, or both be None")
    if len({k_cache is None, v_cache is None, slot_mapping is None}) == 2:
        raise ValueError("k_cache, v_cache and slot_mapping must all be given, or all be None")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache is None:
            continue
        if cache.shape[2:] != (num_kv_heads, head_dim) or not cache.is_contiguous() or cache.dtype != qkv.dtype:
            raise ValueError(
                f"{name} must be a contiguous [num_blocks, block_size, {num_kv_heads}, {head_dim}] of "
                f"{qkv.dtype}, not {list(cache.shape)} of {cache.dtype}"
            )
