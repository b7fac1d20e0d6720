"""paged_prefill against its plain-torch twin, and both against dense attention in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from gpus import pretend_gpu
from kernel_harness import nightly
from prefill_cases import check, cu_seqlens, make_case

from nanovllm.kernels import shared_memory
from nanovllm.kernels.attention import paged_prefill as kernel
from nanovllm.kernels.attention.hopper_prefill import can_attend, choose_hopper_tiles
from nanovllm.kernels.attention.paged_prefill import choose_tiles, paged_prefill
from nanovllm.kernels.gluon_stub import HAS_GLUON
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.backends.torch_backend import prefill_attention_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(4, 2, 128, 256), (7, 1, 80, 16), *nightly((2, 2, 32, 16), (8, 2, 64, 32), (8, 1, 64, 256))],
)
def test_ragged_batch(num_heads, num_kv_heads, head_dim, block_size, paged, dtype, device):
    lens = [(0, 37), (0, 1), (0, 17)]
    check(make_case(lens, num_heads, num_kv_heads, head_dim, block_size, paged, dtype, device, seed=head_dim))


@pytest.mark.parametrize(
    "lens",
    [
        [(32, 1), (64, 33)],  # whole cached blocks, shared by both sequences
        [(31, 2), (0, 5), (33, 16)],  # chunks that start and end off a block's edge
        [(95, 1), (96, 1), (97, 1)],  # as short as a decode
        [(16, 48), (0, 0), (48, 16)],  # a sequence with nothing to do
    ],
)
@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_cached_prefix(lens, block_size, device):
    check(make_case(lens, 4, 2, 32, block_size, True, torch.float32, device, seed=block_size))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("window", [None, 1, 20, 500])
def test_sinks(window, paged, device):
    lens = [(70, 20), (0, 37), (0, 1)] if paged else [(0, 90), (0, 1)]
    for dtype in (torch.float32, torch.float16):
        case = make_case(lens, 4, 2, 32, 16, paged, dtype, device, seed=1, window=window)
        case.arguments["sinks"] = torch.tensor([-30.0, 0.5, 4.0, 30.0], dtype=dtype, device=device)
        check(case)
    case.arguments["sinks"] = case.arguments["sinks"][:3]
    with pytest.raises(ValueError, match=r"sinks must be a contiguous \[4\]"):
        paged_prefill(**case.arguments)


@pytest.mark.parametrize("head_dim", [96, 256])
def test_heads_wider_than_usual_attend_as_the_twin(head_dim, device):
    check(make_case([(40, 30)], 2, 1, head_dim, 16, True, torch.float32, device, seed=head_dim))
    check(make_case([(20, 70)], 2, 1, head_dim, 64, True, torch.float16, device, seed=head_dim))


@pytest.mark.parametrize("paged", [False, True])
def test_many_tiles_of_queries_and_keys(paged, device):
    lens = [(200, 90), (0, 131)] if paged else [(0, 200), (0, 131)]
    check(make_case(lens, 2, 1, 64, 64, paged, torch.float16, device, seed=3))


@settings(max_examples=5)
@given(
    lens=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30)), min_size=1, max_size=3),
    group=st.sampled_from([1, 2, 4, 7, 8]),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([32, 48, 80, 256]),
    block_size=st.sampled_from([16, 32, 64]),
    window=st.none() | st.integers(1, 90),
    seed=st.integers(0, 2**31),
)
def test_any_batch_attends_as_the_twin(lens, group, num_kv_heads, head_dim, block_size, window, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (group * num_kv_heads, num_kv_heads, head_dim, block_size)
    check(make_case(lens, *shape, True, torch.float32, device, seed, window))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("window", [1, 64, 100, 129, *nightly(31, 128, 400)])
def test_a_window_starts_anywhere(window, paged, device):
    """That start before, at and after the edges of tiles, shorter and longer than the sequences, and so short that
    queries of one tile share no key."""
    lens = [(300, 70), (0, 140), (129, 3)] if paged else [(0, 300), (0, 40)]
    check(make_case(lens, 4, 2, 64, 256, paged, torch.float16, device, seed=window, window=window))


@pytest.mark.parametrize("window", [1, 3, 40])
def test_a_window_of_all_keys_is_none(window, device):
    case = make_case([(0, window)], 4, 2, 32, 16, False, torch.float32, device, seed=1, window=window)
    for function in (paged_prefill, prefill_attention_torch):
        assert torch.equal(function(**case.arguments), function(**(case.arguments | {"window": None})))


def test_the_last_tokens_alone_see_their_windows(device):
    """Of a prefill's last layer only they are needed."""
    case = make_case([(0, 90), (0, 37)], 4, 2, 32, 16, False, torch.float32, device, seed=1, window=20)
    every, last = case.arguments, torch.tensor([89, 126], device=device)
    some = {"q": every["q"][last], "cu_seqlens_q": cu_seqlens([1, 1], device), "max_seqlen_q": 1}
    for function in (paged_prefill, prefill_attention_torch):
        torch.testing.assert_close(function(**(every | some)), function(**every)[last], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kibibytes", [99, 163, 227])
@pytest.mark.parametrize("is_hopper", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("padded_dim", [16, 32, 64, 128, 256])
def test_tiles_fit_shared_memory(monkeypatch, padded_dim, itemsize, is_hopper, kibibytes):
    """Of every card, also of a Hopper that had as little as a GeForce card. Where there is room, the fastest stay."""
    device = torch.device("cpu")
    pretend_gpu(monkeypatch, GpuFacts.of(device), shared_bytes=kibibytes * 1024, capability=(9 if is_hopper else 8, 0))
    for max_rows in (1, 64, 65, 256, 257, 10000):
        for paged in (False, True):
            tiles = choose_tiles(padded_dim, itemsize, max_rows, paged, device)
            assert shared_memory.fits(tiles.shared_bytes(padded_dim, itemsize, device), device)
            assert tiles.keys >= 16
            assert tiles.rows >= 16
            if kibibytes == 227:
                assert tiles == kernel._fastest_tiles(padded_dim, itemsize, max_rows, paged)


@pytest.mark.skipif(not HAS_GLUON, reason="this Triton has no Gluon that the kernel is written in")
def test_hopper_is_asked_for_what_its_kernel_can_attend(monkeypatch):
    """Triton's interpreter doesn't run it. The tests below do on a GPU, and `scripts/compile_for_cards.py` compiles it.
    Its loads need tiles within a block, and addresses and strides of 16 bytes."""

    def is_asked(heads, max_seqlen_q=500, block_size=None, dtype=torch.bfloat16, cache_dtype=None, skipped=0):
        num_heads, num_kv_heads, head_dim = heads
        width = (num_heads + 2 * num_kv_heads) * head_dim + skipped
        qkv = torch.empty(600, width, dtype=dtype)[:, skipped:].unflatten(1, (-1, head_dim))
        q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if block_size is not None:
            k = v = torch.empty(2, block_size, num_kv_heads, head_dim, dtype=cache_dtype or dtype)
        return can_attend(q, k, v, max_seqlen_q, block_size is not None)

    assert not is_asked((8, 2, 64)), "a CPU"
    monkeypatch.setattr(GpuFacts, "is_hopper", True)
    for head_dim in (64, 128, 256, 512):
        for max_seqlen_q in (128, 511, 512):
            for block_size in (None, 64, 128, 256):
                assert is_asked((8, 2, head_dim), max_seqlen_q, block_size, torch.float16)
                tiles = choose_hopper_tiles(head_dim, max_seqlen_q, block_size)
                assert tiles.keys <= (block_size or tiles.keys)
        assert not is_asked((8, 2, head_dim), block_size=32)
        assert not is_asked((8, 2, head_dim), dtype=torch.float32)
        assert not is_asked((8, 2, head_dim), block_size=64, cache_dtype=torch.float8_e4m3fn)
        assert not is_asked((8, 2, head_dim), skipped=1)
        assert is_asked((8, 2, head_dim), skipped=8)
    assert not any(is_asked((8, 2, head_dim)) for head_dim in (32, 80, 96))
    assert not is_asked((16, 8, 128)), "a group that does not pay"
    assert not is_asked((8, 2, 128), 127), "too few queries"
    assert is_asked((16, 8, 256), 1)
    pretend_gpu(monkeypatch, GpuFacts.of(torch.device("cpu")), shared_bytes=163 * 1024)
    assert not is_asked((8, 2, 256)), "too little shared memory"


def test_a_batch_without_tokens_has_no_output(device):
    case = make_case([(0, 3)], 2, 1, 32, 16, False, torch.float32, device, seed=0)
    case.arguments["q"] = case.arguments["q"][:0]
    assert paged_prefill(**case.arguments).shape == (0, 2, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 3, 32)}, "whole number of query heads"),
        ({"q": torch.zeros(3, 4, 64)}, "one head_dim"),
        ({"q": torch.zeros(3, 4, 32, dtype=torch.float16)}, "one dtype"),
        ({"q": torch.zeros(3, 32, 4).transpose(1, 2)}, "heads packed"),
        ({"k_cache": torch.zeros(2, 24, 2, 32), "v_cache": torch.zeros(2, 24, 2, 32)}, "power of two"),
        ({"v_cache": torch.zeros(2, 16, 2, 64)}, "must be alike"),
    ],
)
def test_refuses_what_it_cannot_compute(change, message):
    case = make_case([(0, 3)], 4, 2, 32, 16, True, torch.float32, "cpu", seed=0)
    with pytest.raises(ValueError, match=message):
        paged_prefill(**{**case.arguments, **change})


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [16, 32])
def test_long_bfloat16_prompts(num_heads):
    check(make_case([(0, 2000), (1024, 977)], num_heads, 8, 128, 256, True, torch.bfloat16, "cuda", seed=0))
    check(make_case([(0, 2000), (0, 550), (0, 1)], num_heads, 8, 128, 256, False, torch.bfloat16, "cuda", seed=1))


@pytest.mark.gpu
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("heads", "window", "has_sinks", "dtype"),
    [
        ((8, 1, 64), 100, True, torch.bfloat16),
        ((14, 2, 64), None, False, torch.float16),
        ((16, 4, 128), None, True, torch.bfloat16),
        ((10, 2, 128), 100, False, torch.float16),
        ((16, 8, 256), 100, False, torch.bfloat16),
        ((6, 2, 256), None, True, torch.float16),
        ((16, 2, 512), None, False, torch.bfloat16),
        ((7, 1, 512), 100, True, torch.float16),
    ],
)
def test_warps_that_share_the_work(heads, window, has_sinks, dtype, paged):
    """By the kernel for Hopper. Groups of all sizes, windows that start within a tile, ends within a tile, sequences
    with nothing to do, and blocks of a tile and less."""
    lens = [(200, 90), (0, 131), (31, 2), (0, 0), (1025, 600)] if paged else [(0, 37), (0, 1), (0, 0), (0, 1200)]
    block_size = 128 if has_sinks else 64
    case = make_case(lens, *heads, block_size, paged, dtype, "cuda", seed=1, window=window)
    if has_sinks:
        case.arguments["sinks"] = torch.linspace(-4, 4, heads[0], dtype=dtype, device="cuda")
    check(case)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN, in Triton's interpreter
@pytest.mark.parametrize("paged", [False, True])
def test_a_sequence_of_nan_spoils_no_other(paged, device):
    """Neither in the batch nor in the cache, where its blocks lie between theirs."""
    block_size = 64 if device == "cuda" else 16
    case = make_case([(0, 37), (0, 40), (0, 70)], 4, 2, 64, block_size, paged, torch.float16, device, seed=1)
    arguments = case.arguments
    expected = paged_prefill(**arguments)
    if paged:
        spoilt = arguments["block_tables"][1, : -(-40 // block_size)].long()
        arguments["k_cache"][spoilt] = arguments["v_cache"][spoilt] = float("nan")
    else:
        arguments["k"][37:77] = arguments["v"][37:77] = float("nan")
    for function in (paged_prefill, prefill_attention_torch):
        out = function(**arguments)
        assert out[37:77].isnan().all()
        for rows in (slice(37), slice(77, None)):
            torch.testing.assert_close(out[rows], expected[rows], atol=4e-3, rtol=4e-3)
