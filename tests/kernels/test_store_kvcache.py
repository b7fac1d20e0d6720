"""The cache write alone: kernel against twin."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.attention import store_kvcache as kernel
from nanovllm.kernels.attention.store_kvcache import store_kvcache, store_kvcache_kernel

NUM_BLOCKS, BLOCK_SIZE = 5, 8


def random_case(num_tokens, num_kv_heads, head_dim, dtype, device, index_dtype=torch.int32):
    """Keys and values inside longer rows, caches full of NaN, and some slots that are none."""
    row = torch.randn(num_tokens, (5 + 2 * num_kv_heads) * head_dim, device=device).to(dtype)
    _, key, value = row.view(num_tokens, 5 + 2 * num_kv_heads, head_dim).split((5, num_kv_heads, num_kv_heads), dim=1)
    caches = torch.full((2, NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=device)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE, device=device)[:num_tokens].to(index_dtype)
    slots[::3] = -1
    slots[1::6] -= 50  # below -1
    return key, value, *caches, slots


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(("num_tokens", "num_kv_heads", "head_dim"), [(9, 8, 128), (7, 3, 20), (1, 1, 5), (0, 2, 16)])
def test_kernel_equals_twin(num_tokens, num_kv_heads, head_dim, dtype, index_dtype, device):
    case = random_case(num_tokens, num_kv_heads, head_dim, dtype, device, index_dtype)
    found = []
    for function in (store_kvcache.twin, store_kvcache.kernel, store_kvcache):
        caches = [cache.clone() for cache in case[2:4]]
        function(*case[:2], *caches, case[4])
        found.append(caches)
    for caches in found:
        for cache, x in zip(caches, case[:2], strict=True):
            flat = cache.flatten(0, 1)
            is_stored = case[4] >= 0
            assert torch.equal(flat[case[4][is_stored].long()], x[is_stored])
            assert flat.isnan().flatten(1).all(1).sum() == len(flat) - is_stored.sum(), "it wrote elsewhere"


def test_the_kernel_as_readers_of_nano_vllm_launch_it(device):
    key, value, k_cache, v_cache, slots = random_case(6, 2, 16, torch.float32, device)
    strides = key.stride(0), value.stride(0)
    store_kvcache_kernel[(6,)](key, strides[0], value, strides[1], k_cache, v_cache, slots, 32)
    expected = torch.full_like(k_cache, torch.nan), torch.full_like(v_cache, torch.nan)
    store_kvcache.twin(key, value, *expected, slots)
    for cache, other in zip((k_cache, v_cache), expected, strict=True):
        assert torch.equal(cache.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({2: torch.zeros(5, 8, 2, 32)}, "a cache must be"),
        ({3: torch.zeros(5, 8, 2, 16).half()}, "a cache must be .* of torch.float32"),
        ({3: torch.zeros(5, 16, 2, 16)[:, ::2]}, "a cache must be contiguous"),
        ({4: torch.zeros(5).int()}, "a slot for each token"),
        ({1: torch.zeros(5, 2, 16)}, "must be alike"),
    ],
)
def test_other_layouts_are_refused(changes, message):
    case = [changes.get(i, x) for i, x in enumerate(random_case(6, 2, 16, torch.float32, "cpu"))]
    with pytest.raises(ValueError, match=message):
        kernel.store_kvcache(*case)


def test_heads_that_are_not_packed_are_refused():
    _key, value, *rest = random_case(6, 2, 16, torch.float32, "cpu")
    with pytest.raises(ValueError, match="packed"):
        store_kvcache.kernel(torch.zeros(6, 4, 16)[:, ::2], value, *rest)
