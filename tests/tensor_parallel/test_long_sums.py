"""LongSums without GPUs: two ranks of one process in every order that the waiting allows, their copies made late."""

import ctypes
from random import Random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kernels.parallel.all_reduce import add_norm_torch
from nanovllm.layers.parallel import residual_reducer
from nanovllm.layers.parallel.residual_reducer import LongSums

HIDDEN, EPS = 4, 1e-6
# As a layer's sums go in `layers.rank_sums`: both parts of one sum, then of the next, each as soon as it can be.
LAYER = ["send", "send", "finish", "send", "finish", "send", "finish", "finish"]


class Stream:
    """Copies wait here until somebody makes them, in order."""

    def __init__(self):
        self.copies = []

    def wait_stream(self, stream):
        pass

    def make_one(self):
        target, source = self.copies.pop(0)
        ctypes.memmove(target, source, len(source))


class Rank:
    """One rank's LongSums, and how far it has got."""

    def __init__(self, rank, received, arrivals):
        memory = {"received": received, "arrivals": arrivals}

        def share(name, shape, dtype):
            tensors = memory[name.split("/")[1]]
            assert tensors[rank].shape == shape
            return SimpleNamespace(tensor=tensors[rank], addresses=[each.data_ptr() for each in tensors])

        abort = torch.zeros(1, dtype=torch.int32)
        peers = SimpleNamespace(rank=rank, size=2, device=torch.device("cpu"), share=share, abort_flag=abort)
        self.sums = LongSums(peers, received[0].shape[1], HIDDEN, torch.float32)
        self.stream = self.sums._stream
        self.arrivals = arrivals[rank]
        self.under_way, self.results = [], []


def use_host_memory(monkeypatch):
    """Copies of host memory, and a kernel that finds the other's part there or fails."""

    def copy_bytes(target, source, num_bytes, stream):
        stream.copies.append((target, ctypes.string_at(source, num_bytes)))

    def add_norm_arrived(residual, first, second, weight, eps, arrival, number, abort):
        assert arrival.item() == number, "it would wait for ever"
        return add_norm_torch(residual, [first, second], weight, eps)

    monkeypatch.setattr(residual_reducer, "copy_bytes", copy_bytes)
    monkeypatch.setattr(residual_reducer, "add_norm_arrived", add_norm_arrived, raising=False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=lambda event: None))
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))


def run(draw, num_layers):
    """Both ranks through the layers; `draw` says who goes on and whose copies are made."""
    slots = residual_reducer._NUM_SLOTS
    received = [torch.zeros(slots, 3, HIDDEN) for _ in range(2)]
    arrivals = [torch.zeros(slots, dtype=torch.int32) for _ in range(2)]
    ranks = [Rank(rank, received, arrivals) for rank in range(2)]
    program = LAYER * num_layers
    partials = torch.randn(2, 4 * num_layers, 3, HIDDEN)
    lens = [3 - k % 2 for k in range(4 * num_layers)]  # an odd number of tokens: the second part is shorter
    done = [0, 0]
    while done != [len(program)] * 2:
        moves = []
        for r, rank in enumerate(ranks):
            if rank.stream.copies:
                moves.append(rank.stream.make_one)
            if done[r] == len(program):
                continue
            if program[done[r]] == "send":
                moves.append((r, "send"))
            elif rank.arrivals[rank.under_way[0].slot] == rank.under_way[0].number:
                moves.append((r, "finish"))
        move = draw(moves)
        if callable(move):
            move()
            continue
        r, what = move
        rank, done[r] = ranks[r], done[r] + 1
        if what == "send":
            k = program[: done[r]].count("send") - 1
            rank.under_way.append(rank.sums.send(partials[r, k, : lens[k]].clone()))
        else:
            k = program[: done[r]].count("finish") - 1
            residual = torch.zeros(lens[k], HIDDEN)
            rank.sums.finish(residual, rank.under_way.pop(0), torch.ones(HIDDEN), EPS)
            rank.results.append(residual)
    for k, length in enumerate(lens):
        expected = partials[0, k, :length] + partials[1, k, :length]
        assert torch.equal(ranks[0].results[k], expected), f"sum {k}"
        assert torch.equal(ranks[1].results[k], expected), f"sum {k}"


@settings(max_examples=60)
@given(data=st.data())
def test_every_sum_is_that_of_its_own_parts(data):
    with pytest.MonkeyPatch.context() as monkeypatch:
        use_host_memory(monkeypatch)
        run(lambda moves: moves[data.draw(st.integers(0, len(moves) - 1))], 3)


def test_a_part_that_has_no_room_is_refused(monkeypatch):
    use_host_memory(monkeypatch)
    received, arrivals = torch.zeros(residual_reducer._NUM_SLOTS, 3, HIDDEN), torch.zeros(residual_reducer._NUM_SLOTS)
    rank = Rank(0, [received] * 2, [arrivals.int()] * 2)
    with pytest.raises(RuntimeError, match=r"part of 4 tokens.* for 3"):
        rank.sums.send(torch.zeros(4, HIDDEN))
    assert not rank.stream.copies


def test_numbers_may_begin_again(monkeypatch):
    use_host_memory(monkeypatch)
    monkeypatch.setattr(residual_reducer, "_NUM_ROUNDS", 3)
    run(Random(0).choice, 20)
