"""paged_decode against its plain-torch twin, and both against dense attention in float64."""

import pytest
import torch

pytest.importorskip("triton")

from decode_cases import H200, HAS_TMA, TOLERANCE, check, dense_decode, make_case, make_plan, needs_tma, paged_decode
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_harness import nightly

from nanovllm.kernels.attention.decode_plan import PIECE_FIELDS, DecodeConfig, DecodeWorkspace
from nanovllm.layers.backends import torch_backend as attention_torch
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.torch_backend import DecodePlan, decode_attention_torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (4, 2, 128, 256),
        (7, 1, 80, 16),
        (20, 1, 32, 16),
        (2, 1, 256, 16),
        *nightly((2, 2, 32, 16), (8, 2, 64, 32), (8, 1, 64, 256)),
    ],
)
def test_ragged_batch(num_heads, num_kv_heads, head_dim, block_size, dtype, device):
    lens = [0, 1, 15, 16, 17, 0, 130]
    check(make_case(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, device, seed=head_dim))


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_edges_of_blocks_and_tiles(block_size, device):
    lens = [block_size - 1, block_size, block_size + 1, 63, 64, 65]
    check(make_case(lens, 2, 1, 32, block_size, torch.float32, device, seed=block_size))


@pytest.mark.slow
@pytest.mark.parametrize("num_pieces", [6, 7, 9, 200])
def test_any_number_of_pieces(num_pieces, device):
    case = make_case([100, 0, 64, 420, 65], 4, 1, 64, 32, torch.float32, device, seed=5)
    plan = make_plan(case["context_lens"], 1, num_pieces)
    workspace = DecodeWorkspace(5, 4, 1, 64, device, num_pieces)
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    first = check(case, plan=plan, workspace=workspace)
    assert (workspace.arrivals == 0).all()
    again = paged_decode(**case, plan=plan, workspace=workspace)
    assert torch.equal(first, again)


@pytest.mark.parametrize("window", [None, 1, 70])
@pytest.mark.parametrize("tma", [False, pytest.param(True, marks=needs_tma)])
def test_sinks_count_once_in_each_row(window, tma, device):
    """Also where a row is cut into splits, and whether they are larger or smaller than the scores."""
    dtype = torch.float16 if tma or torch.cuda.is_available() else torch.float32
    case = make_case([100, 0, 64, 420, 1], 4, 2, 64, 64, dtype, device, seed=3, window=window)
    case["sinks"] = torch.tensor([-30.0, 0.5, 4.0, 30.0], dtype=dtype, device=device)
    plan = make_plan(case["context_lens"], 2, 12, window)
    check(case, plan=plan, config=DecodeConfig(32, 1, 3, tma=tma))
    with pytest.raises(ValueError, match=r"sinks must be a contiguous \[4\]"):
        paged_decode(**case | {"sinks": case["sinks"][:3]}, plan=plan)


@pytest.mark.parametrize("window", [1, 64, 65, 129, *nightly(16, 63, 500)])
@pytest.mark.parametrize("tma", [False, pytest.param(True, marks=needs_tma)])
def test_a_window_ends_anywhere(window, tma, device):
    """That end before, at and after the edges of tiles, blocks and splits, shorter and longer than the context."""
    lens = [0, 1, 64, 65, 130, 200, 421]
    case = make_case(lens, 4, 2, 64, 64, torch.float16, device, seed=window, window=window)
    plan = make_plan(case["context_lens"], 2, 12, window)
    check(case, plan=plan, config=DecodeConfig(32, 1, 3, tma=True) if tma else DecodeConfig(64, 4, 2))


def test_shared_block(device):
    case = make_case([40, 33], 4, 2, 32, 16, torch.float32, device, seed=1)
    case["block_tables"][1, :2] = case["block_tables"][0, :2]
    check(case)


def test_workspace_serves_batches_of_every_size(device):
    workspace = DecodeWorkspace(6, 4, 2, 32, device, H200.num_pieces(6, 2))
    for batch_size in (6, 1):
        lens = [17 + 30 * i for i in range(batch_size)]
        check(make_case(lens, 4, 2, 32, 16, torch.float32, device, seed=batch_size), workspace=workspace)
        assert (workspace.arrivals == 0).all()


@settings(max_examples=6)
@given(
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    tma=st.booleans(),
    group=st.sampled_from([1, 2, 4, 7, 8, 16]),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([32, 48, 80, 256]),
    block_size=st.sampled_from([16, 32, 64, 256]),
    spare=st.sampled_from([None, 1, 2, 5]),
    tile=st.sampled_from([16, 32, 64]),
    window=st.none() | st.integers(1, 160),
    seed=st.integers(0, 2**31),
)
def test_any_batch_attends_as_the_twin(lens, tma, group, num_kv_heads, head_dim, block_size, spare, tile, window, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32
    tma = tma and HAS_TMA
    if tma:
        head_dim, tile, dtype = 64, min(tile, block_size), torch.float16
    num_heads = group * num_kv_heads
    case = make_case(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, device, seed, window=window)
    plan = make_plan(case["context_lens"], num_kv_heads, spare and len(lens) + spare, window)
    check(case, plan=plan, config=DecodeConfig(tile, 1 if tma else 4, 2, tma=tma))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 80), (4, 2, 64), (7, 1, 36)])
def test_twin_gives_a_sequence_the_same_bits_in_any_batch(num_heads, num_kv_heads, head_dim):
    case = make_case([500, 3, 0, 257, 256], num_heads, num_kv_heads, head_dim, 16, torch.float32, "cpu", seed=2)
    together = decode_attention_torch(**case)
    for rows in ([0], [3], [4, 1], [3, 2, 0]):
        part = {name: case[name][rows] for name in ("q", "context_lens", "block_tables")}
        assert torch.equal(decode_attention_torch(**{**case, **part}), together[rows])


@pytest.mark.parametrize("window", [None, 40])
def test_twin_computes_rows_of_like_lengths_together(monkeypatch, window):
    lens = [1, 31, 32, 33, 64, 60, 0, 300, 290, 320, 64, 2]
    case = make_case(lens, 6, 2, 64, 16, torch.float32, "cpu", seed=3, window=window)
    rows = {name: case[name] for name in ("q", "context_lens", "block_tables")}

    def plan():
        shape = AttentionShape(6, 2, 64, 16, torch.float32, torch.device("cpu"))
        return DecodePlan(case["context_lens"].numpy(), case["block_tables"].numpy(), shape, window)

    together = decode_attention_torch(**case)
    num_groups = len(plan().groups)
    assert num_groups < len(set(lens))
    assert not together[6].any()
    monkeypatch.setattr(attention_torch, "_BYTES_AT_ONCE", 100_000)  # 195 keys of two heads
    assert len(plan().groups) > num_groups
    assert torch.equal(decode_attention_torch(**case), together)
    for i in range(len(lens)):
        alone = {name: values[i : i + 1] for name, values in rows.items()}
        assert torch.equal(decode_attention_torch(**{**case, **alone}), together[i : i + 1])


def test_no_sequences(device):
    case = make_case([1], 2, 1, 32, 16, torch.float32, device, seed=0)
    empty = {name: case[name][:0] for name in ("q", "context_lens", "block_tables")}
    assert paged_decode(**{**case, **empty}).shape == (0, 2, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(2, 3, 32)}, "whole number of query heads"),
        ({"q": torch.zeros(2, 4, 32, dtype=torch.float16)}, "one dtype"),
        ({"workspace": DecodeWorkspace(1, 4, 2, 32, "cpu", 999)}, "workspace too small"),
        ({"workspace": DecodeWorkspace(2, 4, 2, 32, "cpu", 3)}, "workspace too small"),
        ({"plan": torch.zeros(3, PIECE_FIELDS, dtype=torch.int64)}, "plan must be"),
        ({"plan": torch.zeros(3, 2, dtype=torch.int32)}, "plan must be"),
        ({"plan": torch.zeros(6, PIECE_FIELDS, dtype=torch.int32)[::2]}, "plan must be"),
    ],
)
def test_refuses_what_it_cannot_compute(change, message):
    case = make_case([3, 100], 4, 2, 32, 16, torch.float32, "cpu", seed=0)
    with pytest.raises(ValueError, match=message):
        paged_decode(**{**case, **change})


BOTH_KERNELS = pytest.mark.parametrize(
    "config", [DecodeConfig(64, 4, 2), pytest.param(DecodeConfig(64, 2, 3, tma=True), marks=needs_tma)]
)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NaN, in Triton's interpreter
@BOTH_KERNELS
def test_a_sequence_of_nan_spoils_no_other(config, device):
    """Nor does what it leaves in the workspace spoil a later one, whose splits lie where its own did."""
    lens = [130, 300, 65]
    case = make_case(lens, 4, 2, 64, 64, torch.float16, device, seed=3)
    plan = make_plan(case["context_lens"], 2, 20)
    workspace = DecodeWorkspace(3, 4, 2, 64, device, len(plan))
    options = {"plan": plan, "workspace": workspace, "config": config}
    expected = paged_decode(**case, **options)
    caches = [case[name].clone() for name in ("k_cache", "v_cache")]
    spoilt = case["block_tables"][1, :5].long()
    case["k_cache"][spoilt] = case["v_cache"][spoilt] = float("nan")
    for out in (paged_decode(**case, **options), decode_attention_torch(**case)):
        assert out[1].isnan().all()
        torch.testing.assert_close(out[[0, 2]], expected[[0, 2]], atol=4e-3, rtol=4e-3)
    for name, cache in zip(("k_cache", "v_cache"), caches, strict=True):
        case[name].copy_(cache)
    assert torch.equal(paged_decode(**case, **options), expected)


@pytest.mark.gpu
@BOTH_KERNELS
def test_graph_replays_with_other_context_lengths(config):
    lens = [4000, 300, 0, 1]
    case = make_case(lens, 16, 8, 128, 256, torch.bfloat16, "cuda", seed=0)
    workspace = DecodeWorkspace(4, 16, 8, 128, "cuda", H200.num_pieces(4, 8))
    plan = make_plan(case["context_lens"], 8)
    paged_decode(**case, plan=plan, workspace=workspace, config=config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_decode(**case, plan=plan, workspace=workspace, config=config)
    for shorter in ([4000, 300, 0, 1], [17, 0, 0, 1], [3999, 299, 0, 0], [4000, 300, 0, 1]):
        case["context_lens"].copy_(torch.tensor(shorter, dtype=torch.int32))
        plan.copy_(make_plan(case["context_lens"], 8))
        out.fill_(float("nan"))
        graph.replay()
        expected = dense_decode(**case)
        tolerance = TOLERANCE[torch.bfloat16]
        torch.testing.assert_close(out.double().cpu(), expected, atol=tolerance, rtol=tolerance)
        assert (workspace.arrivals == 0).all()


@pytest.mark.gpu
@BOTH_KERNELS
def test_splits_arriving_in_any_order_give_the_same_bits(config):
    case = make_case([30000] * 2, 16, 8, 128, 256, torch.bfloat16, "cuda", seed=0)
    workspace = DecodeWorkspace(2, 16, 8, 128, "cuda", H200.num_pieces(2, 8))
    first = paged_decode(**case, workspace=workspace, config=config)
    assert all(torch.equal(first, paged_decode(**case, workspace=workspace, config=config)) for _ in range(200))


@pytest.mark.gpu
@BOTH_KERNELS
def test_slots_beyond_two_billion_elements(config):
    case = make_case([700, 256], 16, 8, 128, 256, torch.bfloat16, "cuda", seed=0, spare_blocks=8200)
    assert case["k_cache"].numel() > 2**31
    tables = case["block_tables"]
    owned = tables[0, :3].long()
    far = [block for block in range(len(case["k_cache"]) - 1, 0, -1) if block not in tables.tolist()[1]][:3]
    for cache in (case["k_cache"], case["v_cache"]):
        blocks = cache[owned]
        cache[owned] = float("nan")
        cache[far] = blocks
    tables[0, :3] = torch.tensor(far)
    check(case, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("tma", [False, pytest.param(True, marks=needs_tma)])
@pytest.mark.parametrize("num_rows", [8, 32, 64, 512, 1024, 2048, 4096])
def test_the_engines_constants(num_rows, tma):
    """What is chosen for so many sequences x KV heads, with few of them: lengths at the edges of tiles and splits."""
    lens = [0, 1, 31, 32, 33, 64, 65, 200, 640, 3000]
    case = make_case(lens, 16, 8, 128, 256, torch.bfloat16, "cuda", seed=num_rows)
    check(case, config=H200.config(num_rows, 1, tma))
