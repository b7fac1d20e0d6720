"""Scheduler: who is prefilled when, and how much of each prompt."""

import pytest
from invariants import check_scheduler
from schedulers import EOS, add, make_scheduler, postprocess, step

from nanovllm.engine.sequence import SequenceStatus


def test_a_sequences_way_through_the_queues():
    scheduler = make_scheduler()
    assert scheduler.is_finished()
    seq = add(scheduler, 3, max_tokens=2)
    assert not scheduler.is_finished()
    assert (list(scheduler.waiting), list(scheduler.running)) == ([seq], [])

    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill, seq.num_scheduled_tokens) == ([seq], True, 3)
    assert seq.status is SequenceStatus.RUNNING
    assert postprocess(scheduler, seqs, [900]) == []
    assert (list(scheduler.waiting), list(scheduler.running)) == ([], [seq])
    assert (seq.completion_token_ids, seq.num_cached_tokens, seq.is_prefill) == ([900], 3, False)

    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill, seq.num_scheduled_tokens) == ([seq], False, 1)
    assert postprocess(scheduler, seqs, [901]) == [seq]
    assert seq.status is SequenceStatus.FINISHED
    assert (seq.completion_token_ids, seq.completion.finish_reason) == ([900, 901], "length")
    assert scheduler.is_finished()
    check_scheduler(scheduler)


def test_prefill_comes_before_decoding():
    scheduler = make_scheduler()
    first = add(scheduler, 3)
    step(scheduler)
    step(scheduler)
    second = add(scheduler, 3)
    assert step(scheduler)[:2] == ([second], True)
    assert first.num_completion_tokens == 2
    assert step(scheduler)[:2] == ([first, second], False)


def test_prompts_are_taken_in_order_of_arrival_and_none_overtakes_the_head():
    scheduler = make_scheduler(num_blocks=5)
    a, big, small = add(scheduler, 11), add(scheduler, 12), add(scheduler, 1)
    assert step(scheduler)[:2] == ([a], True)
    # `small` would fit into the two free blocks; the head, which takes three, goes first.
    assert step(scheduler)[:2] == ([a], False)
    assert list(scheduler.waiting) == [big, small]


@pytest.mark.parametrize(("budget", "scheduled"), [(64, [5, 6, 7]), (18, [5, 6, 7]), (17, [5, 6, 6]), (11, [5, 6])])
def test_a_step_prefills_no_more_than_the_token_budget(budget, scheduled):
    scheduler = make_scheduler(max_num_batched_tokens=budget)
    for length in (5, 6, 7):
        add(scheduler, length)
    seqs, is_prefill = scheduler.schedule()
    assert is_prefill
    assert [seq.num_scheduled_tokens for seq in seqs] == scheduled


def test_a_long_prompt_is_prefilled_in_chunks_and_only_the_last_yields_a_token():
    scheduler = make_scheduler(max_num_batched_tokens=6)
    seq = add(scheduler, 15)
    prompt = list(seq.token_ids)
    chunks = []
    for _ in range(3):
        seqs, is_prefill = scheduler.schedule()
        assert (seqs, is_prefill) == ([seq], True)
        chunks.append((seq.num_cached_tokens, seq.num_scheduled_tokens))
        assert seq.num_completion_tokens == 0
        # EOS from a chunk that goes on must be ignored as any other token.
        finished = postprocess(scheduler, seqs, [EOS if len(chunks) < 3 else 900])
        assert finished == []
        check_scheduler(scheduler)
    assert chunks == [(0, 6), (6, 6), (12, 3)]
    assert seq.token_ids == [*prompt, 900]
    assert seq.status is SequenceStatus.RUNNING
    assert step(scheduler)[:2] == ([seq], False)


def test_a_chunk_takes_what_the_budget_leaves_and_goes_on_before_anybody_else():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    a, b, c = add(scheduler, 7), add(scheduler, 9), add(scheduler, 3)
    assert step(scheduler)[0] == [a, b]
    assert (b.num_cached_tokens, b.num_completion_tokens, a.num_completion_tokens) == (3, 0, 1)
    assert list(scheduler.waiting) == [b, c]
    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill) == ([b, c], True)
    assert [seq.num_scheduled_tokens for seq in seqs] == [6, 3]


@pytest.mark.parametrize(
    ("budget", "scheduled"),
    [
        (64, [[30, 30], [30]]),  # 4 tokens left of 64: less than an eighth
        (67, [[30, 30], [30]]),
        (68, [[30, 30, 8], [22]]),  # 8 left of 68, an eighth
        (60, [[30, 30], [30]]),
        (90, [[30, 30, 30]]),
    ],
)
def test_no_prompt_is_cut_to_fill_a_small_rest_of_a_step(budget, scheduled):
    scheduler = make_scheduler(max_num_batched_tokens=budget)
    for _ in range(3):
        add(scheduler, 30, max_tokens=1)
    for expected in scheduled:
        seqs, is_prefill = scheduler.schedule()
        assert is_prefill
        assert [seq.num_scheduled_tokens for seq in seqs] == expected
        postprocess(scheduler, seqs, [900] * len(seqs))
        check_scheduler(scheduler)
    assert scheduler.is_finished()


def test_a_small_rest_goes_to_prompts_that_fit_it_whole():
    scheduler = make_scheduler()
    beginning = list(range(12))
    add(scheduler, [*beginning, 50], max_tokens=1)
    step(scheduler)
    # Four tokens of 64 are left: enough for what is not cached of the second, and for the one short prompt then.
    big, cached, short, late = (add(scheduler, prompt) for prompt in (60, [*beginning, 61, 62], 2, 1))
    assert step(scheduler)[:2] == ([big, cached, short], True)
    assert (cached.completion.num_shared_tokens, cached.num_completion_tokens) == (12, 1)
    assert step(scheduler)[:2] == ([late], True)


def test_nobody_overtakes_a_prompt_that_was_not_cut_and_nothing_is_taken_or_counted_for_it():
    scheduler = make_scheduler(num_blocks=20)
    first, same, whole, short = (add(scheduler, prompt) for prompt in ([1] * 58, [1] * 58, 8, 1))
    assert step(scheduler)[:2] == ([first], True)
    # In order of arrival: the one that waited for the first one's beginning, then those behind it.
    assert list(scheduler.waiting) == [same, whole, short]
    assert (whole.block_table, whole.completion.num_shared_tokens) == ([], -1)
    assert scheduler.num_prompt_tokens == 58
    assert step(scheduler)[:2] == ([same, whole, short], True)
    assert scheduler.num_prompt_tokens == 58 + 58 + 8 + 1


def test_a_prompt_with_less_cached_than_it_exceeds_the_small_rest_by_waits():
    scheduler = make_scheduler()
    add(scheduler, [*range(12), 50], max_tokens=1)
    step(scheduler)
    big, cached = add(scheduler, 60), add(scheduler, [*range(12), *range(20, 25)])
    assert step(scheduler)[:2] == ([big], True)  # 4 left, 5 to compute
    seqs, _ = scheduler.schedule()
    assert (seqs, cached.num_cached_tokens, cached.num_scheduled_tokens) == ([cached], 12, 5)


def test_a_prompt_longer_than_a_step_is_cut_and_its_chunks_go_on_first():
    scheduler = make_scheduler()
    long, other = add(scheduler, 2 * 64 + 60), add(scheduler, 10)
    for scheduled in ([(long, 64)], [(long, 64)], [(long, 60)], [(other, 10)]):
        seqs, is_prefill = scheduler.schedule()
        assert is_prefill
        assert [(seq, seq.num_scheduled_tokens) for seq in seqs] == scheduled
        postprocess(scheduler, seqs, [900] * len(seqs))
        check_scheduler(scheduler)


def test_cached_tokens_do_not_count_against_the_budget():
    scheduler = make_scheduler(max_num_batched_tokens=14)
    beginning = list(range(12))
    add(scheduler, [*beginning, 50], max_tokens=1)
    assert len(step(scheduler)[2]) == 1
    seqs = [add(scheduler, [*beginning, 60 + i, 70]) for i in range(4)]
    scheduled, is_prefill = scheduler.schedule()
    assert (scheduled, is_prefill) == (seqs, True)
    assert [(seq.num_cached_tokens, seq.num_scheduled_tokens) for seq in seqs] == [(12, 2)] * 4
    assert [seq.completion.num_shared_tokens for seq in seqs] == [12] * 4


def test_a_prompt_waits_a_step_for_the_beginning_that_another_one_computes():
    scheduler = make_scheduler()
    first, same, other, longer = (add(scheduler, prompt) for prompt in ([1] * 9, [1] * 9, [2] * 9, [1] * 12))
    seqs, _ = scheduler.schedule()
    assert seqs == [first, other]  # those behind the waiting ones lose nothing
    assert list(scheduler.waiting) == [same, longer]
    postprocess(scheduler, seqs, [900, 901])
    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill) == ([same, longer], True)
    assert [seq.completion.num_shared_tokens for seq in seqs] == [8, 8]
    assert [seq.num_scheduled_tokens for seq in seqs] == [1, 4]


def test_a_beginning_that_takes_chunks_is_waited_for_until_the_last():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    first, second = add(scheduler, [1] * 13), add(scheduler, [1] * 13)
    assert step(scheduler)[0] == [first]
    # The rest of the first, and one that needs nothing of it; the second waits for the block that is under way.
    assert step(scheduler)[0] == [first]
    assert step(scheduler)[0] == [second]
    assert second.completion.num_shared_tokens == 12


def test_a_chunk_stays_ahead_of_those_that_wait():
    scheduler = make_scheduler(max_num_batched_tokens=12)
    first, same, long = add(scheduler, [1] * 9), add(scheduler, [1] * 9), add(scheduler, 20)
    assert step(scheduler)[0] == [first, long]
    assert list(scheduler.waiting) == [long, same]
    check_scheduler(scheduler)


def test_the_head_of_the_queue_never_waits():
    scheduler = make_scheduler()
    for _ in range(3):
        first = add(scheduler, [1] * 9, max_tokens=1)
        add(scheduler, [1] * 9, max_tokens=1)
        assert scheduler.schedule().seqs[0] is first
        scheduler.reset()


def test_a_block_that_decoding_fills_is_shared():
    scheduler = make_scheduler()
    first = add(scheduler, 6, max_tokens=3)
    for token in (901, 902, 903):
        step(scheduler, token)
    # The last token of its nine was never computed.
    second = add(scheduler, first.token_ids.tolist())
    step(scheduler)
    assert second.completion.num_shared_tokens == 8


def test_without_prefix_caching_every_prompt_is_computed_in_full():
    scheduler = make_scheduler(enable_prefix_caching=False)
    for _ in range(2):
        seq = add(scheduler, [1] * 9, max_tokens=1)
        seqs, _ = scheduler.schedule()
        assert (seq.num_cached_tokens, seq.num_scheduled_tokens) == (0, 9)
        postprocess(scheduler, seqs, [900])
