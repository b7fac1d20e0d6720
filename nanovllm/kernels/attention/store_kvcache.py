"""Writing keys and values to their slots of the paged KV cache, and nothing else. (`qk_norm_rope_store` also does what
comes before.)"""

from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.triton_stub import tl, triton


@triton.jit
def store_kvcache_kernel(
    key_ptr, key_stride, value_ptr, value_stride, k_cache_ptr, v_cache_ptr, slot_mapping_ptr, D: tl.constexpr
):
    BLOCK: tl.constexpr = triton.next_power_of_2(D)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    if slot >= 0:
        columns = tl.arange(0, BLOCK)
        mask = columns < D
        key = tl.load(key_ptr + token * key_stride + columns, mask=mask)
        value = tl.load(value_ptr + token * value_stride + columns, mask=mask)
        tl.store(k_cache_ptr + slot * D + columns, key, mask=mask)
        tl.store(v_cache_ptr + slot * D + columns, value, mask=mask)


@kernel_or_twin
def store_kvcache(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write each token's key and value to its slot.

    Args:
        key, value: `[num_tokens, num_kv_heads, head_dim]`, heads packed within a token, any stride between tokens.
        k_cache, v_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous, of the key's dtype.
        slot_mapping: int32 or int64 `[num_tokens]`: block * block_size + offset; negative stores nothing.

    Raises ValueError for other shapes, strides or dtypes. Slots are not checked.
    """
    _check(key, value, k_cache, v_cache, slot_mapping)
    is_stored = slot_mapping >= 0
    slots = slot_mapping[is_stored].long()
    for x, cache in ((key, k_cache), (value, v_cache)):
        cache.view(-1, *x.shape[1:])[slots] = x[is_stored]


@kernel_of(store_kvcache)
def _launch_store_kvcache(key, value, k_cache, v_cache, slot_mapping):
    _check(key, value, k_cache, v_cache, slot_mapping)
    num_tokens, num_kv_heads, head_dim = key.shape
    for x in (key, value):
        if x.stride(2) != 1 or (num_kv_heads > 1 and x.stride(1) != head_dim):
            raise ValueError(f"the heads of a token must be packed, not have strides {x.stride()}")
    if num_tokens == 0:
        return
    args = key, key.stride(0), value, value.stride(0), k_cache, v_cache, slot_mapping.contiguous()
    launcher(store_kvcache_kernel, (num_tokens,))(*args, D=num_kv_heads * head_dim)


def _check(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    for x, cache in ((key, k_cache), (value, v_cache)):
        if cache.dim() != 4 or cache.shape[2:] != x.shape[1:] or not cache.is_contiguous() or cache.dtype != x.dtype:
            raise ValueError(
                f"a cache must be contiguous, of {x.dtype} and of [num_blocks, block_size, {list(x.shape[1:])}], not "
                f"{cache.dtype} and {list(cache.shape)}"
            )
    if key.shape != value.shape or slot_mapping.shape != key.shape[:1]:
        raise ValueError(
            f"key {list(key.shape)} and value {list(value.shape)} must be alike, and slot_mapping "
            f"{list(slot_mapping.shape)} have a slot for each token"
        )
