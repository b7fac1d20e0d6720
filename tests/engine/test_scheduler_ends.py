"""Scheduler: when a sequence ends, also one step late and in the middle of one, and what becomes of an aborted one."""

from types import SimpleNamespace

import pytest
from invariants import check_scheduler
from schedulers import EOS, SIZE, add, make_scheduler, postprocess, step

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import Step
from nanovllm.kernels.sampling.sampler import NON_FINITE

# The end of a sequence


@pytest.mark.parametrize("eos", [2, 5, 7])
def test_any_of_the_end_of_sequence_tokens_ends_it(eos):
    scheduler = make_scheduler(eos=[2, 5, 7])
    ends, goes_on = add(scheduler, 3), add(scheduler, 3)
    step(scheduler)
    seqs, _ = scheduler.schedule()
    assert postprocess(scheduler, seqs, [eos, 6]) == [ends]
    assert (ends.status, ends.completion.finish_reason) == (SequenceStatus.FINISHED, "stop")
    assert ends.completion_token_ids == [900, eos]
    assert ends.block_table == []
    assert list(scheduler.running) == [goes_on]
    assert goes_on.completion.finish_reason is None
    check_scheduler(scheduler)


@pytest.mark.parametrize(
    ("ignore_eos", "token", "stop_reason"), [(False, EOS, None), (False, 905, 905), (True, 905, 905)]
)
def test_stop_tokens_of_a_request_come_beside_those_of_the_model(ignore_eos, token, stop_reason):
    scheduler = make_scheduler()
    seq = add(scheduler, 3, stop_token_ids=[905], ignore_eos=ignore_eos)
    if ignore_eos:
        step(scheduler, token=EOS)
    step(scheduler, token=token)
    assert (seq.completion.finish_reason, seq.completion.stop_reason) == ("stop", stop_reason)


def test_an_end_of_sequence_token_in_the_prompt_ends_nothing():
    scheduler = make_scheduler()
    seq = add(scheduler, [EOS, 1, EOS])
    assert step(scheduler)[2] == []
    assert seq.completion_token_ids == [900]


def test_the_first_token_can_be_the_last():
    scheduler = make_scheduler()
    stops, reaches_its_length = add(scheduler, 3), add(scheduler, 3, max_tokens=1)
    seqs, _ = scheduler.schedule()
    assert postprocess(scheduler, seqs, [EOS, 900]) == [stops, reaches_its_length]
    assert (stops.completion.finish_reason, reaches_its_length.completion.finish_reason) == ("stop", "length")
    assert scheduler.is_finished()
    check_scheduler(scheduler)


def test_ignore_eos_goes_on_to_max_tokens():
    scheduler = make_scheduler()
    seq = add(scheduler, 3, max_tokens=4, ignore_eos=True)
    for _ in range(3):
        assert step(scheduler, EOS)[2] == []
    assert step(scheduler, EOS)[2] == [seq]
    assert (seq.completion_token_ids, seq.completion.finish_reason) == ([EOS] * 4, "length")


def test_an_end_of_sequence_token_at_max_tokens_is_a_stop():
    scheduler = make_scheduler()
    seq = add(scheduler, 3, max_tokens=1)
    step(scheduler, EOS)
    assert seq.completion.finish_reason == "stop"


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_ends_it(max_tokens):
    scheduler = make_scheduler()
    seq = add(scheduler, 3, max_tokens=max_tokens)
    while not scheduler.is_finished():
        step(scheduler)
    assert (seq.num_completion_tokens, seq.completion.finish_reason) == (max_tokens, "length")


@pytest.mark.parametrize(("max_model_len", "num_blocks", "limit"), [(10, 100, 10), (1000, 3, 12), (12, 3, 12)])
def test_the_longest_sequence_is_the_smaller_of_model_and_cache(max_model_len, num_blocks, limit):
    scheduler = make_scheduler(num_blocks, max_model_len=max_model_len)
    assert scheduler.max_seq_len == limit
    for length in (3, limit - 1):
        seq = add(scheduler, length)
        while not scheduler.is_finished():
            step(scheduler)
        assert (seq.num_tokens, seq.completion.finish_reason) == (limit, "length")


@pytest.mark.parametrize(
    ("max_model_len", "supported", "num_blocks", "limit", "remedy"),
    [
        (10, 20, 100, 10, r"which is max_model_len: .*, or raise max_model_len, to at most 20$"),
        (10, None, 100, 10, r"which is max_model_len: .*, or raise max_model_len$"),
        (10, 10, 100, 10, r"all that the model supports \(max_position_embeddings\): shorten the prompt$"),
        (1000, 1000, 3, 12, rf"all that the KV cache holds \(3 blocks x {SIZE} tokens\): .* num_kvcache_blocks"),
    ],
    ids=["by option", "by option, model unknown", "by model", "by cache"],
)
@pytest.mark.parametrize("beyond", [0, 1, 5000])
def test_a_prompt_that_leaves_no_room_is_told_what_limits_it(
    max_model_len, supported, num_blocks, limit, remedy, beyond
):
    scheduler = make_scheduler(num_blocks, max_model_len=max_model_len, supported_model_len=supported)
    length = limit + beyond
    with pytest.raises(ValueError, match=rf"\b{length} tokens.*\b{limit} tokens, .*{remedy}"):
        add(scheduler, length)
    with pytest.raises(ValueError, match=str(length)):
        scheduler.length_limit.check(length)
    assert scheduler.is_finished()
    scheduler.length_limit.check(limit - 1)


def test_postprocess_wants_one_token_a_sequence():
    scheduler = make_scheduler()
    add(scheduler, 3)
    add(scheduler, 3)
    seqs, _ = scheduler.schedule()
    with pytest.raises(ValueError, match="token_ids: 1 tokens for 2 sequences"):
        postprocess(scheduler, seqs, [900])


# Overlapped steps: the next one is scheduled and launched between advance() and collect()


def launch_ahead(scheduler: Scheduler) -> Step:
    """What LLMEngine does with a step ahead of the one in flight."""
    return scheduler.schedule()


def test_a_step_can_be_scheduled_before_the_tokens_of_the_last_one_are_read():
    scheduler = make_scheduler()
    a, b = add(scheduler, 3), add(scheduler, 4)
    first = launch_ahead(scheduler)
    scheduler.advance(first)
    second = launch_ahead(scheduler)
    assert (second.seqs, second.is_prefill) == ([a, b], False)
    assert [seq.pending_row for seq in second.seqs] == [0, 1]
    assert scheduler.record(first, [901, 902]) == []
    scheduler.advance(second)
    assert scheduler.record(second, [903, 904]) == []
    assert (a.completion_token_ids, b.completion_token_ids) == ([901, 903], [902, 904])
    check_scheduler(scheduler)


def test_the_surplus_token_after_an_end_of_sequence_is_dropped():
    scheduler = make_scheduler()
    a, b = add(scheduler, 3), add(scheduler, 4)
    first = launch_ahead(scheduler)
    scheduler.advance(first)
    second = launch_ahead(scheduler)
    assert scheduler.record(first, [EOS, 902]) == [a]
    assert a.block_table == []
    scheduler.advance(second)
    third = launch_ahead(scheduler)
    assert third.seqs == [b]
    assert scheduler.record(second, [999, 904]) == []
    assert (a.completion_token_ids, a.completion.finish_reason) == ([EOS], "stop")
    assert b.completion_token_ids == [902, 904]


def test_an_end_by_length_is_known_before_the_token_is():
    scheduler = make_scheduler()
    a, b = add(scheduler, 3, max_tokens=2), add(scheduler, 4)
    step(scheduler)
    second = launch_ahead(scheduler)
    scheduler.advance(second)
    assert a.block_table == []
    assert launch_ahead(scheduler).seqs == [b]
    assert scheduler.record(second, [901, 902]) == [a]
    assert (a.completion_token_ids, a.completion.finish_reason) == ([900, 901], "length")


def test_an_end_of_sequence_at_the_last_token_is_a_stop_also_when_overlapped():
    scheduler = make_scheduler()
    seq = add(scheduler, 3, max_tokens=1)
    last = launch_ahead(scheduler)
    scheduler.advance(last)
    assert scheduler.is_finished()
    assert scheduler.record(last, [EOS]) == [seq]
    assert seq.completion.finish_reason == "stop"


@pytest.mark.parametrize("token", [EOS, 907])
def test_a_sequence_preempted_while_its_token_is_sampled(token):
    scheduler = make_scheduler(num_blocks=3)
    a, b = add(scheduler, 6), add(scheduler, 3)
    step(scheduler, 901)
    second = launch_ahead(scheduler)
    scheduler.advance(second)
    # b's fifth token, which nobody knows yet, opens a block, and there is none.
    third = launch_ahead(scheduler)
    assert (third.seqs, list(scheduler.waiting)) == ([a], [b])
    finished = scheduler.record(second, [902, token])
    scheduler.advance(third)
    check_scheduler(scheduler)
    assert b.completion_token_ids == [901, token]
    if token == EOS:
        assert (finished, b.completion.finish_reason, list(scheduler.waiting)) == ([b], "stop", [])
    else:
        assert (finished, b.completion.finish_reason, list(scheduler.waiting)) == ([], None, [b])


@pytest.mark.parametrize("preempted", [False, True])
def test_a_sequence_stopped_by_its_text_while_the_next_step_flies(preempted):
    scheduler = make_scheduler(num_blocks=3 if preempted else 100)
    a, b = add(scheduler, 6), add(scheduler, 3)
    step(scheduler, 901)
    second = launch_ahead(scheduler)
    scheduler.advance(second)
    third = launch_ahead(scheduler)
    assert list(scheduler.waiting) == ([b] if preempted else [])
    assert scheduler.record(second, [902, 903]) == []
    scheduler.stop([b])
    assert (b.completion.finish_reason, b.block_table, b.completion_token_ids) == ("stop", [], [901, 903])
    scheduler.advance(third)
    check_scheduler(scheduler)
    assert launch_ahead(scheduler).seqs == [a]
    assert scheduler.record(third, [904, 999][: len(third.seqs)]) == []
    assert b.completion_token_ids == [901, 903]
    assert a.completion_token_ids[:3] == [901, 902, 904]


# Abort


def test_abort_drops_the_token_that_is_being_sampled():
    scheduler = make_scheduler()
    a, b = add(scheduler, 3), add(scheduler, 4)
    first = launch_ahead(scheduler)
    scheduler.advance(first)
    second = launch_ahead(scheduler)
    scheduler.record(first, [901, 902])
    scheduler.advance(second)
    assert scheduler.abort([a.request.request_id]) == [a]
    assert launch_ahead(scheduler).seqs == [b]
    assert scheduler.record(second, [EOS, 904]) == []
    assert (a.completion_token_ids, a.completion.finish_reason) == ([901], "abort")
    assert b.completion_token_ids == [902, 904]
    assert scheduler.num_generated_tokens == 3


def test_abort_drops_sequences_in_every_state_and_frees_their_blocks():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    running, stays = add(scheduler, 4), add(scheduler, 4)
    step(scheduler)
    in_chunks, waiting, last = add(scheduler, 25), add(scheduler, 4), add(scheduler, 4)
    step(scheduler)
    assert in_chunks.block_table
    scheduler.abort([seq.request.request_id for seq in (running, in_chunks, waiting)])
    for seq in (running, in_chunks, waiting):
        assert (seq.status, seq.completion.finish_reason, seq.block_table) == (SequenceStatus.FINISHED, "abort", [])
    assert [seq.num_tokens for seq in (running, in_chunks, waiting)] == [5, 25, 4], "no token is lost"
    assert (list(scheduler.waiting), list(scheduler.running)) == ([last], [stays])
    check_scheduler(scheduler)
    assert step(scheduler)[0] == [last]
    scheduler.abort(seq.request.request_id for seq in (stays, last))
    assert scheduler.is_finished()
    assert not scheduler.block_manager.used_block_ids


def test_abort_between_schedule_and_postprocess_leaves_nothing_behind():
    """What an exception or Ctrl-C in the middle of a step comes to."""
    scheduler = make_scheduler()
    seqs = [add(scheduler, 6) for _ in range(3)]
    scheduler.schedule()
    scheduler.abort(seq.request.request_id for seq in seqs)
    check_scheduler(scheduler)
    assert scheduler.is_finished()
    # Nothing of the step was computed, so that nothing of it may be found.
    again = add(scheduler, seqs[0].token_ids)
    scheduler.schedule()
    assert again.num_cached_tokens == 0


def test_abort_of_unknown_ids_does_nothing():
    scheduler = make_scheduler()
    seq = add(scheduler, 3)
    scheduler.abort([seq.request.request_id + 1])
    assert list(scheduler.waiting) == [seq]
    assert seq.completion.finish_reason is None


# Errors


def assert_failed(seq: Sequence, completion: list[int]) -> None:
    assert (seq.status, seq.completion.finish_reason, seq.completion.stop_reason) == (
        SequenceStatus.FINISHED,
        "error",
        None,
    )
    assert (seq.completion_token_ids, seq.last_token, seq.block_table) == (completion, seq.last_token, [])
    assert "NaN" in seq.completion.error


@pytest.mark.parametrize("params", [{}, {"ignore_eos": True}, {"stop_token_ids": [905]}, {"max_tokens": 2}])
def test_a_row_without_a_token_ends_its_sequence_as_an_error(params):
    """Also where it would have been the last token anyway."""
    scheduler = make_scheduler()
    bad, good = add(scheduler, 3, **params), add(scheduler, 4)
    step(scheduler)
    seqs, _ = scheduler.schedule()
    assert postprocess(scheduler, seqs, [NON_FINITE, 901]) == [bad]
    check_scheduler(scheduler)
    assert_failed(bad, [900])
    assert f"position {bad.num_tokens} " in bad.completion.error
    assert (good.completion_token_ids, good.completion.error) == ([900, 901], None)
    assert scheduler.num_generated_tokens == 3
    assert list(scheduler.running) == [good]


def test_an_error_that_comes_to_light_a_step_late():
    scheduler = make_scheduler()
    a, b = add(scheduler, 3), add(scheduler, 4)
    first = launch_ahead(scheduler)
    scheduler.advance(first)
    second = launch_ahead(scheduler)
    assert scheduler.record(first, [NON_FINITE, 902]) == [a]
    scheduler.advance(second)
    assert launch_ahead(scheduler).seqs == [b]
    assert scheduler.record(second, [NON_FINITE, 904]) == []
    assert_failed(a, [])
    assert b.completion_token_ids == [902, 904]
    assert scheduler.num_generated_tokens == 2


@pytest.mark.parametrize("max_tokens", [1, 100])
def test_blocks_of_an_error_are_found_by_nobody(max_tokens):
    """But those that another sequence has too are."""
    scheduler = make_scheduler(20)
    shared = list(range(SIZE))
    holder = add(scheduler, [*shared, 1])
    step(scheduler)
    prompt = [*shared, *range(50, 50 + 2 * SIZE), 2]
    bad = add(scheduler, prompt, max_tokens)
    seqs, _ = scheduler.schedule()
    assert (seqs, bad.num_cached_tokens) == ([bad], SIZE)
    postprocess(scheduler, seqs, [NON_FINITE])
    check_scheduler(scheduler)
    again = add(scheduler, prompt)
    scheduler.schedule()
    assert again.num_cached_tokens == SIZE
    assert not holder.is_finished


def test_a_warning_is_logged_once(caplog):
    scheduler = make_scheduler()
    for _ in range(3):
        add(scheduler, 3)
        step(scheduler, NON_FINITE)
        scheduler.reset()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_stop_string_in_a_last_token_is_seen_though_others_have_come_since():
    """Its length has ended it before its last token is known, and then nothing is left to schedule."""
    scheduler = make_scheduler()
    read = []
    stops = add(scheduler, 3, max_tokens=1)
    stops.completion.text_stream = SimpleNamespace(read=lambda seq: read.append(seq.completion_token_ids) or True)
    scheduler.waiting.clear()
    scheduler.add(stops)
    in_flight = scheduler.schedule()
    scheduler.advance(in_flight)
    assert scheduler.is_finished()
    add(scheduler, 3)
    assert scheduler.record(in_flight, [900]) == [stops]
    assert read == [[900]]
