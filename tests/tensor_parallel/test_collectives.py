"""What ranks do together, over gloo between threads."""

import os

import pytest
import torch
from rank_threads import on_ranks

from nanovllm.engine.ranks import process_group
from nanovllm.layers.embed_head import SHARD_MULTIPLE, ParallelLMHead
from nanovllm.layers.parallel.tensor_parallel import CollectiveError, TensorParallel
from nanovllm.utils.context import Context, step_context


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_collectives(size, dtype):
    def work(tp):
        x = torch.arange(6).reshape(3, 2).to(dtype) + 10 * tp.rank
        return tp.all_reduce(x.clone()), tp.all_gather(x.t()), tp.broadcast(x.clone())

    x = torch.arange(6).reshape(3, 2).to(dtype)
    for total, gathered, received in on_ranks(size, work):
        assert torch.equal(total, size * x + 10 * sum(range(size)))
        assert torch.equal(gathered, torch.stack([(x + 10 * rank).t() for rank in range(size)]))
        assert torch.equal(received, x)


def test_two_groups_that_form_at_once_leave_the_environment_as_it_was(monkeypatch):
    """Each sets variables that it finds missing. So both may set one, and the first that ends removes it."""
    monkeypatch.delenv("NANOVLLM_TEST", raising=False)
    with process_group._environment_defaults({"NANOVLLM_TEST": "1"}):
        del os.environ["NANOVLLM_TEST"]  # as the other one does
    assert "NANOVLLM_TEST" not in os.environ


def test_one_rank_needs_no_group():
    x = torch.arange(3)
    tp = TensorParallel()
    assert tp.all_reduce(x) is x
    assert tp.broadcast(x) is x
    assert torch.equal(tp.all_gather(x), x.unsqueeze(0))


@pytest.mark.parametrize("vocab_size", [60, 128, 307])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_vocabulary_in_shards_is_the_vocabulary(vocab_size, size):
    weight = torch.randn(vocab_size, 8)
    hidden = torch.randn(5, 8)

    def work(tp):
        head = ParallelLMHead(vocab_size, 8, tp=tp, shard_multiple=SHARD_MULTIPLE)
        head.weight_loader(head.weight, weight)
        with step_context(Context()):
            local = head.shard_logits(hidden)
        return local, head.gather_shards(local), head.vocab_start_idx

    for local, logits, first in on_ranks(size, work) if size > 1 else [work(TensorParallel())]:
        expected = hidden @ weight.t()
        assert torch.allclose(logits, expected, atol=1e-5)
        assert torch.allclose(local, expected[:, first : first + local.shape[1]], atol=1e-5)


def test_a_rank_that_has_gone_is_a_collective_error():
    def work(tp):
        if tp.rank == 1:
            return None
        try:
            for _ in range(3):
                tp.all_reduce(torch.ones(1))
        except CollectiveError as error:
            return str(error)

    assert "allreduce" in on_ranks(2, work)[0]
