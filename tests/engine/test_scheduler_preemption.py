"""Scheduler: who is decoded, who is preempted when blocks run out, and how it goes on."""

import itertools

from invariants import check_scheduler
from schedulers import SIZE, add, make_scheduler, postprocess, step

from nanovllm.engine.sequence import SequenceStatus


def test_a_decode_step_advances_every_running_sequence_by_one():
    scheduler = make_scheduler()
    seqs = [add(scheduler, length) for length in (3, 4, 5)]
    step(scheduler)
    for n in range(2, 8):
        assert step(scheduler)[:2] == (seqs, False)
        assert [seq.num_completion_tokens for seq in seqs] == [n] * 3


def test_the_youngest_is_preempted_and_goes_to_the_head_of_the_queue():
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=3)
    a, b, c = (add(scheduler, 4 + SIZE - 1) for _ in range(3))
    late = add(scheduler, 20)
    assert step(scheduler)[0] == [a, b, c]
    # Eight tokens each, in two blocks each: all six are full, and the next step writes the eighth token.
    assert step(scheduler)[:2] == ([a, b, c], False)
    assert scheduler.num_preemptions == 0
    # a's ninth token opens a block: c gives its two, of which b takes the other.
    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill, scheduler.num_preemptions) == ([a, b], False, 1)
    assert list(scheduler.waiting) == [c, late]
    assert (c.status, c.is_prefill, c.block_table, c.num_cached_tokens) == (SequenceStatus.WAITING, True, [], 0)
    assert c.num_completion_tokens == 2
    postprocess(scheduler, seqs, [900, 900])
    check_scheduler(scheduler)


def test_several_are_preempted_last_in_first_out_and_keep_their_order():
    scheduler = make_scheduler(num_blocks=4)
    a, b, c, d = (add(scheduler, 3) for _ in range(4))
    step(scheduler)
    assert step(scheduler)[0] == [a, b, c, d]
    # Each has five tokens and one block, so a takes d's and b takes c's.
    assert step(scheduler)[:2] == ([a, b], False)
    assert list(scheduler.waiting) == [c, d]
    assert list(scheduler.running) == [a, b]
    assert scheduler.num_preemptions == 2


def test_with_nobody_younger_a_sequence_preempts_itself():
    scheduler = make_scheduler(num_blocks=3)
    a, b = add(scheduler, 6), add(scheduler, 3)
    step(scheduler)
    step(scheduler)
    # a's eighth token has its slot; b's fifth opens a block, and there is none.
    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill, scheduler.num_preemptions) == ([a], False, 1)
    assert list(scheduler.waiting) == [b]
    assert list(scheduler.running) == [a]
    postprocess(scheduler, seqs, [900])
    check_scheduler(scheduler)


def test_a_preempted_sequence_finds_its_own_blocks_again():
    scheduler = make_scheduler(num_blocks=6)
    a, b = add(scheduler, 11, max_tokens=3), add(scheduler, 10)
    b_tokens = list(b.token_ids)
    step(scheduler, 901)
    step(scheduler, 902)
    # a's 13th token opens a block. b has twelve tokens, eleven of them in the cache, eight in full blocks.
    assert (b.num_tokens, b.num_cached_tokens) == (12, 11)
    full_blocks = b.block_table[:2]
    seqs, _ = scheduler.schedule()
    assert (seqs, scheduler.num_preemptions) == ([a], 1)
    assert postprocess(scheduler, seqs, [903]) == [a]

    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill) == ([b], True)
    assert b.block_table[:2] == full_blocks
    assert (b.num_cached_tokens, b.num_scheduled_tokens) == (8, 4)
    postprocess(scheduler, seqs, [904])
    # It goes on where it was: nothing of its completion is lost or repeated, and what it was given at first stays.
    assert b.token_ids == [*b_tokens, 901, 902, 904]
    assert (b.status, b.is_prefill, b.completion.num_shared_tokens) == (SequenceStatus.RUNNING, False, 0)
    assert step(scheduler)[:2] == ([b], False)


def test_a_preempted_sequence_longer_than_the_budget_is_prefilled_in_chunks():
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=7, enable_prefix_caching=False)
    a, b = add(scheduler, 11, max_tokens=3), add(scheduler, 10)
    tokens = itertools.count(900)
    while not scheduler.num_preemptions:
        step(scheduler, next(tokens))
    assert b.status is SequenceStatus.WAITING
    before = list(b.token_ids)
    assert len(before) > b.num_prompt_tokens
    chunks = []
    while b.token_ids == before:
        seqs, is_prefill = scheduler.schedule()
        if is_prefill:
            assert seqs == [b]
            chunks.append(b.num_scheduled_tokens)
        postprocess(scheduler, seqs, [next(tokens)] * len(seqs))
    assert a.is_finished
    assert chunks == [7, len(before) - 7]
    assert b.token_ids[:-1] == before
