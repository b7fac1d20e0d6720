"""Attention driven by hand: a cache of ours, a context set by set_context, and no engine."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.attention import Attention, store_kvcache
from nanovllm.layers.backends import choice
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.stores.paged_kv_cache import PagedKVCache
from nanovllm.utils.context import reset_context, set_context

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 16, 16
LENS, TABLES = (40, 7), [[3, 0, 5], [2, -1, -1]]


@pytest.fixture(autouse=True)
def no_context():
    yield
    reset_context()


def make_layer(device, **options) -> Attention:
    layer = Attention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, **options)
    # Nobody may read what nobody has written.
    layer.k_cache, layer.v_cache = torch.full((2, 6, BLOCK_SIZE, KV_HEADS, HEAD_DIM), torch.nan, device=device)
    return layer


def slots_of(seq: int, start: int, end: int) -> list[int]:
    return [TABLES[seq][i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, end)]


def prefill(layer, qkv, starts, device) -> torch.Tensor:
    """Of each sequence the tokens from its start on."""
    new = [end - start for start, end in zip(starts, LENS, strict=True)]
    parts = [[x[start:] for x in of_seq] for start, of_seq in zip(starts, qkv, strict=True)]
    q, k, v = (torch.cat(each) for each in zip(*parts, strict=True))
    cu_q, cu_k = (torch.tensor([0, *lens], device=device).cumsum(0).int() for lens in (new, LENS))
    slots = [slot for seq in range(2) for slot in slots_of(seq, starts[seq], LENS[seq])]
    tables = torch.tensor(TABLES, dtype=torch.int32, device=device) if any(starts) else None
    set_context(True, cu_q, cu_k, max(new), max(LENS), torch.tensor(slots, device=device).int(), None, tables)
    return layer(q, k, v)


def expected_of(qkv, window=None) -> list[torch.Tensor]:
    out = []
    for q, k, v in qkv:
        mask = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
        mask = mask if window is None else mask.triu(1 - window)
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1))
    return out


@pytest.fixture
def qkv(device):
    torch.manual_seed(0)
    return [[torch.randn(n, heads, HEAD_DIM, device=device) for heads in (HEADS, KV_HEADS, KV_HEADS)] for n in LENS]


@pytest.mark.parametrize("kind", ["chosen", "triton", "torch"])
@pytest.mark.parametrize("window", [None, 9])
def test_prefill_a_cached_prefix_and_decode(kind, window, qkv, device, monkeypatch):
    if kind == "triton":
        pytest.importorskip("triton")
    from nanovllm.layers.backends.triton_backend import TritonBackend

    backend = {"chosen": None, "triton": TritonBackend(), "torch": TorchBackend()}[kind]
    layer = make_layer(device, backend=backend, window=window)
    expected = expected_of(qkv, window)
    close = {"atol": 1e-5, "rtol": 1e-5}
    torch.testing.assert_close(prefill(layer, qkv, (0, 0), device), torch.cat(expected), **close)
    # The rest of the sequences again, with its beginning from the cache.
    out = prefill(layer, qkv, (32, 3), device)
    torch.testing.assert_close(out, torch.cat([expected[0][32:], expected[1][3:]]), **close)
    # The last tokens again, as a decode step with a row of padding.
    q, k, v = (torch.stack([of_seq[i][-1] for of_seq in qkv] + [qkv[0][i][0] * 9]) for i in range(3))
    last = [slots_of(i, n - 1, n)[0] for i, n in enumerate(LENS)]
    for x in (layer.k_cache, layer.v_cache):
        x.view(-1, KV_HEADS, HEAD_DIM)[last] = torch.nan
    lens, tables = torch.tensor([*LENS, 0], device=device).int(), torch.tensor([*TABLES, [-1] * 3], device=device).int()
    set_context(False, slot_mapping=torch.tensor([*last, -1], device=device), context_lens=lens, block_tables=tables)
    out = layer(q, k, v)
    torch.testing.assert_close(out[:2], torch.stack([x[-1] for x in expected]), **close)
    assert (out[2] == 0).all()


def test_without_a_cache_nothing_is_written_and_heads_may_be_flat(qkv, device):
    layer = Attention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS)
    assert (layer.num_heads, layer.head_dim, layer.scale, layer.num_kv_heads) == (4, 16, 0.25, 2)
    assert layer.k_cache.numel() == layer.v_cache.numel() == 0
    ends = torch.tensor([0, 40], device=device).int()
    set_context(True, ends, ends, 40, 40)
    q, k, v = qkv[0]
    out = layer(q.flatten(1), k.flatten(1), v.flatten(1))
    torch.testing.assert_close(out, expected_of(qkv)[0].flatten(1), atol=1e-5, rtol=1e-5)


def test_what_the_cache_or_the_step_lacks_is_said(qkv, device):
    layer, (q, k, v) = make_layer(device), qkv[0]
    ends = torch.tensor([0, 40], device=device).int()
    set_context(True, ends, ends, 40, 40)
    with pytest.raises(ValueError, match="no slot_mapping"):
        layer(q, k, v)
    layer.kv_scales = torch.ones(2, KV_HEADS, device=device)
    with pytest.raises(ValueError, match="no float8 KV cache"):
        layer(q, k, v)


def test_layers_forget_a_store_that_is_freed():
    layers = [Attention(HEADS, HEAD_DIM, 1.0, KV_HEADS) for _ in range(2)]
    shape = AttentionShape(HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, torch.float32, torch.device("cpu"))
    cache = PagedKVCache(layers, [shape] * 2)
    cache.allocate(3, 0)
    assert [layer.k_cache.shape for layer in layers] == [(3, BLOCK_SIZE, KV_HEADS, HEAD_DIM)] * 2
    cache.free()
    assert [layer.k_cache.numel() + layer.v_cache.numel() for layer in layers] == [0, 0]


def test_the_back_end_is_chosen_by_device_dtype_and_cache(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "nanovllm.layers.attention.backend_by_hand", lambda shape: asked.append(shape) or TorchBackend()
    )
    layer = Attention(HEADS, HEAD_DIM, 1.0, KV_HEADS)
    ends = torch.tensor([0, 3]).int()
    set_context(True, ends, ends, 3, 3, torch.tensor([0, 1, 2]))
    for dtype, num_blocks in ((torch.float32, 0), (torch.float32, 0), (torch.bfloat16, 0), (torch.bfloat16, 2)):
        layer.k_cache, layer.v_cache = torch.zeros(2, num_blocks, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)
        layer(*(torch.zeros(3, heads, HEAD_DIM, dtype=dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)))
    assert [(shape.dtype, shape.block_size) for shape in asked] == [
        (torch.float32, 256),
        (torch.bfloat16, 256),
        (torch.bfloat16, BLOCK_SIZE),
    ]
    assert [each.name for each in choice._BY_HAND] == ["flash_attn", "triton", "torch"]
    assert isinstance(choice.backend_by_hand(asked[0]), TorchBackend)


def test_store_kvcache_is_where_readers_look_for_it():
    key, value = torch.randn(2, 3, KV_HEADS, HEAD_DIM)
    caches = torch.zeros(2, 2, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    store_kvcache(key, value, *caches, torch.tensor([17, -1, 4]))
    assert torch.equal(caches[0].flatten(0, 1)[[17, 4]], key[[0, 2]])
    assert torch.equal(caches[1].flatten(0, 1)[[17, 4]], value[[0, 2]])
    assert caches[:, 0, 0].eq(0).all()
