"""Scheduler: who runs when, who is preempted, when a sequence ends, and that no one can tell from the tokens."""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from invariants import FakeModel, check_scheduler, run_alone

from nanovllm.engine.scheduler import MIN_CHUNK_SHARE, Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

SIZE = 4
EOS = 2


def make_scheduler(num_blocks: int = 100, **changes) -> Scheduler:
    options = {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "max_model_len": 1000,
        "num_kvcache_blocks": num_blocks,
        "kvcache_block_size": SIZE,
        "eos": [EOS],
    }
    return Scheduler(**options | changes)


def add(scheduler: Scheduler, prompt: int | list[int], max_tokens: int = 100, **params) -> Sequence:
    """Queue a prompt; a number stands for that many tokens which no other such prompt has."""
    seq_id = next(seq_ids)
    if isinstance(prompt, int):
        prompt = list(range(1000 * seq_id, 1000 * seq_id + prompt))
    seq = Sequence(seq_id, prompt, SamplingParams(max_tokens=max_tokens, **params), scheduler.block_manager.block_size)
    scheduler.add(seq)
    return seq


seq_ids = itertools.count(1)


def step(scheduler: Scheduler, token: int = 900) -> tuple[list[Sequence], bool, list[Sequence]]:
    """One step in which every sequence samples `token`: its sequences, whether it is a prefill, the finished."""
    seqs, is_prefill = scheduler.schedule()
    assert seqs
    finished = scheduler.postprocess(seqs, [token] * len(seqs))
    check_scheduler(scheduler)
    return seqs, is_prefill, finished


# Prefill


def test_a_sequences_way_through_the_queues():
    scheduler = make_scheduler()
    assert scheduler.is_finished()
    seq = add(scheduler, 3, max_tokens=2)
    assert not scheduler.is_finished()
    assert (list(scheduler.waiting), list(scheduler.running)) == ([seq], [])

    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill, seq.num_scheduled_tokens) == ([seq], True, 3)
    assert seq.status is SequenceStatus.RUNNING
    assert scheduler.postprocess(seqs, [900]) == []
    assert (list(scheduler.waiting), list(scheduler.running)) == ([], [seq])
    assert (seq.completion_token_ids, seq.num_cached_tokens, seq.is_prefilling) == ([900], 3, False)

    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill, seq.num_scheduled_tokens) == ([seq], False, 1)
    assert scheduler.postprocess(seqs, [901]) == [seq]
    assert seq.status is SequenceStatus.FINISHED
    assert (seq.completion_token_ids, seq.finish_reason) == ([900, 901], "length")
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
    prompt = seq.token_ids
    chunks = []
    for _ in range(3):
        seqs, is_prefill = scheduler.schedule()
        assert (seqs, is_prefill) == ([seq], True)
        chunks.append((seq.num_cached_tokens, seq.num_scheduled_tokens))
        assert seq.num_completion_tokens == 0
        # EOS from a chunk that goes on must be ignored as any other token.
        finished = scheduler.postprocess(seqs, [EOS if len(chunks) < 3 else 900])
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
        scheduler.postprocess(seqs, [900] * len(seqs))
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
    assert (cached.num_shared_tokens, cached.num_completion_tokens) == (12, 1)
    assert step(scheduler)[:2] == ([late], True)


def test_nobody_overtakes_a_prompt_that_was_not_cut_and_nothing_is_taken_or_counted_for_it():
    scheduler = make_scheduler(num_blocks=20)
    first, same, whole, short = (add(scheduler, prompt) for prompt in ([1] * 58, [1] * 58, 8, 1))
    assert step(scheduler)[:2] == ([first], True)
    # In order of arrival: the one that waited for the first one's beginning, then those behind it.
    assert list(scheduler.waiting) == [same, whole, short]
    assert (whole.block_table, whole.num_shared_tokens) == ([], -1)
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
        scheduler.postprocess(seqs, [900] * len(seqs))
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
    assert [seq.num_shared_tokens for seq in seqs] == [12] * 4


def test_a_prompt_waits_a_step_for_the_beginning_that_another_one_computes():
    scheduler = make_scheduler()
    first, same, other, longer = (add(scheduler, prompt) for prompt in ([1] * 9, [1] * 9, [2] * 9, [1] * 12))
    seqs, _ = scheduler.schedule()
    assert seqs == [first, other]  # those behind the waiting ones lose nothing
    assert list(scheduler.waiting) == [same, longer]
    scheduler.postprocess(seqs, [900, 901])
    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill) == ([same, longer], True)
    assert [seq.num_shared_tokens for seq in seqs] == [8, 8]
    assert [seq.num_scheduled_tokens for seq in seqs] == [1, 4]


def test_a_beginning_that_takes_chunks_is_waited_for_until_the_last():
    scheduler = make_scheduler(max_num_batched_tokens=8)
    first, second = add(scheduler, [1] * 13), add(scheduler, [1] * 13)
    assert step(scheduler)[0] == [first]
    # The rest of the first, and one that needs nothing of it; the second waits for the block that is under way.
    assert step(scheduler)[0] == [first]
    assert step(scheduler)[0] == [second]
    assert second.num_shared_tokens == 12


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
        assert scheduler.schedule()[0][0] is first
        scheduler.reset()


def test_without_prefix_caching_every_prompt_is_computed_in_full():
    scheduler = make_scheduler(enable_prefix_caching=False)
    for _ in range(2):
        seq = add(scheduler, [1] * 9, max_tokens=1)
        seqs, _ = scheduler.schedule()
        assert (seq.num_cached_tokens, seq.num_scheduled_tokens) == (0, 9)
        scheduler.postprocess(seqs, [900])


def test_a_step_holds_max_num_seqs_sequences():
    scheduler = make_scheduler(max_num_seqs=3)
    seqs = [add(scheduler, 2, max_tokens=3) for _ in range(5)]
    assert step(scheduler)[:2] == (seqs[:3], True)
    assert step(scheduler)[:2] == (seqs[3:], True)
    # Oldest first; it stays with them until they end.
    assert step(scheduler)[:2] == (seqs[:3], False)
    assert step(scheduler)[2] == seqs[:3]
    assert step(scheduler)[:2] == (seqs[3:], False)
    assert step(scheduler)[2] == seqs[3:]
    assert scheduler.is_finished()


# Decoding and preemption


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
    assert (c.status, c.is_prefilling, c.block_table, c.num_cached_tokens) == (SequenceStatus.WAITING, True, [], 0)
    assert c.num_completion_tokens == 2
    scheduler.postprocess(seqs, [900, 900])
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
    scheduler.postprocess(seqs, [900])
    check_scheduler(scheduler)


def test_a_preempted_sequence_finds_its_own_blocks_again():
    scheduler = make_scheduler(num_blocks=6)
    a, b = add(scheduler, 11, max_tokens=3), add(scheduler, 10)
    b_tokens = b.token_ids
    step(scheduler, 901)
    step(scheduler, 902)
    # a's 13th token opens a block. b has twelve tokens, eleven of them in the cache, eight in full blocks.
    assert (b.num_tokens, b.num_cached_tokens) == (12, 11)
    full_blocks = b.block_table[:2]
    seqs, _ = scheduler.schedule()
    assert (seqs, scheduler.num_preemptions) == ([a], 1)
    assert scheduler.postprocess(seqs, [903]) == [a]

    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill) == ([b], True)
    assert b.block_table[:2] == full_blocks
    assert (b.num_cached_tokens, b.num_scheduled_tokens) == (8, 4)
    scheduler.postprocess(seqs, [904])
    # It goes on where it was: nothing of its completion is lost or repeated, and what it was given at first stays.
    assert b.token_ids == [*b_tokens, 901, 902, 904]
    assert (b.status, b.is_prefilling, b.num_shared_tokens) == (SequenceStatus.RUNNING, False, 0)
    assert step(scheduler)[:2] == ([b], False)


def test_a_preempted_sequence_longer_than_the_budget_is_prefilled_in_chunks():
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=7, enable_prefix_caching=False)
    a, b = add(scheduler, 11, max_tokens=3), add(scheduler, 10)
    tokens = itertools.count(900)
    while not scheduler.num_preemptions:
        step(scheduler, next(tokens))
    assert b.status is SequenceStatus.WAITING
    before = b.token_ids
    assert len(before) > b.num_prompt_tokens
    chunks = []
    while b.token_ids == before:
        seqs, is_prefill = scheduler.schedule()
        if is_prefill:
            assert seqs == [b]
            chunks.append(b.num_scheduled_tokens)
        scheduler.postprocess(seqs, [next(tokens)] * len(seqs))
    assert a.is_finished
    assert chunks == [7, len(before) - 7]
    assert b.token_ids[:-1] == before


# The end of a sequence


@pytest.mark.parametrize("eos", [2, 5, 7])
def test_any_of_the_end_of_sequence_tokens_ends_it(eos):
    scheduler = make_scheduler(eos=[2, 5, 7])
    ends, goes_on = add(scheduler, 3), add(scheduler, 3)
    step(scheduler)
    seqs, _ = scheduler.schedule()
    assert scheduler.postprocess(seqs, [eos, 6]) == [ends]
    assert (ends.status, ends.finish_reason) == (SequenceStatus.FINISHED, "stop")
    assert ends.completion_token_ids == [900, eos]
    assert ends.block_table == []
    assert list(scheduler.running) == [goes_on]
    assert goes_on.finish_reason is None
    check_scheduler(scheduler)


def test_an_end_of_sequence_token_in_the_prompt_ends_nothing():
    scheduler = make_scheduler()
    seq = add(scheduler, [EOS, 1, EOS])
    assert step(scheduler)[2] == []
    assert seq.completion_token_ids == [900]


def test_the_first_token_can_be_the_last():
    scheduler = make_scheduler()
    stops, reaches_its_length = add(scheduler, 3), add(scheduler, 3, max_tokens=1)
    seqs, _ = scheduler.schedule()
    assert scheduler.postprocess(seqs, [EOS, 900]) == [stops, reaches_its_length]
    assert (stops.finish_reason, reaches_its_length.finish_reason) == ("stop", "length")
    assert scheduler.is_finished()
    check_scheduler(scheduler)


def test_ignore_eos_goes_on_to_max_tokens():
    scheduler = make_scheduler()
    seq = add(scheduler, 3, max_tokens=4, ignore_eos=True)
    for _ in range(3):
        assert step(scheduler, EOS)[2] == []
    assert step(scheduler, EOS)[2] == [seq]
    assert (seq.completion_token_ids, seq.finish_reason) == ([EOS] * 4, "length")


def test_an_end_of_sequence_token_at_max_tokens_is_a_stop():
    scheduler = make_scheduler()
    seq = add(scheduler, 3, max_tokens=1)
    step(scheduler, EOS)
    assert seq.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_ends_it(max_tokens):
    scheduler = make_scheduler()
    seq = add(scheduler, 3, max_tokens=max_tokens)
    while not scheduler.is_finished():
        step(scheduler)
    assert (seq.num_completion_tokens, seq.finish_reason) == (max_tokens, "length")


@pytest.mark.parametrize(("max_model_len", "num_blocks", "limit"), [(10, 100, 10), (1000, 3, 12), (12, 3, 12)])
def test_the_longest_sequence_is_the_smaller_of_model_and_cache(max_model_len, num_blocks, limit):
    scheduler = make_scheduler(num_blocks, max_model_len=max_model_len)
    assert scheduler.max_seq_len == limit
    for length in (3, limit - 1):
        seq = add(scheduler, length)
        while not scheduler.is_finished():
            step(scheduler)
        assert (seq.num_tokens, seq.finish_reason) == (limit, "length")


@pytest.mark.parametrize(
    ("max_model_len", "num_blocks", "limit"), [(10, 100, 10), (1000, 3, 12)], ids=["by model", "by cache"]
)
@pytest.mark.parametrize("beyond", [0, 1, 5000])
def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers(max_model_len, num_blocks, limit, beyond):
    scheduler = make_scheduler(num_blocks, max_model_len=max_model_len)
    length = limit + beyond
    with pytest.raises(ValueError, match=rf"\b{length} tokens.*\b{limit} tokens.*\b{num_blocks} blocks x {SIZE}\b"):
        add(scheduler, length)
    with pytest.raises(ValueError, match=str(length)):
        scheduler.check(length)
    assert scheduler.is_finished()
    scheduler.check(limit - 1)


def test_postprocess_wants_one_token_a_sequence():
    scheduler = make_scheduler()
    add(scheduler, 3)
    add(scheduler, 3)
    seqs, _ = scheduler.schedule()
    with pytest.raises(ValueError, match="zip"):
        scheduler.postprocess(seqs, [900])


# Overlapped steps: the next one is scheduled and launched between advance() and collect()


def launch_ahead(scheduler: Scheduler) -> list[Sequence]:
    """What LLMEngine does with a step ahead of the one in flight."""
    return scheduler.schedule()[0]


def test_a_step_can_be_scheduled_before_the_tokens_of_the_last_one_are_read():
    scheduler = make_scheduler()
    a, b = add(scheduler, 3), add(scheduler, 4)
    first = launch_ahead(scheduler)
    scheduler.advance(first)
    second, is_prefill = scheduler.schedule()
    assert (second, is_prefill) == ([a, b], False)
    assert [seq.pending_row for seq in second] == [0, 1]
    assert scheduler.collect(first, [901, 902]) == []
    scheduler.advance(second)
    assert scheduler.collect(second, [903, 904]) == []
    assert (a.completion_token_ids, b.completion_token_ids) == ([901, 903], [902, 904])
    check_scheduler(scheduler)


def test_the_surplus_token_after_an_end_of_sequence_is_dropped():
    scheduler = make_scheduler()
    a, b = add(scheduler, 3), add(scheduler, 4)
    first = launch_ahead(scheduler)
    scheduler.advance(first)
    second = launch_ahead(scheduler)
    assert scheduler.collect(first, [EOS, 902]) == [a]
    assert a.block_table == []
    scheduler.advance(second)
    third = launch_ahead(scheduler)
    assert third == [b]
    assert scheduler.collect(second, [999, 904]) == []
    assert (a.completion_token_ids, a.finish_reason) == ([EOS], "stop")
    assert b.completion_token_ids == [902, 904]


def test_an_end_by_length_is_known_before_the_token_is():
    scheduler = make_scheduler()
    a, b = add(scheduler, 3, max_tokens=2), add(scheduler, 4)
    step(scheduler)
    second = launch_ahead(scheduler)
    scheduler.advance(second)
    assert a.block_table == []
    assert launch_ahead(scheduler) == [b]
    assert scheduler.collect(second, [901, 902]) == [a]
    assert (a.completion_token_ids, a.finish_reason) == ([900, 901], "length")


def test_an_end_of_sequence_at_the_last_token_is_a_stop_also_when_overlapped():
    scheduler = make_scheduler()
    seq = add(scheduler, 3, max_tokens=1)
    seqs = launch_ahead(scheduler)
    scheduler.advance(seqs)
    assert scheduler.is_finished()
    assert scheduler.collect(seqs, [EOS]) == [seq]
    assert seq.finish_reason == "stop"


@pytest.mark.parametrize("token", [EOS, 907])
def test_a_sequence_preempted_while_its_token_is_sampled(token):
    scheduler = make_scheduler(num_blocks=3)
    a, b = add(scheduler, 6), add(scheduler, 3)
    step(scheduler, 901)
    second = launch_ahead(scheduler)
    scheduler.advance(second)
    # b's fifth token, which nobody knows yet, opens a block, and there is none.
    third = launch_ahead(scheduler)
    assert (third, list(scheduler.waiting)) == ([a], [b])
    finished = scheduler.collect(second, [902, token])
    scheduler.advance(third)
    check_scheduler(scheduler)
    assert b.completion_token_ids == [901, token]
    if token == EOS:
        assert (finished, b.finish_reason, list(scheduler.waiting)) == ([b], "stop", [])
    else:
        assert (finished, b.finish_reason, list(scheduler.waiting)) == ([], None, [b])


@pytest.mark.parametrize("preempted", [False, True])
def test_a_sequence_stopped_by_its_text_while_the_next_step_flies(preempted):
    scheduler = make_scheduler(num_blocks=3 if preempted else 100)
    a, b = add(scheduler, 6), add(scheduler, 3)
    step(scheduler, 901)
    second = launch_ahead(scheduler)
    scheduler.advance(second)
    third = launch_ahead(scheduler)
    assert list(scheduler.waiting) == ([b] if preempted else [])
    assert scheduler.collect(second, [902, 903]) == []
    scheduler.stop([b])
    assert (b.finish_reason, b.block_table, b.completion_token_ids) == ("stop", [], [901, 903])
    scheduler.advance(third)
    check_scheduler(scheduler)
    assert launch_ahead(scheduler) == [a]
    assert scheduler.collect(third, [904, 999][: len(third)]) == []
    assert b.completion_token_ids == [901, 903]
    assert a.completion_token_ids[:3] == [901, 902, 904]


# Abort


def test_abort_drops_the_token_that_is_being_sampled():
    scheduler = make_scheduler()
    a, b = add(scheduler, 3), add(scheduler, 4)
    first = launch_ahead(scheduler)
    scheduler.advance(first)
    second = launch_ahead(scheduler)
    scheduler.collect(first, [901, 902])
    scheduler.advance(second)
    assert scheduler.abort([a.request_id]) == [a]
    assert launch_ahead(scheduler) == [b]
    assert scheduler.collect(second, [EOS, 904]) == []
    assert (a.completion_token_ids, a.finish_reason) == ([901], "abort")
    assert b.completion_token_ids == [902, 904]
    assert scheduler.num_generated_tokens == 3


def test_abort_drops_sequences_in_every_state_and_frees_their_blocks():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    running, stays = add(scheduler, 4), add(scheduler, 4)
    step(scheduler)
    in_chunks, waiting, last = add(scheduler, 25), add(scheduler, 4), add(scheduler, 4)
    step(scheduler)
    assert in_chunks.block_table
    scheduler.abort([running.seq_id, in_chunks.seq_id, waiting.seq_id])
    for seq in (running, in_chunks, waiting):
        assert (seq.status, seq.finish_reason, seq.block_table) == (SequenceStatus.FINISHED, "abort", [])
    assert (list(scheduler.waiting), list(scheduler.running)) == ([last], [stays])
    check_scheduler(scheduler)
    assert step(scheduler)[0] == [last]
    scheduler.abort(seq.seq_id for seq in (stays, last))
    assert scheduler.is_finished()
    assert not scheduler.block_manager.used_block_ids


def test_abort_between_schedule_and_postprocess_leaves_nothing_behind():
    """What an exception or Ctrl-C in the middle of a step comes to."""
    scheduler = make_scheduler()
    seqs = [add(scheduler, 6) for _ in range(3)]
    scheduler.schedule()
    scheduler.abort(seq.seq_id for seq in seqs)
    check_scheduler(scheduler)
    assert scheduler.is_finished()
    # Nothing of the step was computed, so that nothing of it may be found.
    again = add(scheduler, seqs[0].token_ids)
    scheduler.schedule()
    assert again.num_cached_tokens == 0


def test_abort_of_unknown_ids_does_nothing():
    scheduler = make_scheduler()
    seq = add(scheduler, 3)
    scheduler.abort([seq.seq_id + 1])
    assert list(scheduler.waiting) == [seq]
    assert seq.finish_reason is None


# Random traffic, against every sequence run alone

VOCAB_SIZE = 5


def drive(
    scheduler: Scheduler,
    arrivals: list[tuple[int, Sequence]],
    seen: Counter,
    aborts: dict[int, int] | None = None,
    overlap: bool = False,
) -> None:
    """Run all to the end, with the invariants after every step.

    Args:
        arrivals: (step, sequence), in order of steps.
        seen: counts what happened.
        aborts: step -> which of the sequences that are queued then is aborted, counted modulo their number.
        overlap: launch a step before the tokens of the one ahead of it are read, as LLMEngine.generate does.
    """
    model = FakeModel(scheduler, VOCAB_SIZE, noise=EOS)
    arrivals = list(arrivals)
    # Every prefill step ends a chunk of some sequence, and every chunk's sequence gains a token in the end.
    num_completions = sum(min(seq.max_tokens, scheduler.max_seq_len) for _, seq in arrivals)
    bound = 10 + num_completions * (2 + scheduler.max_seq_len // scheduler.max_num_batched_tokens)
    flying: tuple[list[Sequence], list[int]] | None = None
    now = 0
    while arrivals or flying or not scheduler.is_finished():
        now += 1
        while arrivals and (arrivals[0][0] <= now or scheduler.is_finished()):
            scheduler.add(arrivals.pop(0)[1])
        queued = [*scheduler.running, *scheduler.waiting]
        if aborts and now in aborts and queued:
            scheduler.abort([queued[aborts[now] % len(queued)].seq_id])
            check_scheduler(scheduler)
        launched = None
        if not scheduler.is_finished():
            launched = launch(scheduler, model, seen)
        if overlap:
            finished = scheduler.collect(*flying) if flying else []
            if launched:
                scheduler.advance(launched[0])
            ended, flying = flying[0] if flying else [], launched
        elif launched:
            finished = scheduler.postprocess(*launched)
            ended = launched[0]
        else:
            finished = ended = []
        assert all(seq.is_finished and not seq.block_table and seq in ended for seq in finished)
        seen["finished"] += len(finished)
        check_scheduler(scheduler)
        model.cache.check_findable()
        seen["several readers"] += any(block.ref_count > 1 for block in scheduler.block_manager.blocks)
        assert now <= bound, "no end in sight"
    assert len(scheduler.block_manager.free_block_ids) == len(scheduler.block_manager.blocks)
    seen["preempted"] += scheduler.num_preemptions


def launch(scheduler: Scheduler, model: FakeModel, seen: Counter) -> tuple[list[Sequence], list[int]]:
    goes_on = bool(scheduler.waiting and scheduler.waiting[0].block_table)
    seqs, is_prefill = scheduler.schedule()
    assert seqs, "empty-handed while work is left"
    assert len({seq.seq_id for seq in seqs}) == len(seqs) <= scheduler.max_num_seqs
    scheduled = [seq.num_scheduled_tokens for seq in seqs]
    assert min(scheduled) >= 1
    assert sum(scheduled) <= scheduler.max_num_batched_tokens or not is_prefill
    if is_prefill and len(seqs) > 1 and seqs[-1].num_cached_tokens + scheduled[-1] < seqs[-1].num_tokens:
        assert scheduled[-1] >= scheduler.max_num_batched_tokens // MIN_CHUNK_SHARE
    seen["chunk"] += goes_on
    seen["decoded side by side"] += not is_prefill and len(seqs) > 1
    return seqs, model.run(seqs, is_prefill)


def check_outputs(scheduler: Scheduler, seqs: list[Sequence], seen: Counter) -> None:
    for seq in seqs:
        eos = () if seq.ignore_eos else scheduler.eos
        tokens, reason = run_alone(seq.prompt_token_ids, seq.max_tokens, eos, scheduler.max_seq_len, VOCAB_SIZE)
        if seq.finish_reason == "abort":
            assert seq.completion_token_ids == tokens[: seq.num_completion_tokens]
            assert seq.num_completion_tokens < len(tokens)
        else:
            assert (seq.completion_token_ids, seq.finish_reason) == (tokens, reason)
        seen["shared"] += seq.num_shared_tokens > 0
        seen[seq.finish_reason] += 1
    assert seen["finished"] == seen["stop"] + seen["length"], "each sequence is reported once"


@st.composite
def traffic(draw):
    """A small engine, and more requests than fit it at once."""
    block_size = draw(st.integers(1, 4))
    num_blocks = draw(st.integers(2, 12))
    scheduler = Scheduler(
        max_num_seqs=draw(st.integers(1, 6)),
        max_num_batched_tokens=draw(st.integers(1, 30)),
        max_model_len=draw(st.integers(2, 60)),
        num_kvcache_blocks=num_blocks,
        kvcache_block_size=block_size,
        eos=draw(st.sampled_from([(), (EOS,), (EOS, 4)])),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
    )
    beginnings = draw(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=2))
    arrivals = []
    for i in range(draw(st.integers(1, 8))):
        prompt = draw(st.sampled_from(beginnings)) + draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
        prompt = prompt[: scheduler.max_seq_len - 1]
        params = SamplingParams(max_tokens=draw(st.integers(1, 20)), ignore_eos=draw(st.booleans()))
        arrivals.append((draw(st.integers(0, 12)), Sequence(i, prompt, params, block_size)))
    arrivals.sort(key=lambda arrival: arrival[0])
    return scheduler, arrivals


RARE = {"preempted", "chunk", "shared", "several readers", "decoded side by side", "stop", "length"}


def test_random_traffic_gives_everybody_the_tokens_it_gets_alone():
    seen = Counter()

    @settings(max_examples=200, deadline=None, print_blob=True)
    @given(traffic(), st.dictionaries(st.integers(1, 20), st.integers(0, 7), max_size=2))
    def run(drawn, aborts):
        scheduler, arrivals = drawn
        here = Counter()
        drive(scheduler, arrivals, here, aborts=aborts)
        check_outputs(scheduler, [seq for _, seq in arrivals], here)
        seen.update(here)
        for name in +here:
            event(name)

    run()
    missing = {name for name in RARE | {"abort"} if not seen[name]}
    assert not missing, "the examples did not reach everything"


def test_overlapped_steps_give_everybody_the_same_tokens():
    seen = Counter()

    @settings(max_examples=200, deadline=None, print_blob=True)
    @given(traffic(), st.dictionaries(st.integers(1, 20), st.integers(0, 7), max_size=2))
    def run(drawn, aborts):
        scheduler, arrivals = drawn
        here = Counter()
        drive(scheduler, arrivals, here, aborts=aborts, overlap=True)
        check_outputs(scheduler, [seq for _, seq in arrivals], here)
        seen.update(here)
        for name in +here:
            event(name)

    run()
    missing = {name for name in RARE | {"abort"} if not seen[name]}
    assert not missing, "the examples did not reach everything"


@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("seed", range(4))
def test_a_crowd_that_thrashes_a_small_cache(seed, overlap):
    """The same with a fixed crowd, so that preemption, chunks and sharing are there in numbers for certain."""
    rng = random.Random(seed)
    scheduler = make_scheduler(num_blocks=12, max_num_batched_tokens=12, max_num_seqs=6)
    beginnings = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (10, 17)]
    arrivals = []
    for i in range(30):
        prompt = rng.choice(beginnings) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        params = SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=rng.random() < 0.8)
        arrivals.append((i // 2, Sequence(i, prompt, params, SIZE)))
    seen = Counter()
    drive(scheduler, arrivals, seen, overlap=overlap)
    check_outputs(scheduler, [seq for _, seq in arrivals], seen)
    assert scheduler.num_preemptions >= 10
    assert seen["chunk"] >= 10
    assert seen["shared"] >= 10
    assert seen["several readers"] >= 10
