"""Sums over memory that ranks share.

In one shot, two ranks of one process sum one after the other: what each finds, and what it leaves for the other. Rank 0
goes first, so what rank 1 would have signalled by then is put there by hand. In two shots ranks wait for each other
twice, so they run side by side."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import assert_added_and_normed, nightly
from peer_ranks import MappedMemory, addresses, await_true

from nanovllm.kernels.parallel import all_reduce as kernels

EPS = 1e-6
SIZE = 2


def random_case(num_tokens, hidden, dtype, device, size=SIZE):
    """(each rank's partial, residual, norm weight)"""
    partials = [torch.randn(num_tokens, hidden, device=device).to(dtype) for _ in range(size)]
    residual = torch.randn(num_tokens, hidden, device=device).to(dtype)
    return partials, residual, (1 + 0.3 * torch.randn(hidden, device=device)).to(dtype)


def twin(partials, residual, weight):
    """(residual, y)"""
    total = residual.clone()
    return total, kernels.add_norm_torch(total, partials, weight, EPS)


class Buffers:
    """Both ranks' state of `pull_add_norm`."""

    def __init__(self, partials, device):
        self.buffers = partials
        self.flags = [
            torch.zeros(kernels.MAX_PULL_PROGRAMS, SIZE, dtype=torch.int32, device=device) for _ in range(SIZE)
        ]
        self.abort = torch.zeros(1, dtype=torch.int32, device=device)

    def pull(self, rank, residual, weight):
        tables = addresses(self.buffers), addresses(self.flags)
        return kernels.pull_add_norm(*tables, self.abort, rank, residual, weight, EPS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 64), (3, 100), (20, 256)])
def test_ranks_pull_the_same_sum_and_leave_their_flags_clear(dtype, num_tokens, hidden, device, monkeypatch):
    monkeypatch.setattr(kernels, "MAX_PULL_PROGRAMS", 8)  # so that one has several tokens
    partials, residual, weight = random_case(num_tokens, hidden, dtype, device)
    expected = twin(partials, residual, weight)
    state = Buffers(partials, device)
    state.flags[0][:, 1] = 1  # Rank 1 is there.
    results = []
    for rank in range(SIZE):
        own = residual.clone()
        y = state.pull(rank, own, weight)
        assert_added_and_normed(own, y, *expected)
        results.append(own)
        if rank == 0:
            programs = min(num_tokens, 8)
            assert state.flags[1][:programs, 0].eq(1).all(), "rank 1 would wait for ever"
            assert state.flags[0][:programs].eq(0).all(), "the next pull would not wait"
            state.flags[0][:, 1] = 0
    assert torch.equal(*results)


def test_a_pull_waits_for_nobody_once_it_is_aborted(device):
    partials, residual, weight = random_case(2, 64, torch.float16, device)
    state = Buffers(partials, device)
    state.abort.fill_(1)
    state.pull(0, residual, weight)
    assert state.flags[1].eq(0).all(), "it wrote to a rank that may be gone"


class TwoShots:
    """All ranks' state of `two_shot_add_norm`, for sums that come one after the other."""

    def __init__(self, cases, size, device):
        """cases: of `random_case`."""
        (most, hidden), dtype = cases[0][1].shape, cases[0][1].dtype
        self.cases, self.memory = cases, MappedMemory(size, device)
        self.parts = self.memory.share("parts", (most, hidden), dtype)
        self.flags = self.memory.share("flags", (kernels.MAX_TWO_SHOT_PROGRAMS, size), torch.int32)
        # Of each sum those of each rank.
        self.totals = [self.memory.share(f"totals {i}", case[1].shape, dtype) for i, case in enumerate(cases)]
        self.norms = [self.memory.share(f"norms {i}", case[1].shape, dtype) for i, case in enumerate(cases)]

    def work(self, rank):
        for i, (partials, residual, weight) in enumerate(self.cases):
            self.parts[rank][: len(residual)].copy_(partials[rank])
            total = residual.clone()
            tables = addresses(self.parts), addresses(self.flags)
            norm = kernels.two_shot_add_norm(*tables, self.memory.abort_flag, rank, total, weight, EPS)
            self.totals[i][rank].copy_(total)
            self.norms[i][rank].copy_(norm)


FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16
LAST = 2**31 - 1  # After this int32 number the smallest one comes.


@pytest.mark.parametrize(
    ("size", "dtype", "hidden", "first"),
    [
        (3, BFLOAT16, 200, 0),
        (4, FLOAT16, 320, LAST - 3),
        (8, BFLOAT16, 500, LAST - 4),
        *nightly((2, FLOAT16, 100, -2), (3, FLOAT16, 64, LAST), (4, BFLOAT16, 257, 7), (8, FLOAT16, 512, -1)),
    ],
)
def test_sums_in_two_shots(size, dtype, hidden, first, device, monkeypatch):
    """One after the other, of different numbers of tokens: programs that one leaves out take part in a later one."""
    monkeypatch.setattr(kernels, "MAX_TWO_SHOT_PROGRAMS", 3)  # so that one has several tokens
    lengths = (4, 1, 3)
    cases = [random_case(num_tokens, hidden, dtype, device, size) for num_tokens in lengths]
    cases[1] = (*cases[1][:2], cases[1][2].float())  # a norm's weight in float32
    sums = TwoShots(cases, size, device)
    for flags in sums.flags:
        flags.fill_(first)
    sums.memory.run(sums.work)
    for case, totals, norms in zip(cases, sums.totals, sums.norms, strict=True):
        expected = twin(*case)
        assert_added_and_normed(totals[0], norms[0], *expected)
        assert all(torch.equal(total, totals[0]) for total in totals), "the ranks' residuals differ"
        assert all(torch.equal(norm, norms[0]) for norm in norms)
    for program in range(3):
        meetings = 2 * sum(length > program for length in lengths)
        expected = (first + meetings + 2**31) % 2**32 - 2**31
        assert all(flags[program].eq(expected).all() for flags in sums.flags)


@pytest.mark.parametrize("meeting", [1, 2])
def test_an_abort_ends_a_wait_for_a_rank_that_has_gone(meeting, device):
    """Before it has come, and while the others wait for its columns."""
    size = 4
    sums = TwoShots([random_case(1, 256, FLOAT16, device, size)], size, device)
    gone = size - 1
    for flags in sums.flags[:gone] if meeting == 2 else ():
        flags[:, gone] = 1
    before = sums.parts[gone].clone()
    with sums.memory.running(list(range(gone)), sums.work):
        await_true(lambda: sums.flags[gone][0, :gone].eq(meeting).all())
        sums.memory.abort_flag.fill_(1)
    assert sums.flags[gone][0, :gone].eq(meeting).all()
    assert torch.equal(sums.parts[gone], before) == (meeting == 1), "it wrote to a rank that has gone"


def test_two_shots_wait_for_nobody_once_they_are_aborted(device):
    sums = TwoShots([random_case(2, 256, FLOAT16, device, 4)], 4, device)
    sums.memory.abort_flag.fill_(1)
    sums.work(0)
    for rank in range(1, 4):
        assert sums.flags[rank].eq(0).all(), "it wrote to a rank that may be gone"
        assert sums.parts[rank].eq(0).all()
