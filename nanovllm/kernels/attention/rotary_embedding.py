"""The rotation of queries and keys (Su et al. 2021), and nothing else. (`qk_norm_rope_store` also does what is before
and after it.)"""

import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.attention.qk_norm_rope import apply_rotary_emb
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.triton_stub import tl, triton


@triton.jit
def _rotary_kernel(
    q, k, q_out, k_out, cos_sin_cache, positions, query_scales, q_stride, k_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr, HEADS_BLOCK: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = HEAD_DIM // 2
    ROTARY_HALF: tl.constexpr = ROTARY_DIM // 2
    Q_GROUPS: tl.constexpr = (NUM_HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    # A group's heads are all of q, or all of k.
    is_q = group < Q_GROUPS
    num_heads = tl.where(is_q, NUM_HEADS, NUM_KV_HEADS)
    heads = (tl.where(is_q, group, group - Q_GROUPS) * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK))[:, None]
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (heads < num_heads) & (pair < HALF)
    # A pair is (dim, dim + shift). The dimensions that are not rotated make up the last pairs.
    is_rotated = pair < ROTARY_HALF
    dim = tl.where(is_rotated, pair, pair + ROTARY_HALF)
    shift = tl.where(is_rotated, ROTARY_HALF, HALF - ROTARY_HALF)
    x, out, stride = q, q_out, q_stride
    if not is_q:
        x, out, stride = k, k_out, k_stride
    position = tl.load(positions + token).to(tl.int64)
    table_row = cos_sin_cache + position * ROTARY_DIM + pair
    cos = tl.load(table_row, mask=is_rotated, other=1.0)
    sin = tl.load(table_row + ROTARY_HALF, mask=is_rotated, other=0.0)
    offsets = heads * HEAD_DIM + dim
    first = tl.load(x + token * stride + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + token * stride + offsets + shift, mask=mask, other=0.0).to(tl.float32)
    first, second = first * cos - second * sin, second * cos + first * sin
    if query_scales is not None:
        scale = tl.where(is_q, tl.load(query_scales + position), 1.0)
        first, second = first * scale, second * scale
    out_at = out + token * (num_heads * HEAD_DIM) + offsets
    tl.store(out_at, first.to(out.dtype.element_ty), mask=mask)
    tl.store(out_at + shift, second.to(out.dtype.element_ty), mask=mask)


@kernel_or_twin
def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, query_scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q and k, each head rotated at its token's position: in float32, rounded once, in new contiguous tensors.

    Args:
        positions: int32 or int64 `[num_tokens]`, each below max_position.
        q: `[num_tokens, num_heads, head_dim]`, heads packed within a token, any stride between tokens, head_dim even.
        k: `[num_tokens, num_kv_heads, head_dim]`, like q.
        cos_sin_cache: float32 `[max_position, 1, rotary_dim]`, the table of a `RotaryEmbedding`. The dimensions of a
            head from rotary_dim on stay as they are.
        query_scales: float32 `[max_position]`, what q is multiplied by after its rotation; None for 1.

    The kernel raises ValueError for other layouts. Positions are not checked.
    """
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    if query_scales is None:
        return apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin)
    scaled = apply_rotary_emb(q.float(), cos, sin) * query_scales[positions, None, None]
    return scaled.to(q.dtype), apply_rotary_emb(k, cos, sin)


@kernel_of(rotary_embedding)
def _launch_rotary_embedding(positions, q, k, cos_sin_cache, query_scales=None):
    (num_tokens, num_heads, head_dim), rotary_dim = q.shape, cos_sin_cache.shape[-1]
    for x in (q, k):
        is_packed = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == head_dim)
        if not is_packed or x.shape[::2] != (num_tokens, head_dim) or head_dim % 2:
            raise ValueError(
                f"q and k must be [num_tokens, heads, head_dim], head_dim even, their heads packed within a token, not "
                f"{list(q.shape)} and {list(k.shape)} with strides {q.stride()} and {k.stride()}"
            )
    if rotary_dim > head_dim or rotary_dim % 2 or not cos_sin_cache.is_contiguous():
        raise ValueError(f"cos_sin_cache must have an even number of columns up to {head_dim}, not {rotary_dim}")
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    if num_tokens == 0:
        return q_out, k_out
    num_kv_heads = k.shape[1]
    heads_block = min(8, triton.next_power_of_2(num_heads))
    half_block = triton.next_power_of_2(head_dim // 2)
    grid = (num_tokens, triton.cdiv(num_heads, heads_block) + triton.cdiv(num_kv_heads, heads_block))
    launcher(_rotary_kernel, grid)(
        q, k, q_out, k_out, cos_sin_cache, positions, query_scales, q.stride(0), k.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, ROTARY_DIM=rotary_dim,
        HALF_BLOCK=half_block, HEADS_BLOCK=heads_block, num_warps=min(max(heads_block * half_block // 256, 1), 8),
    )  # fmt: skip
    return q_out, k_out
