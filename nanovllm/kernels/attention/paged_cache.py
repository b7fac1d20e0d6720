"""The layout of the paged KV cache, and how the attention kernels find a slot.

There is one cache for keys and one for values, `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous. Slot
`block * block_size + offset` holds the heads of one token side by side. Offsets are int64, because a cache of a few
gigabytes has more than 2**31 elements. `qk_norm_rope_store` writes the caches.

In a cache of float8_e4m3fn a number stands for itself times the scale of its KV head. The attention kernels convert it
to the dtype of q, or in decode to float16 if that is bfloat16. It is exact in both. They multiply scores and outputs by
the scales, not each key and value.

`paged_prefill` and `paged_decode` compute softmax(q k^T * scale) v with grouped-query heads. Arguments of both:
    q: `[num_tokens, num_heads, head_dim]`, heads packed within a token, any stride between tokens.
    k_cache, v_cache: of q's dtype or float8_e4m3fn, block_size a power of two from 16 up. They hold the keys and values
        of the new tokens already.
    block_tables: int32, `max_blocks` for each sequence or row, right-padded with -1.
    scale: positive factor of the scores, usually `head_dim ** -0.5`.
    kv_scales: float32 `[2, num_kv_heads]`, contiguous, of the keys and of the values in caches of float8_e4m3fn; else
        None.

    sinks: `[num_heads]`, contiguous, any float dtype: of each head a further score, whose weight counts in the sum of
        the softmax and multiplies no value (Xiao et al. 2023, arXiv:2309.17453; learned by gpt-oss); None: none.

They return a contiguous tensor like q, computed in float32, and raise ValueError as `check_layout` does.
"""

import torch

from nanovllm.kernels.triton_stub import tl, triton

SMALLEST_BLOCK = 16


def check_layout(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, paged: bool, kv_scales: torch.Tensor | None
) -> None:
    """Raise ValueError unless the attention kernels can address these tensors. keys and values: the caches if `paged`,
    otherwise laid out like q. Those may have any stride between tokens: they are slices of the fused projection.
    kv_scales: as for the kernels."""
    for tensor in (q,) if paged else (q, keys, values):
        if tensor.dim() != 3 or tensor.stride(2) != 1 or (tensor.shape[1] > 1 and tensor.stride(1) != tensor.shape[2]):
            raise ValueError(
                "q, k and v must be [num_tokens, heads, head_dim] with their heads packed within a token, not "
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )
    if paged:
        block_size = keys.shape[1]
        if keys.dim() != 4 or not (keys.is_contiguous() and values.is_contiguous()):
            raise ValueError("caches must be contiguous [num_blocks, block_size, num_kv_heads, head_dim]")
        if block_size < SMALLEST_BLOCK or block_size & (block_size - 1):
            raise ValueError(f"block_size must be a power of two >= {SMALLEST_BLOCK}, got {block_size}")
    is_fp8 = paged and keys.dtype == torch.float8_e4m3fn
    is_alike = keys.shape == values.shape and keys.dtype == values.dtype and (is_fp8 or keys.dtype == q.dtype)
    if not is_alike or keys.shape[-1] != q.shape[-1] or q.shape[1] % keys.shape[-2]:
        raise ValueError(
            f"q {list(q.shape)} {q.dtype}, keys {list(keys.shape)} {keys.dtype} and values {list(values.shape)} "
            f"{values.dtype} must be alike: one head_dim, one dtype (but for caches of "
            "float8_e4m3fn), and a whole number of query heads a KV head"
        )
    check_scales(kv_scales, keys.shape[-2], is_fp8)


def check_scales(kv_scales: torch.Tensor | None, num_kv_heads: int, is_fp8: bool) -> None:
    """Raise ValueError unless there are scales for caches of float8_e4m3fn, and none for others."""
    if kv_scales is None:
        ok = not is_fp8
    else:
        is_packed = kv_scales.dtype == torch.float32 and kv_scales.is_contiguous()
        ok = is_fp8 and is_packed and kv_scales.shape == (2, num_kv_heads)
    if not ok:
        raise ValueError(
            f"kv_scales must be a contiguous float32 [2, {num_kv_heads}] for caches of float8_e4m3fn, else None"
        )


def check_sinks(sinks: torch.Tensor | None, num_heads: int) -> None:
    """Raise ValueError unless there is none, or one for each head."""
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks must be a contiguous [{num_heads}], not {list(sinks.shape)}")


@triton.jit
def load_sinks(sinks_ptr, heads, is_head):
    """The scores of these heads' sinks in units of log2, with which a running softmax begins; its sum is 1 then."""
    return tl.load(sinks_ptr + heads, mask=is_head, other=0.0).to(tl.float32) * 1.4426950408889634


@triton.jit
def load_blocks(table_ptr, first_key, num_keys, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """The blocks of keys first_key, first_key + 1, ... of the sequence with this block table, for `key_slots`: int32
    `[TILE]`, or one number if a tile lies in one block. `first_key` is a multiple of TILE."""
    if TILE <= BLOCK_SIZE:
        # Both are powers of two, so the whole tile lies in one block.
        blocks = tl.load(table_ptr + first_key // BLOCK_SIZE, mask=first_key < num_keys, other=0)
    else:
        keys = first_key + tl.arange(0, TILE)
        blocks = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < num_keys, other=0)
    return blocks


@triton.jit
def key_slots(blocks, first_key, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Slots (int64 `[TILE]`) of keys first_key, first_key + 1, ..., which lie in `blocks`. The slot of a key past the
    last one must not be read."""
    return blocks.to(tl.int64) * BLOCK_SIZE + (first_key + tl.arange(0, TILE)) % BLOCK_SIZE
