"""store_kvcache and its twin write every token's heads to its slot, bit for bit, and touch nothing else."""

import pytest
import torch

from nanovllm.kernels.store_kvcache import store_kvcache
from nanovllm.layers.attention_torch import store_kvcache_torch

IMPLEMENTATIONS = [store_kvcache, store_kvcache_torch]


def fused_kv(num_tokens, num_kv_heads, head_dim, dtype, device, seed):
    """Keys and values as slices of one projection, as the model hands them over."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.randn(num_tokens, (num_kv_heads * 3) * head_dim, generator=generator).to(device, dtype)
    _, key, value = fused.split(num_kv_heads * head_dim, dim=1)
    return key.view(-1, num_kv_heads, head_dim), value.view(-1, num_kv_heads, head_dim)


def poisoned_caches(num_blocks, block_size, num_kv_heads, head_dim, dtype, device):
    shape = (2, num_blocks, block_size, num_kv_heads, head_dim)
    return torch.full(shape, float("nan"), dtype=dtype, device=device).unbind(0)


@pytest.mark.parametrize("store", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "num_kv_heads", "head_dim", "block_size"),
    [(1, 1, 32, 16), (5, 8, 128, 16), (7, 3, 80, 32), (23, 2, 64, 256), (9, 7, 36, 16)],
)
def test_writes_each_token_to_its_slot_and_nothing_else(
    store, dtype, num_tokens, num_kv_heads, head_dim, block_size, device
):
    num_blocks = 4
    key, value = fused_kv(num_tokens, num_kv_heads, head_dim, dtype, device, seed=num_tokens)
    k_cache, v_cache = poisoned_caches(num_blocks, block_size, num_kv_heads, head_dim, dtype, device)
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(7))[:num_tokens]
    slots[::3] = -1

    store(key, value, k_cache, v_cache, slots.int().to(device))

    for rows, cache in ((key, k_cache), (value, v_cache)):
        expected = torch.full_like(cache, float("nan")).flatten(0, 1)
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                expected[slot] = rows[token]
        assert torch.equal(cache.flatten(0, 1).isnan(), expected.isnan())
        assert torch.equal(cache.flatten(0, 1).nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("store", IMPLEMENTATIONS)
@pytest.mark.parametrize("num_tokens", [0, 6])
def test_no_slot_writes_nothing(store, num_tokens, device):
    key, value = fused_kv(num_tokens, 2, 32, torch.float32, device, seed=0)
    k_cache, v_cache = poisoned_caches(2, 16, 2, 32, torch.float32, device)
    store(key, value, k_cache, v_cache, torch.full((num_tokens,), -1, dtype=torch.int32, device=device))
    assert k_cache.isnan().all()
    assert v_cache.isnan().all()


def test_refuses_what_it_cannot_address(device):
    key, value = fused_kv(4, 2, 32, torch.float32, device, seed=0)
    k_cache, v_cache = poisoned_caches(2, 16, 2, 32, torch.float32, device)
    slots = torch.arange(4, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="heads packed"):
        store_kvcache(key.transpose(1, 2), value, k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="shapes don't agree"):
        store_kvcache(key, value[:3], k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="dtypes"):
        store_kvcache(key.half(), value.half(), k_cache, v_cache, slots)
    with pytest.raises(ValueError, match="contiguous"):
        store_kvcache(key, value, k_cache[:, ::2], v_cache[:, ::2], slots)
    with pytest.raises(ValueError, match="slot_mapping"):
        store_kvcache(key, value, k_cache, v_cache, slots[:3])


@pytest.mark.gpu
def test_slots_beyond_two_billion_elements():
    num_blocks, block_size, num_kv_heads, head_dim = 8200, 256, 8, 128
    assert num_blocks * block_size * num_kv_heads * head_dim > 2**31
    key, value = fused_kv(2, num_kv_heads, head_dim, torch.bfloat16, "cuda", seed=0)
    k_cache, v_cache = poisoned_caches(num_blocks, block_size, num_kv_heads, head_dim, torch.bfloat16, "cuda")
    last = num_blocks * block_size - 1
    store_kvcache(key, value, k_cache, v_cache, torch.tensor([last, 3], dtype=torch.int32, device="cuda"))
    assert torch.equal(k_cache[-1, -1], key[0])
    assert torch.equal(v_cache[-1, -1], value[0])
    assert torch.equal(k_cache[0, 3], key[1])
    assert k_cache[-1, -2].isnan().all()
