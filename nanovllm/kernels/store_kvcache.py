"""The paged KV cache as kernels see it: its layout, how a slot is found, and how keys and values get in.

A cache is `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous, one for keys and one for values. Slot
`block * block_size + offset` holds one token's heads side by side. Slots are counted in int64 wherever they are
multiplied out: a cache of a few gigabytes has more than 2**31 elements.
"""

import torch
import triton
import triton.language as tl

SMALLEST_BLOCK = 16


def check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raise ValueError unless the two caches have the layout that the attention kernels address."""
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            "k_cache and v_cache must be alike, [num_blocks, block_size, num_kv_heads, head_dim]; got "
            f"{list(k_cache.shape)} {k_cache.dtype} and {list(v_cache.shape)} {v_cache.dtype}"
        )
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous")
    block_size = k_cache.shape[1]
    if block_size < SMALLEST_BLOCK or block_size & (block_size - 1):
        raise ValueError(f"block_size must be a power of two >= {SMALLEST_BLOCK}, got {block_size}")


def check_heads(**tensors: torch.Tensor) -> None:
    """Raise ValueError unless each tensor is `[num_tokens, heads, head_dim]` with its heads packed in every token.

    The stride between tokens is free: these tensors are usually slices of the fused qkv projection.
    """
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            raise ValueError(f"{name} must be [num_tokens, heads, head_dim], got {list(tensor.shape)}")
        _, heads, head_dim = tensor.shape
        if tensor.stride(2) != 1 or (heads > 1 and tensor.stride(1) != head_dim):
            raise ValueError(f"{name} must have its heads packed within a token, got strides {tensor.stride()}")


@triton.jit
def key_slots(table_ptr, first_key, num_keys, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Slots (int64 `[TILE]`) of keys first_key, first_key + 1, ... of the sequence whose block table is given.

    `first_key` is a multiple of TILE. What comes back for a key from `num_keys` on must not be read.
    """
    keys = first_key + tl.arange(0, TILE)
    if TILE <= BLOCK_SIZE:
        # Both are powers of two, so the tile lies in one block: one scalar lookup serves all its keys.
        block = tl.load(table_ptr + first_key // BLOCK_SIZE)
    else:
        block = tl.load(table_ptr + keys // BLOCK_SIZE, mask=keys < num_keys, other=0)
    return block.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE


@triton.jit
def _store_kvcache_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_mapping_ptr,
    key_stride,
    value_stride,
    ROW: tl.constexpr,
    PADDED_ROW: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, PADDED_ROW)
        inside = column < ROW
        key = tl.load(key_ptr + token * key_stride + column, mask=inside)
        value = tl.load(value_ptr + token * value_stride + column, mask=inside)
        tl.store(k_cache_ptr + slot * ROW + column, key, mask=inside)
        tl.store(v_cache_ptr + slot * ROW + column, value, mask=inside)


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write each token's key and value to its slot of the paged cache, in place.

    Args:
        key, value: `[num_tokens, num_kv_heads, head_dim]`, heads packed within a token, any stride between tokens.
        k_cache, v_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous, of the dtype of `key`.
        slot_mapping: int32 `[num_tokens]`, `block * block_size + offset`; -1 writes nothing (a padding row of a
            CUDA graph). Two tokens must not name one slot.

    Raises:
        ValueError: a layout that the kernel can't address, or shapes and dtypes that don't agree.

    The cache layout is that of PagedAttention (Kwon et al. 2023) with a token's heads kept together.
    """
    check_heads(key=key, value=value)
    num_tokens, num_kv_heads, head_dim = key.shape
    if value.shape != key.shape or k_cache.shape[2:] != key.shape[1:] or v_cache.shape != k_cache.shape:
        raise ValueError(
            f"shapes don't agree: key {list(key.shape)}, value {list(value.shape)}, "
            f"k_cache {list(k_cache.shape)}, v_cache {list(v_cache.shape)}"
        )
    if not (key.dtype == value.dtype == k_cache.dtype == v_cache.dtype):
        raise ValueError(f"dtypes must be one: {key.dtype}, {value.dtype}, caches {k_cache.dtype}, {v_cache.dtype}")
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("k_cache and v_cache must be contiguous")
    if slot_mapping.shape != (num_tokens,):
        raise ValueError(f"slot_mapping must be [{num_tokens}], got {list(slot_mapping.shape)}")
    if num_tokens == 0:
        return
    row = num_kv_heads * head_dim
    padded_row = triton.next_power_of_2(row)
    # One 16-byte access a thread for the usual row (8 heads of 128 in bf16 fill four warps).
    num_warps = min(8, max(1, padded_row * key.element_size() // 512))
    _store_kvcache_kernel[(num_tokens,)](
        key,
        value,
        k_cache,
        v_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        ROW=row,
        PADDED_ROW=padded_row,
        num_warps=num_warps,
    )
