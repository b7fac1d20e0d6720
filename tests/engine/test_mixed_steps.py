"""Mixed steps: which prompts are computed beside a decode step, and what becomes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from invariants import check_scheduler
from schedulers import SIZE, add, make_scheduler, postprocess, step

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step


def one_running(prompt: int = 4, max_tokens: int = 50, **options) -> tuple[Scheduler, Sequence]:
    scheduler = make_scheduler(**{"mixed_step_rows": 8} | options)
    seq = add(scheduler, prompt, max_tokens)
    assert step(scheduler)[:2] == ([seq], True)
    return scheduler, seq


def test_a_prompt_enters_in_the_rows_that_are_free():
    scheduler, running = one_running()
    prompt = add(scheduler, 17, 20)
    for cached, scheduled in ((0, 7), (7, 7), (14, 3)):
        assert prompt.num_cached_tokens == cached
        seqs, is_prefill = scheduler.schedule()
        assert (seqs, is_prefill) == ([running, prompt], False)
        assert [seq.num_scheduled_tokens for seq in seqs] == [1, scheduled]
        assert prompt.num_completion_tokens == 0
        postprocess(scheduler, seqs, [900, 901])
    assert prompt.completion_token_ids == [901]
    assert running.completion_token_ids == [900] * 4
    assert step(scheduler)[:2] == ([running, prompt], False)
    assert (scheduler.num_prompt_tokens, scheduler.num_generated_tokens) == (4 + 17, 7)


def test_several_prompts_enter_in_one_step_and_the_last_is_cut():
    scheduler, running = one_running()
    a, b, c = (add(scheduler, 3, 10) for _ in range(3))
    seqs, is_prefill = scheduler.schedule()
    assert (seqs, is_prefill) == ([running, a, b, c], False)
    assert [seq.num_scheduled_tokens for seq in seqs] == [1, 3, 3, 1]
    postprocess(scheduler, seqs, [900] * 4)
    assert list(scheduler.running) == [running, a, b]
    assert list(scheduler.waiting) == [c]


@pytest.mark.parametrize(
    ("max_tokens", "is_mixed"),
    [(46, True), (47, False)],  # two steps for the prompt, at whose end 48 or 49 tokens later the first one has ended
)
def test_only_a_prompt_that_makes_the_batch_no_longer(max_tokens, is_mixed):
    scheduler, running = one_running(max_tokens=49)
    prompt = add(scheduler, 14, max_tokens)
    seqs, is_prefill, _ = step(scheduler)
    assert (seqs, is_prefill) == (([running, prompt], False) if is_mixed else ([prompt], True))


def test_the_longest_sequence_that_the_engine_holds_counts_not_max_tokens():
    scheduler, _ = one_running(prompt=4, max_tokens=1000, max_model_len=40)
    prompt = add(scheduler, 32, 1000)  # has eight more tokens, and takes five steps
    assert step(scheduler)[0][-1] is prompt
    assert prompt.num_cached_tokens == 7
    scheduler, _ = one_running(prompt=30, max_tokens=1000, max_model_len=40)
    prompt = add(scheduler, 32, 1000)
    assert step(scheduler)[:2] == ([prompt], True)


@pytest.mark.parametrize(("num_tokens", "is_mixed"), [(2048, True), (2049, False)])
def test_prompts_of_which_attention_would_take_too_long_have_steps_of_their_own(num_tokens, is_mixed):
    sizes = {"max_model_len": 6000, "num_blocks": 2000, "mixed_step_rows": 40}
    scheduler, running = one_running(max_tokens=500, **sizes)
    prompt = add(scheduler, num_tokens, 10)
    seqs, is_prefill, _ = step(scheduler)
    assert (seqs, is_prefill) == (([running, prompt], False) if is_mixed else ([prompt], True))


def test_the_batch_is_filled_first_where_not_all_that_wait_find_a_place_in_it():
    scheduler, running = one_running(max_num_seqs=4)
    prompts = [add(scheduler, 3, 10) for _ in range(4)]
    assert step(scheduler)[:2] == (prompts, True)
    scheduler, running = one_running(max_num_seqs=4)
    prompts = [add(scheduler, 3, 10) for _ in range(3)]
    assert step(scheduler)[:2] == ([running, *prompts], False)


def test_no_more_sequences_than_a_step_holds():
    scheduler, running = one_running(max_num_seqs=3)
    prompts = [add(scheduler, 2, 10) for _ in range(2)]
    assert step(scheduler)[0] == [running, *prompts]
    late = add(scheduler, 2, 5)
    assert step(scheduler)[:2] == ([running, *prompts], False)
    assert list(scheduler.waiting) == [late]


def test_a_full_decode_step_takes_nothing_along():
    scheduler = make_scheduler(mixed_step_rows=8, max_num_seqs=16)
    seqs = [add(scheduler, 1, 40) for _ in range(8)]
    assert step(scheduler)[:2] == (seqs, True)
    late = add(scheduler, 5, 3)
    assert step(scheduler)[:2] == ([late], True)


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 30)), min_size=1, max_size=12),
    st.integers(2, 16),
)
def test_the_batch_takes_no_decode_step_more(requests, num_rows):
    """Longest first, as generate queues them: whoever rests ends with the longest at the latest."""
    steps = []
    for rows in (0, num_rows):
        scheduler = make_scheduler(num_blocks=400, max_num_seqs=16, mixed_step_rows=rows)
        seqs = [add(scheduler, *request) for request in sorted(requests, key=lambda each: -each[1])]
        steps.append(0)
        while not scheduler.is_finished():
            _, is_prefill, _ = step(scheduler)
            steps[-1] += not is_prefill
        assert [seq.num_completion_tokens for seq in seqs] == [seq.max_tokens for seq in seqs]
    assert steps[0] == steps[1] == seqs[0].max_tokens - 1


def test_what_is_left_of_a_prompt_goes_on_in_a_prefill_step_where_nothing_runs():
    scheduler, running = one_running()
    prompt = add(scheduler, 17, 20)
    step(scheduler)
    scheduler.abort([running.request.request_id])
    assert step(scheduler)[:2] == ([prompt], True)
    assert prompt.num_cached_tokens == 17


def test_no_prompt_whose_own_log_probabilities_are_wanted_behind_the_first_one_too():
    scheduler, running = one_running()
    first, asks = add(scheduler, 2, 10), add(scheduler, 2, 10, prompt_logprobs=1)
    assert step(scheduler)[:2] == ([running, first], False)
    assert step(scheduler)[:2] == ([asks], True)


def test_only_prompts_that_make_the_batch_no_longer_behind_the_first_one_too():
    scheduler, running = one_running(max_tokens=50)
    first, longest = add(scheduler, 2, 10), add(scheduler, 2, 60)
    assert step(scheduler)[:2] == ([running, first], False)
    assert step(scheduler)[:2] == ([longest], True)


def test_no_prompt_whose_own_log_probabilities_are_wanted():
    scheduler, running = one_running()
    asks = add(scheduler, 3, 10, prompt_logprobs=1)
    assert step(scheduler)[:2] == ([asks], True)
    prompt = add(scheduler, 3, 5, logprobs=1)
    assert step(scheduler)[:2] == ([running, asks, prompt], False), "those of tokens that are sampled do no harm"


def test_a_prompt_that_is_under_way_gives_its_blocks_to_those_that_run():
    scheduler, running = one_running(prompt=4 * SIZE, max_tokens=24, num_blocks=10, mixed_step_rows=2)
    prompt = add(scheduler, 4 * SIZE, 2)
    while not scheduler.num_preemptions:
        assert step(scheduler)[0][0] is running
        assert prompt.num_completion_tokens == 0
    # Six of ten blocks, and the prompt has the others, though not all of its tokens.
    assert running.num_cached_tokens == 6 * SIZE + 1
    assert (prompt.block_table, prompt.num_cached_tokens) == ([], 0)
    assert list(scheduler.waiting) == [prompt]
    while not scheduler.is_finished():
        step(scheduler)
    assert (running.num_completion_tokens, prompt.num_completion_tokens) == (24, 2)


@pytest.mark.parametrize("num_blocks", [6, 7, 8])
def test_nothing_begins_in_the_step_that_preempts(num_blocks):
    """A twin has its blocks again at once, by their hashes, but its last token is still being sampled."""
    scheduler = make_scheduler(num_blocks=num_blocks, mixed_step_rows=8)
    prompt = list(range(500, 508))
    seqs = [add(scheduler, prompt, 30), add(scheduler, prompt, 10), add(scheduler, 4 * num_blocks - 6, 1)]
    flying = Step([], is_prefill=False)
    while not scheduler.is_finished():
        launched = scheduler.schedule()
        assert all(seq.pending_row < 0 for seq in launched.seqs if seq.is_prefill)
        scheduler.record(flying, [900] * len(flying.seqs))
        scheduler.advance(launched)
        flying = launched
        check_scheduler(scheduler)
    assert scheduler.num_preemptions
    assert [seq.num_completion_tokens for seq in seqs] == [min(30, scheduler.max_seq_len - 8), 10, 1]
