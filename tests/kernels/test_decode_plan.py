"""How decode attention is cut into pieces, and where Hopper's kernel can be used."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from gpus import pretend_gpu

from nanovllm.kernels.attention import paged_decode
from nanovllm.kernels.attention.decode_plan import (
    MAX_SPLITS,
    PIECE_FIELDS,
    SPLIT_UNIT,
    plan_decode,
)


@settings(max_examples=200)
@given(
    lens=st.lists(st.integers(0, 20000), min_size=1, max_size=40),
    spare=st.integers(1, 400),
    window=st.none() | st.integers(1, 2000),
)
def test_plan_covers_every_key_once_and_takes_the_longest_first(lens, spare, window):
    items = np.full((len(lens) + spare, PIECE_FIELDS), 12345, np.int32)
    plan_decode(np.array(lens), items, window)
    used = items[items[:, 0] >= 0]
    assert (items[len(used) :, 0] == -1).all()
    for row, context_len in enumerate(lens):
        places = np.flatnonzero(used[:, 0] == row)
        assert (np.diff(places) == 1).all()
        _, splits, num_splits, first, end = used[places].T
        assert splits.tolist() == list(range(len(places)))
        assert (num_splits == len(places)).all()
        assert 1 <= len(places) <= MAX_SPLITS
        assert first[0] == max(0, context_len - (window or context_len))
        assert end[-1] == context_len
        assert (first[1:] == end[:-1]).all()
        assert (first[1:] % SPLIT_UNIT == 0).all()
        assert context_len == 0 or (first < end).all()
        first = first // SPLIT_UNIT * SPLIT_UNIT  # Whole tiles are read.
        assert len(set((end - first)[:-1])) <= 1  # equal except for the last, which is not longer
        assert end[-1] - first[-1] <= end[0] - first[0]
    lengths = [-(-end // SPLIT_UNIT) - first // SPLIT_UNIT for _, split, _, first, end in used.tolist() if split == 0]
    assert lengths == sorted(lengths, reverse=True)


def test_more_work_than_programs_makes_longer_splits():
    items = np.empty((4, PIECE_FIELDS), np.int32)
    plan_decode(np.array([640, 64]), items)
    assert items[:3].tolist() == [[0, 0, 2, 0, 320], [0, 1, 2, 320, 640], [1, 0, 1, 0, 64]]
    assert items[3, 0] == -1
    items = np.empty((23, PIECE_FIELDS), np.int32)  # many
    plan_decode(np.array([640, 64]), items)
    assert items[:11, 4].tolist() == [*range(64, 641, 64), 64]


def test_memory_accelerator_is_for_hopper_and_half_precision(monkeypatch):
    gpu = torch.device("cuda", 0)
    has_tma = paged_decode.has_tma
    assert not has_tma(128, 256, 2, torch.device("cpu"))
    pretend_gpu(monkeypatch)
    assert has_tma(128, 256, 2, gpu)
    assert has_tma(64, 64, 2, gpu)
    refused = [(128, 256, 4, gpu), (80, 256, 2, gpu), (256, 256, 2, gpu), (128, 32, 2, gpu)]
    assert not any(has_tma(*case) for case in refused)
    for other in ((8, 0), (10, 0), (12, 0)):
        pretend_gpu(monkeypatch, capability=other)
        assert not has_tma(128, 256, 2, gpu)
