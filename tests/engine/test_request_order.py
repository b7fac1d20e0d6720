"""Which requests of a batch begin first."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedulers import make_scheduler

from nanovllm import SamplingParams
from nanovllm.engine.request_order import longest_first
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE, MAX_SEQ_LEN, ROOMY = 4, 100, 10**6


def make(prompts: list[list[int]], limits: list[int | None]) -> list[Sequence]:
    pairs = zip(prompts, limits, strict=True)
    seqs = [Sequence(prompt, SamplingParams(max_tokens=limit, ignore_eos=True)) for prompt, limit in pairs]
    for i, seq in enumerate(seqs):
        seq.seq_id, seq.block_size, seq.request.request_id = i, BLOCK_SIZE, i
    return seqs


def order(seqs: list[Sequence], capacity: int = ROOMY, prefix_caching: bool = True) -> list[int]:
    return [seq.seq_id for seq in longest_first(seqs, MAX_SEQ_LEN, capacity, prefix_caching)]


@given(st.lists(st.integers(1, 120), max_size=20))
def test_the_longest_are_ahead_and_equals_in_the_given_order(limits):
    bounded = [min(limit, MAX_SEQ_LEN) for limit in limits]
    expected = sorted(range(len(limits)), key=lambda i: (-bounded[i], i))
    assert order(make([[i] for i in range(len(limits))], limits)) == expected


def test_without_a_limit_the_engines_longest_sequence_is_one():
    """Whatever goes beyond it says nothing about which will be longer, nor does the prompt."""
    assert order(make([[1] * 30, [2], [3] * 9], [None, 100, 5000])) == [0, 1, 2]
    assert order(make([[1], [2], [3]], [7, None, 8])) == [1, 2, 0]


SHARED = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 6]]


@pytest.mark.parametrize(
    ("prompts", "capacity", "prefix_caching", "reordered"),
    [
        (SHARED, 29, True, False),  # 5 + 9 and 5 + 11 tokens
        (SHARED, 30, True, True),
        (SHARED, 29, False, True),
        ([[1, 2, 3], [1, 2, 3]], 20, True, True),  # no whole block
        ([[1, 2, 3, 4], [1, 2, 3, 5]], 20, True, True),  # not the same one
    ],
)
def test_prompts_that_share_a_beginning_stay_side_by_side_in_a_small_cache(
    prompts, capacity, prefix_caching, reordered
):
    assert order(make(prompts, [9, 11]), capacity, prefix_caching) == ([1, 0] if reordered else [0, 1])


def test_samples_of_one_request_are_no_such_prompts():
    seqs = make([[1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8]], [9, 9, 11])
    seqs[1].request.request_id = seqs[0].request.request_id
    assert order(seqs, capacity=20) == [2, 0, 1]


def num_steps(seqs: list[Sequence], num_blocks: int) -> int:
    sizes = {"max_num_batched_tokens": 1000, "max_model_len": MAX_SEQ_LEN, "kvcache_block_size": BLOCK_SIZE}
    scheduler = make_scheduler(num_blocks, **sizes, eos=())
    for seq in seqs:
        scheduler.add(seq)
    count = 0
    while not scheduler.is_finished():
        step = scheduler.schedule()
        scheduler.advance(step)
        scheduler.record(step, [0] * len(step.seqs))
        count += 1
    return count


@pytest.mark.parametrize("num_blocks", [1000, 60])
def test_a_batch_takes_fewer_steps_with_much_cache_and_with_little(num_blocks):
    rng = Random(num_blocks)
    prompts = [[rng.randrange(1000) for _ in range(rng.randint(1, 20))] for _ in range(64)]
    limits = [rng.randint(1, 60) for _ in prompts]
    reordered = longest_first(make(prompts, limits), MAX_SEQ_LEN, num_blocks * BLOCK_SIZE, True)
    assert num_steps(reordered, num_blocks) < num_steps(make(prompts, limits), num_blocks)
