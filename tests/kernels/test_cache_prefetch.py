"""prefetch_cache: what it asks for, in the interpreter; that it is harmless, on a GPU."""

import numpy as np
import pytest
import torch
from decode_cases import make_case

from nanovllm.kernels import cache_prefetch
from nanovllm.kernels.cache_prefetch import prefetch_cache
from nanovllm.utils.decode_plan import make_plan

CACHES = ("k_cache", "v_cache", "block_tables")
LENS = [130, 0, 1, 64, 15, 700, 200]


def begin_with_a_line(cache: torch.Tensor) -> torch.Tensor:
    """A copy of a cache where a line of memory begins, as a GPU's caches do."""
    memory = torch.empty(cache.numel() + 128, dtype=cache.dtype)
    offset = -memory.data_ptr() % 128 // cache.element_size()
    return memory[offset : offset + cache.numel()].view(cache.shape).copy_(cache)


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what the interpreter has asked for")
@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "block_size", "dtype"),
    [
        (8, 128, 256, torch.bfloat16),
        (2, 64, 64, torch.bfloat16),
        (1, 32, 16, torch.float32),
        (3, 80, 32, torch.float16),
    ],
)
@pytest.mark.parametrize("most_bytes", [12 << 20, 1 << 14])
@pytest.mark.parametrize("min_programs", [40, 3])
def test_the_first_keys_of_the_first_pieces(
    monkeypatch, num_kv_heads, head_dim, block_size, dtype, most_bytes, min_programs
):
    case = make_case(LENS, num_kv_heads, num_kv_heads, head_dim, block_size, dtype, "cpu", seed=1)
    k_cache, v_cache = (begin_with_a_line(case[name]) for name in CACHES[:2])
    tables = case["block_tables"]
    plan = make_plan(case["context_lens"], num_kv_heads)
    asked = []
    monkeypatch.setattr(cache_prefetch, "_BYTES", most_bytes)
    monkeypatch.setattr(cache_prefetch, "_MIN_PROGRAMS", min_programs)
    monkeypatch.setattr(cache_prefetch, "prefetch_lasting_lines", lambda at: asked.append(at.handle.data.ravel()))
    prefetch_cache(k_cache, v_cache, tables, plan)

    key_bytes = num_kv_heads * head_dim * k_cache.element_size()
    num_pieces = max(1, most_bytes // (2 * 16 * key_bytes))
    expected = []
    for row, _, _, first_key, end_key, _, _ in plan[:num_pieces].tolist():
        for key in range(first_key, min(end_key, first_key + 16)) if row >= 0 else ():
            slot = int(tables[row, key // block_size]) * block_size + key % block_size
            for cache in (k_cache, v_cache):
                begin = cache.data_ptr() + slot * key_bytes
                expected.append(np.arange(begin, begin + key_bytes) // 128)
    lines = set(np.concatenate(expected).tolist())
    assert {int(address) // 128 for address in np.concatenate(asked)} == lines
    assert len(lines) > 10


@pytest.mark.gpu
@pytest.mark.parametrize(("num_kv_heads", "head_dim", "block_size"), [(8, 128, 256), (1, 64, 16), (3, 80, 32)])
def test_it_changes_nothing(num_kv_heads, head_dim, block_size):
    options = (num_kv_heads, num_kv_heads, head_dim, block_size, torch.bfloat16, "cuda")
    case = make_case(LENS * 30, *options, seed=2)
    caches = [case[name] for name in CACHES]
    before = [tensor.clone() for tensor in caches]
    prefetch_cache(*caches, make_plan(case["context_lens"], num_kv_heads))
    torch.cuda.synchronize()
    for tensor, copy in zip(caches, before, strict=True):
        torch.testing.assert_close(tensor, copy, rtol=0, atol=0, equal_nan=True)


def test_other_layouts_are_refused():
    cache = torch.zeros(2, 16, 4, 32).transpose(2, 3)
    with pytest.raises(ValueError, match="contiguous"):
        prefetch_cache(cache, cache, *torch.zeros(2, 1, 7, dtype=torch.int32))
