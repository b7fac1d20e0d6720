"""Sums that ranks read from each other, two ranks of one process one after the other: what each finds, and what it
leaves for the other. Rank 0 goes first, so what rank 1 would have signalled by then is put there by hand."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import assert_added_and_normed

from nanovllm.kernels.parallel import all_reduce as kernels

EPS = 1e-6
SIZE = 2


def random_case(num_tokens, hidden, dtype, device):
    """(each rank's partial, residual, norm weight)"""
    partials = [torch.randn(num_tokens, hidden, device=device).to(dtype) for _ in range(SIZE)]
    residual = torch.randn(num_tokens, hidden, device=device).to(dtype)
    return partials, residual, (1 + 0.3 * torch.randn(hidden, device=device)).to(dtype)


def twin(partials, residual, weight):
    """(residual, y)"""
    total = residual.clone()
    return total, kernels.add_norm_torch(total, partials, weight, EPS)


def addresses(tensors):
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)


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
