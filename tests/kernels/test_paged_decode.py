"""paged_decode against its plain-torch twin, and both against dense attention in float64."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanovllm.kernels.paged_decode as paged_decode_module
from nanovllm.kernels.decode_config import DecodeConfig, choose_config, has_tma
from nanovllm.kernels.decode_workspace import DecodeWorkspace
from nanovllm.kernels.paged_decode import paged_decode
from nanovllm.kernels.paged_decode_tma import TensorDescriptor
from nanovllm.layers.attention_torch import decode_attention_torch
from nanovllm.utils.decode_plan import PIECE_FIELDS, make_plan

# Largest error against float64 that a dtype's rounding of inputs, weights and outputs explains.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


# What `paged_decode_tma` is for; in the interpreter, wherever Triton has descriptors.
HAS_TMA = TensorDescriptor is not None
if HAS_TMA and torch.cuda.is_available():
    HAS_TMA = has_tma(128, 256, 2, torch.device("cuda", torch.cuda.current_device()))
needs_tma = pytest.mark.skipif(not HAS_TMA, reason="needs Hopper's tensor memory accelerator, or the interpreter")


def make_case(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, device, seed, spare_blocks=2):
    """Arguments of a decode step. Every slot that no sequence owns is NaN, and so is what lies around the queries."""
    generator = torch.Generator().manual_seed(seed)
    fused = torch.full((len(lens), num_heads + 3, head_dim), float("nan"), dtype=dtype, device=device)
    fused[:, 1 : num_heads + 1] = torch.randn(len(lens), num_heads, head_dim, generator=generator).to(device, dtype)
    needed = [-(-context_len // block_size) for context_len in lens]
    num_blocks = sum(needed) + spare_blocks
    free = torch.randperm(num_blocks, generator=generator).tolist()
    k_cache, v_cache = torch.full(
        (2, num_blocks, block_size, num_kv_heads, head_dim), float("nan"), dtype=dtype, device=device
    ).unbind(0)
    tables = torch.full((len(lens), max(needed) + 1), -1, dtype=torch.int32)
    for i, context_len in enumerate(lens):
        tables[i, : needed[i]] = torch.tensor([free.pop() for _ in range(needed[i])], dtype=torch.int32)
        positions = torch.arange(context_len)
        slots = tables[i, positions // block_size].long() * block_size + positions % block_size
        for cache in (k_cache, v_cache):
            rows = torch.randn(context_len, num_kv_heads, head_dim, generator=generator)
            cache.flatten(0, 1)[slots.to(device)] = rows.to(device, dtype)
    return {
        "q": fused[:, 1 : num_heads + 1],
        "k_cache": k_cache,
        "v_cache": v_cache,
        "context_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "block_tables": tables.to(device),
        "scale": head_dim**-0.5,
    }


def dense_decode(q, k_cache, v_cache, context_lens, block_tables, scale):
    """The definition, in float64, key by key."""
    out = torch.zeros(q.shape, dtype=torch.float64)
    block_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    for i, context_len in enumerate(context_lens.tolist()):
        if context_len == 0:
            continue
        places = [divmod(position, block_size) for position in range(context_len)]
        k, v = (
            torch.stack([cache[block_tables[i, block], offset] for block, offset in places]).double().cpu()
            for cache in (k_cache, v_cache)
        )
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        weights = (torch.einsum("hd,jhd->hj", q[i].double().cpu(), k) * scale).softmax(-1)
        out[i] = torch.einsum("hj,jhd->hd", weights, v)
    return out


def check(case, **options):
    """Hold both implementations to the definition; `options` are the kernel's own. Returns the kernel's output."""
    dtype, out = case["q"].dtype, None
    expected = dense_decode(**case)
    functions = [decode_attention_torch, partial(paged_decode, **options)]
    if dtype == torch.bfloat16 and not torch.cuda.is_available():
        functions.pop()  # Triton's interpreter multiplies bfloat16 as if it were integers
    for function in functions:
        # In this mode torch fills fresh memory with NaN: outputs left out and partials never written show up.
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            out = function(**case)
        finally:
            torch.use_deterministic_algorithms(False)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double().cpu(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        assert (out[case["context_lens"] == 0] == 0).all()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (2, 2, 32, 16),
        (4, 2, 128, 256),
        (8, 2, 64, 32),
        (7, 1, 80, 16),
        (8, 1, 64, 256),
        (20, 1, 32, 16),
        (2, 1, 256, 16),
    ],
)
def test_ragged_batch(num_heads, num_kv_heads, head_dim, block_size, dtype, device):
    lens = [0, 1, 15, 16, 17, 0, 130]
    check(make_case(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, device, seed=head_dim))


@pytest.mark.parametrize("block_size", [16, 32, 256])
def test_edges_of_blocks_and_tiles(block_size, device):
    lens = [block_size - 1, block_size, block_size + 1, 63, 64, 65]
    check(make_case(lens, 2, 1, 32, block_size, torch.float32, device, seed=block_size))


@pytest.mark.parametrize("num_items", [6, 7, 9, 200])
def test_any_number_of_pieces(num_items, device):
    case = make_case([100, 0, 64, 420, 65], 4, 1, 64, 32, torch.float32, device, seed=5)
    plan = make_plan(case["context_lens"], 1, num_items)
    workspace = DecodeWorkspace(5, 4, 1, 64, device, num_items)
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    first = check(case, plan=plan, workspace=workspace)
    assert (workspace.arrivals == 0).all()
    again = paged_decode(**case, plan=plan, workspace=workspace)
    assert torch.equal(first, again)


@needs_tma
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16 if torch.cuda.is_available() else torch.float32])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "config"),
    [
        (4, 2, 128, 256, DecodeConfig(32, 1, 3, tma=True)),
        (4, 2, 128, 256, DecodeConfig(64, 2, 3, tma=True)),
        (8, 2, 64, 64, DecodeConfig(64, 2, 3, tma=True)),
        (5, 1, 64, 32, DecodeConfig(32, 1, 4, tma=True)),
        (16, 1, 128, 64, DecodeConfig(32, 1, 4, tma=True)),
    ],
)
@pytest.mark.parametrize("spare", [1, 30])
def test_whole_tiles_by_the_memory_accelerator(
    num_heads, num_kv_heads, head_dim, block_size, config, spare, dtype, device
):
    lens = [0, 1, 31, 32, 33, 63, 64, 65, 0, 130, 320, 351]
    case = make_case(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, device, seed=head_dim + spare)
    plan = make_plan(case["context_lens"], num_kv_heads, len(lens) + spare)
    workspace = DecodeWorkspace(len(lens), num_heads, num_kv_heads, head_dim, device, len(plan))
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    first = check(case, plan=plan, workspace=workspace, config=config)
    assert (workspace.arrivals == 0).all()
    assert torch.equal(first, paged_decode(**case, plan=plan, workspace=workspace, config=config))


@needs_tma
def test_the_memory_accelerators_kernel_is_taken_where_it_can_be(monkeypatch, device):
    asked, launched = [], []
    monkeypatch.setattr(paged_decode_module, "has_tma", lambda *case: asked.append(case) or True)
    launch = paged_decode_module.launch_paged_decode_tma
    monkeypatch.setattr(
        paged_decode_module, "launch_paged_decode_tma", lambda *args: launched.append(args) or launch(*args)
    )
    for batch, is_taken in ((2, False), (3, True), (70, True)):
        case = make_case([33 + i for i in range(batch)], 16, 8, 64, 64, torch.float16, device, seed=batch)
        check(case)
        assert bool(launched) == is_taken
    assert set(asked) == {(64, 64, 2, case["q"].device)}


def test_shared_block(device):
    case = make_case([40, 33], 4, 2, 32, 16, torch.float32, device, seed=1)
    case["block_tables"][1, :2] = case["block_tables"][0, :2]
    check(case)


def test_workspace_serves_batches_of_every_size(device):
    workspace = DecodeWorkspace(6, 4, 2, 32, device)
    for batch_size in (6, 1):
        lens = [17 + 30 * i for i in range(batch_size)]
        check(make_case(lens, 4, 2, 32, 16, torch.float32, device, seed=batch_size), workspace=workspace)
        assert (workspace.arrivals == 0).all()


@settings(max_examples=8, deadline=None)
@given(
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=4),
    tma=st.booleans(),
    group=st.sampled_from([1, 2, 4, 7, 8, 16]),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([32, 48, 80]),
    block_size=st.sampled_from([16, 32, 64, 256]),
    spare=st.sampled_from([None, 1, 2, 5]),
    tile=st.sampled_from([16, 32, 64]),
    seed=st.integers(0, 2**31),
)
def test_any_batch(lens, tma, group, num_kv_heads, head_dim, block_size, spare, tile, seed):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32
    tma = tma and HAS_TMA
    if tma:
        head_dim, tile, dtype = 64, min(tile, block_size), torch.float16
    num_heads = group * num_kv_heads
    case = make_case(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, device, seed)
    plan = make_plan(case["context_lens"], num_kv_heads, spare and len(lens) + spare)
    check(case, plan=plan, config=DecodeConfig(tile, 1 if tma else 4, 2, tma=tma))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 80), (4, 2, 64), (7, 1, 36)])
def test_twin_gives_a_sequence_the_same_bits_in_any_batch(num_heads, num_kv_heads, head_dim):
    case = make_case([500, 3, 0, 257, 256], num_heads, num_kv_heads, head_dim, 16, torch.float32, "cpu", seed=2)
    together = decode_attention_torch(**case)
    for rows in ([0], [3], [4, 1], [3, 2, 0]):
        part = {name: case[name][rows] for name in ("q", "context_lens", "block_tables")}
        assert torch.equal(decode_attention_torch(**{**case, **part}), together[rows])


def test_no_sequences(device):
    case = make_case([1], 2, 1, 32, 16, torch.float32, device, seed=0)
    empty = {name: case[name][:0] for name in ("q", "context_lens", "block_tables")}
    assert paged_decode(**{**case, **empty}).shape == (0, 2, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": -1.0}, "scale must be positive"),
        ({"q": torch.zeros(2, 3, 32)}, "whole number of query heads"),
        ({"q": torch.zeros(2, 4, 32, dtype=torch.float16)}, "one dtype"),
        pytest.param({"config": DecodeConfig(32, 1, 3, tma=True)}, "no less than a tile of 32 keys", marks=needs_tma),
        ({"workspace": DecodeWorkspace(1, 4, 2, 32, "cpu")}, "workspace too small"),
        ({"workspace": DecodeWorkspace(2, 4, 2, 32, "cpu", num_items=3)}, "workspace too small"),
        ({"plan": torch.zeros(3, PIECE_FIELDS, dtype=torch.int64)}, "plan must be"),
        ({"plan": torch.zeros(3, 2, dtype=torch.int32)}, "plan must be"),
        ({"plan": torch.zeros(6, PIECE_FIELDS, dtype=torch.int32)[::2]}, "plan must be"),
    ],
)
def test_refuses_what_it_cannot_compute(change, message):
    case = make_case([3, 100], 4, 2, 32, 16, torch.float32, "cpu", seed=0)
    with pytest.raises(ValueError, match=message):
        paged_decode(**{**case, **change})


@needs_tma
def test_head_dims_that_no_tile_has_are_refused():
    case = make_case([3], 2, 1, 48, 64, torch.float32, "cpu", seed=0)
    with pytest.raises(ValueError, match="head_dim 48"):
        paged_decode(**case, config=DecodeConfig(32, 1, 3, tma=True))


BOTH_KERNELS = pytest.mark.parametrize(
    "config", [DecodeConfig(64, 4, 2), pytest.param(DecodeConfig(64, 2, 3, tma=True), marks=needs_tma)]
)


@pytest.mark.gpu
@BOTH_KERNELS
def test_graph_replays_with_other_context_lengths(config):
    lens = [4000, 300, 0, 1]
    case = make_case(lens, 16, 8, 128, 256, torch.bfloat16, "cuda", seed=0)
    workspace = DecodeWorkspace(4, 16, 8, 128, "cuda")
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
    workspace = DecodeWorkspace(2, 16, 8, 128, "cuda")
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
    check(case, config=choose_config(num_rows, 128, 2, torch.device("cuda", 0), tma))
