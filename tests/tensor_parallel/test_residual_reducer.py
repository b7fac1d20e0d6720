"""ResidualReducer without GPUs: more than two ranks, and a step that its buffers have no room for. Its sums over two
ranks are tested on GPUs."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import assert_added_and_normed
from peer_ranks import MappedMemory, addresses

from nanovllm.kernels.parallel import all_reduce as kernels
from nanovllm.kernels.parallel import posted_sums
from nanovllm.layers.parallel import residual_reducer
from nanovllm.layers.parallel.residual_reducer import ResidualReducer

EPS, HIDDEN = 1e-6, 200


class RankPeers:
    """One rank's `Peers`, over memory of this machine."""

    def __init__(self, memory, rank):
        self._memory, self.rank, self.size = memory, rank, memory.size
        self.abort_flag, self.device = memory.abort_flag, torch.device(memory.device)

    def share(self, name, shape, dtype):
        tensors = self._memory.share(name, shape, dtype)
        table = addresses(tensors)
        return SimpleNamespace(tensor=tensors[self.rank], address_table=table, addresses=table.tolist())


def make_reducers(size, device, monkeypatch, max_tokens=70):
    """(memory, the reducer of each rank)"""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    memory = MappedMemory(size, device)
    dtype = torch.float16
    return memory, [ResidualReducer(RankPeers(memory, rank), max_tokens, HIDDEN, dtype) for rank in range(size)]


@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.nightly)])
def test_steps_of_all_lengths_over_more_than_two_ranks(size, device, monkeypatch):
    """Messages and sums in two shots follow each other in passes of different numbers of sums, of which a pass may
    leave some out. No step repeats a number of an earlier one."""
    monkeypatch.setattr(kernels, "MAX_TWO_SHOT_PROGRAMS", 2)
    memory, reducers = make_reducers(size, device, monkeypatch)
    monkeypatch.setattr(posted_sums, "MAX_TOKENS", 3)  # The inboxes have more room.
    passes = [(5, 2), (2, 4), (4, 1), (7, 3), (3, 2), (1, 2)]  # (tokens, sums)
    sums = [num_tokens for num_tokens, num_sums in passes for _ in range(num_sums)]
    parts = [torch.randn(size, num_tokens, HIDDEN, device=device).half() for num_tokens in sums]
    starts = [torch.randn(num_tokens, HIDDEN, device=device).half() for num_tokens in sums]
    weight = torch.randn(HIDDEN, device=device).half()
    found = [memory.share(f"found {i}", (2, *start.shape), torch.float16) for i, start in enumerate(starts)]

    def work(rank):
        reducer, i = reducers[rank], 0
        for num_tokens, num_sums in passes:
            assert reducer.takes(num_tokens)
            reducer.begin_pass(num_sums + num_sums % 2, False)
            for _ in range(num_sums):
                partial, residual = reducer.partial(num_tokens), starts[i].clone()
                partial.copy_(parts[i][rank])
                norm = reducer.add_norm(residual, partial, weight, EPS)
                found[i][rank].copy_(torch.stack([residual, norm]))
                i += 1

    memory.run(work)
    for start, part, of_ranks in zip(starts, parts, found, strict=True):
        assert all(torch.equal(each, of_ranks[0]) for each in of_ranks), "the ranks' results differ"
        norm = kernels.add_norm_torch(start, list(part), weight, EPS)
        assert_added_and_normed(*of_ranks[0], start, norm)


def test_long_prefills_of_more_than_two_ranks_go_another_way(device, monkeypatch):
    """So there is no memory for them."""
    monkeypatch.setattr(residual_reducer, "_MAX_TOKENS_OF_MANY_RANKS", 68)
    memory, (two, _) = make_reducers(2, device, monkeypatch)
    assert two.takes(70)
    memory, (four, *_) = make_reducers(4, device, monkeypatch)
    assert four.takes(68)
    assert not four.takes(69)
    buffers = [each for name, tensors in memory.tensors.items() if "buffer" in name for each in tensors]
    assert [len(each) for each in buffers] == [68] * 4


@pytest.mark.parametrize("max_tokens", [4, 600])  # fewer than are pushed, and more
def test_a_step_that_has_no_room_is_refused(max_tokens):
    reducer = ResidualReducer.__new__(ResidualReducer)
    reducer._turn = 0
    reducer._buffers = [SimpleNamespace(tensor=torch.zeros(max_tokens, 8))]
    assert reducer.partial(max_tokens).shape == (max_tokens, 8)
    with pytest.raises(RuntimeError, match=f"step of {max_tokens + 1} tokens.* for {max_tokens}$"):
        reducer.partial(max_tokens + 1)
