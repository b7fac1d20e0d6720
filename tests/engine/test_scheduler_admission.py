"""Scheduler: when those who wait may begin."""

from random import Random

from schedulers import add, make_scheduler, postprocess, step

from nanovllm.engine.admission import RESERVED_SHARE


def test_a_step_holds_max_num_seqs_sequences_and_nobody_begins_while_so_many_run():
    scheduler = make_scheduler(max_num_seqs=3)
    seqs = [add(scheduler, 2, max_tokens=3) for _ in range(5)]
    assert step(scheduler)[:2] == (seqs[:3], True)
    assert step(scheduler)[:2] == (seqs[:3], False)
    assert step(scheduler)[2] == seqs[:3]
    assert step(scheduler)[:2] == (seqs[3:], True)
    assert step(scheduler)[:2] == (seqs[3:], False)
    assert step(scheduler)[2] == seqs[3:]
    assert scheduler.is_finished()


def test_one_place_that_gets_free_is_enough_for_a_whole_step_of_prompts():
    scheduler = make_scheduler(max_num_seqs=2)
    short, long = add(scheduler, 2, max_tokens=2), add(scheduler, 2, max_tokens=9)
    waiting = [add(scheduler, 2) for _ in range(2)]
    step(scheduler)
    assert step(scheduler)[2] == [short]
    assert step(scheduler)[:2] == (waiting, True)
    assert list(scheduler.running) == [long, *waiting]
    assert step(scheduler)[0] == [long, waiting[0]], "the eldest decode"


def test_the_cache_is_not_filled_to_the_last_block_while_others_run():
    """64 blocks, of which 4 are spare, and 8 are free before anybody begins."""
    assert RESERVED_SHARE == 16
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=1000)
    big = add(scheduler, 4 * 50 - 2, max_tokens=40)
    a, b, c = (add(scheduler, 4 * n - 1, max_tokens=m) for n, m in ((3, 2), (7, 4), (1, 9)))
    free = scheduler.block_manager.free_block_ids
    assert step(scheduler)[0] == [big, a, b]
    assert len(free) == 4, "one block less, and c begins as well"
    assert step(scheduler)[2] == [a]
    assert len(free) == 7
    assert step(scheduler)[:2] == ([big, b], False)
    assert step(scheduler)[2] == [b]
    assert step(scheduler)[:2] == ([c], True)


def test_alone_a_sequence_may_fill_the_cache():
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=1000)
    seq = add(scheduler, 4 * 64 - 2, max_tokens=9)
    assert step(scheduler)[:2] == ([seq], True)
    assert step(scheduler)[2] == [seq]
    assert seq.num_tokens == 4 * 64


def test_nothing_is_spare_in_a_cache_of_few_blocks():
    scheduler = make_scheduler(num_blocks=5)
    first, second = add(scheduler, 11), add(scheduler, 7)
    assert step(scheduler)[:2] == ([first, second], True)


def test_a_chunk_goes_on_while_nobody_may_begin():
    """Nobody else would get the blocks that it holds."""
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=10)
    first = add(scheduler, 2)
    step(scheduler)
    second, cut, last = add(scheduler, 2), add(scheduler, 20), add(scheduler, 2)
    assert step(scheduler)[0] == [second, cut]
    assert list(scheduler.running) == [first, second]
    assert step(scheduler)[:2] == ([cut], True)
    assert step(scheduler)[:2] == ([cut], True)
    assert list(scheduler.waiting) == [last], "the step had room for it"
    assert step(scheduler)[:2] == ([first, second], False)


def test_shared_blocks_take_no_room():
    """64 blocks, of which 4 are spare: 50 are shared, and of the other 14 ten are given away."""
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=1000, max_num_seqs=40)
    seqs = [add(scheduler, [1] * (4 * 50) + [2 + i], max_tokens=9) for i in range(30)]
    assert step(scheduler)[0] == seqs[:1]
    assert step(scheduler)[0] == seqs[1:10]
    assert len(scheduler.block_manager.free_block_ids) == 4
    assert step(scheduler)[:2] == (seqs[:10], False)


def test_no_more_is_spare_than_the_running_sequences_can_open():
    """The shared beginning takes 7 of 8 blocks, and whoever runs has the only block it will open."""
    scheduler = make_scheduler(num_blocks=32, max_num_batched_tokens=1000)
    seqs = [add(scheduler, [1] * (4 * 28) + [2 + i], max_tokens=3) for i in range(8)]
    assert step(scheduler)[0] == seqs[:1]
    assert step(scheduler)[:2] == (seqs[1:4], True)
    assert not scheduler.block_manager.free_block_ids
    assert step(scheduler)[:2] == (seqs[:4], False)


def test_a_queue_longer_than_what_runs_is_computed_once():
    """With room in the cache for twice what may run on average, nobody has to be preempted, however many wait."""
    rng = Random(0)
    scheduler = make_scheduler(num_blocks=200, max_num_seqs=10, max_num_batched_tokens=100, eos=())
    seqs = [add(scheduler, rng.randint(10, 30), max_tokens=rng.randint(5, 30)) for _ in range(150)]
    num_prompt_tokens = sum(seq.num_prompt_tokens for seq in seqs)
    prefilled = 0
    while not scheduler.is_finished():
        scheduled, is_prefill = scheduler.schedule()
        if is_prefill:
            prefilled += sum(seq.num_scheduled_tokens for seq in scheduled)
        postprocess(scheduler, scheduled, [900] * len(scheduled))
    assert scheduler.num_preemptions == 0
    assert prefilled == num_prompt_tokens
