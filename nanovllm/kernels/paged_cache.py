"""The layout of the paged KV cache, and how the attention kernels find a slot.

There is one cache for keys and one for values, `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous. Slot
`block * block_size + offset` holds the heads of one token side by side. Offsets are int64, because a cache of a few
gigabytes has more than 2**31 elements. `qk_norm_rope_store` writes the caches.
"""

import torch
import triton
import triton.language as tl

SMALLEST_BLOCK = 16


def check_cache(k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """Raise ValueError unless the two caches have the layout that the attention kernels expect."""
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

    The stride between tokens may be anything: these tensors are usually slices of the fused qkv projection.
    """
    for name, tensor in tensors.items():
        if tensor.dim() != 3:
            raise ValueError(f"{name} must be [num_tokens, heads, head_dim], got {list(tensor.shape)}")
        _, heads, head_dim = tensor.shape
        if tensor.stride(2) != 1 or (heads > 1 and tensor.stride(1) != head_dim):
            raise ValueError(f"{name} must have its heads packed within a token, got strides {tensor.stride()}")


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
