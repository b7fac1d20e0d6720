"""Decode attention whose programs compute all rows of a sequence: the plan, and the kernel against the twin, to which
each row is one of its own."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from backends import decode_context, prepare
from decode_cases import HAS_TMA, check, make_group_case, make_group_plan, needs_tma, paged_decode

from nanovllm.kernels.attention.decode_plan import (
    GROUP_PIECE_FIELDS,
    MAX_SPLITS,
    PIECE_FIELDS,
    SPLIT_UNIT,
    DecodeConfig,
    DecodeWorkspace,
    RowGroups,
    most_group_rows,
    plan_decode,
    plan_groups,
)
from nanovllm.layers.attention import Attention
from nanovllm.layers.backends import triton_backend
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.several_shapes import SeveralShapes
from nanovllm.layers.backends.torch_backend import TorchBackend, decode_attention_torch
from nanovllm.layers.backends.triton_backend import TritonBackend

BOTH_KERNELS = pytest.mark.parametrize(
    "config", [DecodeConfig(32, 4, 2), pytest.param(DecodeConfig(32, 4, 3, tma=True), marks=needs_tma)]
)


def test_groups_are_cut_and_padding_follows():
    groups = RowGroups.of(np.array([1, 9, *[0] * 8, 3, 0, 0, 4, 0, 0, 0, 0, 0]), 4)
    assert groups.first_row.tolist() == [0, 1, 5, 9, 10, 13, 17, 18]
    assert groups.num_rows.tolist() == [1, 4, 4, 1, 3, 4, 1, 1]
    padding = RowGroups.of(np.zeros(3, np.int32), 4)
    assert padding.first_row.tolist() == [0, 1, 2]
    assert padding.num_rows.tolist() == [1, 1, 1]


@settings(max_examples=50)
@given(
    drawn=st.lists(st.tuples(st.integers(1, 20000), st.integers(1, 12)), max_size=30),
    padding=st.integers(0, 3),
    most_rows=st.sampled_from([2, 4, 8]),
    spare=st.integers(1, 300),
    unused=st.integers(0, 9),
    window=st.none() | st.integers(1, 2000),
)
def test_plan_covers_every_key_of_every_group_once(drawn, padding, most_rows, spare, unused, window):
    lens = [first + i for first, num_rows in drawn for i in range(num_rows)] + [0] * padding
    if not lens:
        return
    group_rows = [n if i == 0 else 0 for _, n in drawn for i in range(n)] + [0] * padding
    groups = RowGroups.of(np.array(group_rows), most_rows)
    rows = [row for first, n in zip(*groups, strict=True) for row in range(first, first + n)]
    assert rows == list(range(len(lens)))
    items = np.full((len(lens) + spare + unused, GROUP_PIECE_FIELDS), 12345, np.int32)
    plan_groups(np.array(lens, np.int32), groups, items, spare, window)
    used = items[items[:, 0] >= 0]
    assert len(used) <= len(groups.first_row) + spare
    assert (items[len(used) :, 0] == -1).all()
    taken = np.zeros(len(lens) + most_rows * spare, bool)  # of the workspace
    for first_row, num_rows in zip(*groups, strict=True):
        pieces = used[used[:, 0] == first_row]
        context_len = lens[first_row]
        _, splits, num_splits, first, end, rows_of_group, place, keys, window_start = pieces.T
        assert splits.tolist() == list(range(len(pieces)))
        assert (num_splits == len(pieces)).all()
        assert len(pieces) <= MAX_SPLITS
        assert (rows_of_group == num_rows).all()
        assert (keys == context_len).all()
        assert window is None or (window_start == context_len - window).all()
        assert first[0] == max(0, context_len - (window or context_len))
        assert end[-1] == (context_len + num_rows - 1 if context_len else 0)
        assert (first[1:] == end[:-1]).all()
        assert (first[1:] % SPLIT_UNIT == 0).all()
        assert (place == place[0]).all()
        if len(pieces) > 1:
            results = slice(place[0], place[0] + len(pieces) * num_rows)
            assert results.stop <= len(taken)
            assert not taken[results].any()
            taken[results] = True


def test_rows_alone_are_cut_as_in_a_plan_of_rows():
    lens = np.array([640, 64, 3000, 0], np.int32)
    rows, groups = np.empty((30, PIECE_FIELDS), np.int32), np.empty((30, GROUP_PIECE_FIELDS), np.int32)
    for window in (None, 100):
        plan_decode(lens, rows, window)
        plan_groups(lens, RowGroups.of(np.array([1, 1, 1, 0]), 8), groups, 26, window)
        assert (groups[:, :PIECE_FIELDS] == rows)[rows[:, 0] >= 0].all()


@settings(max_examples=8)
@given(
    groups=st.lists(st.tuples(st.integers(1, 140), st.integers(1, 5)), min_size=1, max_size=2),
    padding=st.integers(0, 1),
    tma=st.booleans(),
    heads=st.sampled_from([1, 2, 3, 4, 7]),
    num_kv_heads=st.integers(1, 2),
    head_dim=st.sampled_from([32, 80, 128]),
    block_size=st.sampled_from([16, 64]),
    spare=st.sampled_from([1, 2, 5, 30]),
    tile=st.sampled_from([16, 32, 64]),
    window=st.none() | st.integers(1, 100),
    has_sinks=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_groups_attend_as_rows_alone(
    groups, padding, tma, heads, num_kv_heads, head_dim, block_size, spare, tile, window, has_sinks, seed
):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float32
    tma = tma and HAS_TMA
    if tma:
        head_dim, tile, dtype = 64, min(tile, block_size), torch.float16
    num_heads, most_rows = heads * num_kv_heads, 4
    shapes = num_heads, num_kv_heads, head_dim, block_size, dtype, device, seed
    case, group_rows = make_group_case(groups, padding, *shapes, window=window)
    if has_sinks:
        case["sinks"] = torch.linspace(-3, 3, num_heads, device=device).to(dtype)
    num_pieces = len(group_rows) + spare
    plan = make_group_plan(case["context_lens"], group_rows, num_kv_heads, num_pieces, window, most_rows)
    check(case, plan=plan, config=DecodeConfig(tile, 4, 2, tma=tma), group_rows=most_rows)


@BOTH_KERNELS
@pytest.mark.parametrize("window", [None, 62])
def test_rows_that_see_nothing_of_a_split(config, window, device):
    """The first rows of a group end before its last split begins. The windows of the last ones begin after its first
    split ends. The workspace has what another launch left."""
    groups = [(60, 8), (126, 4), (64, 1)]
    case, group_rows = make_group_case(groups, 1, 2, 1, 64, 64, torch.float16, device, seed=1, window=window)
    num_pieces = len(group_rows) + 12
    plan = make_group_plan(case["context_lens"], group_rows, 1, num_pieces, window)
    assert (plan[:, 0] == 0).sum() == 2
    workspace = DecodeWorkspace(len(group_rows), 2, 1, 64, device, num_pieces, 8)
    workspace.partial.fill_(float("nan"))
    workspace.lse.fill_(float("nan"))
    options = {"plan": plan, "workspace": workspace, "config": config, "group_rows": 8}
    first = check(case, **options)
    assert (workspace.arrivals == 0).all()
    assert torch.equal(first, paged_decode(**case, **options))


def test_refuses_a_plan_of_rows_and_too_small_a_workspace():
    case, group_rows = make_group_case([(40, 3)], 0, 4, 2, 32, 16, torch.float32, "cpu", seed=0)
    plan = make_group_plan(case["context_lens"], group_rows, 2, 8)
    with pytest.raises(ValueError, match=r"plan must be a contiguous int32 \[num_pieces, 9\]"):
        paged_decode(**case, plan=plan[:, :PIECE_FIELDS].contiguous(), group_rows=4)
    with pytest.raises(ValueError, match="workspace too small for 3 rows in groups of 4"):
        paged_decode(**case, plan=plan, workspace=DecodeWorkspace(3, 4, 2, 32, "cpu", 8), group_rows=4)


@pytest.mark.parametrize("kind", ["triton", "several", "torch"])
def test_a_back_end_computes_speculative_steps_and_others(kind, monkeypatch, device):
    """With more rows of a sequence than a program computes, and two windows."""
    used = []
    kernel = triton_backend.paged_decode
    monkeypatch.setattr(
        triton_backend, "paged_decode", lambda *a, **o: used.append(o.get("group_rows", 1)) or kernel(*a, **o)
    )
    shape = AttentionShape(6, 2, 32, 16, torch.float32, torch.device(device))
    own = TorchBackend() if kind == "torch" else TritonBackend()
    backend = SeveralShapes({shape: own}) if kind == "several" else own
    windows = [None, 20]
    prepare(backend, shape, windows, max_rows=16, max_group_rows=20)
    case, group_rows = make_group_case([(33, 10), (4, 1), (70, 2)], 2, *shape[:6], seed=0)
    for of_step in (group_rows, None):
        context = decode_context(backend, case["context_lens"], case["block_tables"], group_rows=of_step)
        for window in windows:
            layer = Attention(6, 32, 32**-0.5, 2, backend, window)
            layer.k_cache, layer.v_cache = case["k_cache"], case["v_cache"]
            out = layer.attend(case["q"], case["q"], case["q"], context)
            torch.testing.assert_close(out, decode_attention_torch(**case | {"window": window}), atol=1e-5, rtol=1e-5)
    assert used == ([] if kind == "torch" else [8, 8, 1, 1])


def test_a_program_computes_as_many_rows_as_it_has_registers_for():
    assert most_group_rows(1, 32, 8, 128, 2) == 1
    assert most_group_rows(5, 32, 8, 128, 2) == 5
    assert most_group_rows(30, 32, 8, 128, 2) == 8
    assert most_group_rows(8, 32, 2, 128, 2) == 4
    assert most_group_rows(8, 32, 4, 128, 4) == 4
    assert most_group_rows(8, 71, 1, 256, 2) == 1


def test_a_back_end_without_room_for_two_rows_computes_each_alone(device):
    shape = AttentionShape(71, 1, 256, 16, torch.bfloat16, torch.device(device))
    backend = prepare(TritonBackend(), shape, [None], max_rows=4, max_group_rows=4)
    assert list(backend.layout()) == ["decode_plans"]
    lens, tables = torch.tensor([3, 4, 0, 0], dtype=torch.int32), torch.zeros(4, 1, dtype=torch.int32)
    plan = decode_context(backend, lens, tables, group_rows=[2, 0, 0, 0]).attention[None]
    assert plan[:4, :PIECE_FIELDS].tolist() == [[0, 0, 1, 0, 3], [1, 0, 1, 0, 4], [2, 0, 1, 0, 0], [3, 0, 1, 0, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 500])
@pytest.mark.parametrize("heads", [1, 2, 4, 7])
@BOTH_KERNELS
def test_long_groups_on_a_gpu(heads, window, config):
    groups = [(3000, 8), (1, 1), (700, 3), (63, 8), (1022, 5), (256, 2)]
    case, group_rows = make_group_case(groups, 2, 8 * heads, 8, 128, 256, torch.bfloat16, "cuda", 1, window)
    plan = make_group_plan(case["context_lens"], group_rows, 8, window=window)
    check(case, plan=plan, config=config, group_rows=8)
