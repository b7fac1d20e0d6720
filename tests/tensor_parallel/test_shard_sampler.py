"""A vocabulary in shards is drawn from as if it were whole, by the kernels and by their twins."""

import math

import pytest
import torch
from draws import sample_torch

from nanovllm.kernels import HAS_TRITON
from nanovllm.kernels.sampling.sampler import NON_FINITE, best_of_shard, pick_best
from nanovllm.layers.sampler import Sampler

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning")  # in Triton's interpreter

BATCH, VOCAB_SIZE = 6, 1000


@pytest.fixture
def inputs(device):
    """(logits, temperatures, seeds, positions), half of the rows greedy, and half without a token."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(BATCH, VOCAB_SIZE, generator=generator) * 2
    logits[1, [70, 700]] = 50.0  # ties across shards, greedy and drawn
    logits[2] = -math.inf
    logits[3, 900] = math.nan  # of one shard
    logits[4, 100] = math.inf
    logits[5, 10] = -math.inf
    temperatures = torch.tensor([0.0, 0.0, 0.0, 0.7, 1.0, 1.3])
    seeds, positions = torch.arange(BATCH) * 2**40 + 3, torch.arange(BATCH) * 2**31
    return tuple(x.to(device) for x in (logits, temperatures, seeds, positions))


def use(name):
    if name == "kernels" and not HAS_TRITON:
        pytest.skip("needs triton")
    return (best_of_shard.kernel, pick_best.kernel) if name == "kernels" else (best_of_shard.twin, pick_best.twin)


@pytest.mark.parametrize(
    ("name", "rows"), [("twins", 128), ("twins", 256), ("twins", 1024), ("kernels", 384), ("kernels", 1024)]
)
def test_shards_draw_what_the_whole_draws(inputs, name, rows):
    logits, *sampling = inputs
    reduce, pick = use(name)
    firsts = range(0, VOCAB_SIZE, rows)
    candidates = [reduce(logits[:, first : first + rows], *sampling, None, first, rows) for first in firsts]
    tokens = pick(torch.stack(candidates))
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == Sampler()(logits, *sampling).tolist()
    assert tokens[1:5].tolist() == [70, NON_FINITE, NON_FINITE, NON_FINITE]
    assert tokens[0] >= 0
    assert tokens[5] >= 0
    assert tokens.tolist() == sample_torch(*(x.cpu() for x in inputs)).tolist()


@pytest.mark.parametrize("name", ["twins", "kernels"])
def test_shards_leave_out_what_the_whole_leaves_out(inputs, name):
    logits, *sampling = inputs
    reduce, pick = use(name)
    # Of some rows few tokens are left, of one none, and of one all.
    thresholds = torch.tensor([1.0, 60.0, -math.inf, 2.0, -math.inf, 4.5], device=logits.device)
    shards = [(logits[:, first : first + 512], first) for first in range(0, VOCAB_SIZE, 512)]
    tokens = pick(torch.stack([reduce(shard, *sampling, thresholds, first, 512) for shard, first in shards]))
    assert (tokens == NON_FINITE).tolist() == [False, True, True, True, True, False]
    assert tokens.tolist() == Sampler()(logits, *sampling, thresholds).tolist()
    assert tokens.tolist() == sample_torch(*(x.cpu() for x in (*inputs, thresholds))).tolist()


@pytest.mark.parametrize("first", [0, 64, 896])
def test_the_kernel_equals_its_twin(inputs, first):
    logits, *sampling = inputs
    (reduce, pick), (reduce_twin, pick_twin) = use("kernels"), use("twins")
    shard = logits[:, first : first + 333].bfloat16()
    found, expected = (f(shard, *sampling, None, first) for f in (reduce, reduce_twin))
    scores, expected_scores = (x[:, 0, 0].contiguous().view(torch.float32) for x in (found, expected))
    assert torch.allclose(scores, expected_scores, rtol=1e-4, atol=1e-4)
    has_token = scores.isfinite()
    assert has_token.sum() >= 3
    assert found[has_token, 0, 1].tolist() == expected[has_token, 0, 1].tolist()
    stacked = torch.stack([found, expected, found])
    assert pick(stacked).tolist() == pick_twin(stacked).tolist()


def test_a_rank_without_columns_never_wins(inputs):
    logits, *sampling = inputs

    class Pair:
        size = 2

        def all_gather(self, best):
            return torch.stack([best_of_shard(logits, *sampling), best])

    for thresholds in (None, torch.full((BATCH,), -100.0, device=logits.device)):
        tokens = Sampler(Pair(), first_column=1024, shard_size=1024)(logits[:, :0], *sampling, thresholds)
        assert tokens.tolist() == Sampler()(logits, *sampling).tolist()
