"""Scheduler: random traffic, in which no one can tell from the tokens that there were others."""

import random
from collections import Counter
from functools import partial

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from invariants import FakeModel, check_scheduler, run_alone
from schedulers import EOS, SIZE, make_scheduler, postprocess

from nanovllm.engine.features.states.cells import Cells
from nanovllm.engine.features.windows.window_blocks import WindowBlocks
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import MIN_CHUNK_SHARE, Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.stores.window_split import num_blocks_before
from nanovllm.sampling_params import SamplingParams

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
    cells = scheduler.block_manager.cells
    bound = 10 + num_completions * (2 + scheduler.max_seq_len // scheduler.max_num_batched_tokens)
    bound *= 2 if isinstance(cells, Cells) else 1  # Chunks of prompts may be shorter.
    if isinstance(cells, WindowBlocks):  # As short as a block.
        bound = 10 + num_completions * (2 + scheduler.max_seq_len)
    flying: tuple[Step, list[int]] | None = None
    now = 0
    while arrivals or flying or not scheduler.is_finished():
        now += 1
        while arrivals and (arrivals[0][0] <= now or scheduler.is_finished()):
            scheduler.add(arrivals.pop(0)[1])
        queued = [*scheduler.running, *scheduler.waiting]
        if aborts and now in aborts and queued:
            scheduler.abort([queued[aborts[now] % len(queued)].request.request_id])
            check_scheduler(scheduler)
        launched = None
        if not scheduler.is_finished():
            launched = launch(scheduler, model, seen)
        if overlap:
            finished = scheduler.record(*flying) if flying else []
            if launched:
                scheduler.advance(launched[0])
            ended, flying = flying[0].seqs if flying else [], launched
        elif launched:
            finished = postprocess(scheduler, launched[0].seqs, launched[1])
            ended = launched[0].seqs
        else:
            finished = ended = []
        assert all(seq.is_finished and not seq.block_table and seq in ended for seq in finished)
        seen["finished"] += len(finished)
        check_scheduler(scheduler)
        model.cache.check_findable()
        if isinstance(cells, Cells):
            model.states.check_findable()
        if isinstance(cells, WindowBlocks):
            model.windows.check_findable(scheduler.block_manager)
            seen["gave back"] += any(seq.cell.num_passed > 0 for seq in scheduler.running)
        seen["several readers"] += any(block.ref_count > 1 for block in scheduler.block_manager.blocks)
        assert now <= bound, "no end in sight"
    assert len(scheduler.block_manager.free_block_ids) == len(scheduler.block_manager.blocks)
    seen["preempted"] += scheduler.num_preemptions
    seen["snapshot read"] += model.states.num_snapshots_read


def launch(scheduler: Scheduler, model: FakeModel, seen: Counter) -> tuple[Step, list[int]]:
    goes_on = bool(scheduler.waiting and scheduler.waiting[0].block_table)
    step = scheduler.schedule()
    seqs, is_prefill = step
    assert seqs, "empty-handed while work is left"
    assert len({seq.seq_id for seq in seqs}) == len(seqs) <= scheduler.max_num_seqs
    scheduled = [seq.num_scheduled_tokens for seq in seqs]
    assert min(scheduled) >= 1
    assert sum(scheduled) <= scheduler.max_num_batched_tokens or not is_prefill
    is_mixed = not is_prefill and seqs[-1].is_prefill
    assert sum(scheduled) <= scheduler.mixed_step_rows or not is_mixed
    prompts = [seq for seq in seqs if seq.is_prefill]
    assert not is_mixed or all(seq.request.params.prompt_logprobs is None for seq in prompts), "a prefill's alone"
    seen["mixed"] += is_mixed
    has_cells = isinstance(scheduler.block_manager.cells, (Cells, WindowBlocks))
    if (
        is_prefill
        and not has_cells
        and len(seqs) > 1
        and seqs[-1].num_cached_tokens + scheduled[-1] < seqs[-1].num_tokens
    ):
        assert scheduled[-1] >= scheduler.max_num_batched_tokens // MIN_CHUNK_SHARE
    seen["chunk"] += goes_on
    seen["decoded side by side"] += not is_prefill and len(seqs) > 1
    return step, model.run(seqs, is_prefill)


def check_outputs(scheduler: Scheduler, seqs: list[Sequence], seen: Counter) -> None:
    for seq in seqs:
        eos = () if seq.request.params.ignore_eos else scheduler.eos
        tokens, reason = run_alone(seq.prompt_token_ids, seq.max_tokens, eos, scheduler.max_seq_len, VOCAB_SIZE)
        if seq.completion.finish_reason == "abort":
            assert seq.completion_token_ids == tokens[: seq.num_completion_tokens]
            assert seq.num_completion_tokens < len(tokens)
        else:
            assert (seq.completion_token_ids, seq.completion.finish_reason) == (tokens, reason)
        seen["shared"] += seq.completion.num_shared_tokens > 0
        seen[seq.completion.finish_reason] += 1
    assert seen["finished"] == seen["stop"] + seen["length"], "each sequence is reported once"


@st.composite
def traffic(draw):
    """A small engine, and more requests than fit it at once."""
    block_size = draw(st.integers(1, 4))
    num_cells, chunk = draw(st.none() | st.integers(1, 24)), draw(st.sampled_from([1, 2, 4]))
    num_blocks = draw(st.integers(2, 12) | st.integers(16, 48))
    windows = None
    if num_cells is None and draw(st.booleans()):
        window = draw(st.integers(1, 16))
        windows = min(num_blocks, num_blocks_before(window, block_size) + draw(st.integers(1, 12))), window
    scheduler = make_scheduler(
        num_blocks,
        max_num_seqs=draw(st.integers(1, 6) | st.just(16)),
        max_num_batched_tokens=draw(st.integers(1, 30)),
        max_model_len=draw(st.integers(2, 60)),
        kvcache_block_size=block_size,
        eos=draw(st.sampled_from([(), (EOS,), (EOS, 4)])),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        mixed_step_rows=draw(st.sampled_from([0, 2, 5, 8, 12])),
        make_cells=None if num_cells is None else partial(Cells, num_cells, chunk),
        windows=windows,
    )
    beginnings = draw(st.lists(st.lists(st.integers(0, 1), max_size=12), min_size=1, max_size=2))
    arrivals = []
    for i in range(draw(st.integers(1, 8))):
        prompt = draw(st.sampled_from(beginnings)) + draw(st.lists(st.integers(0, 1), min_size=1, max_size=4))
        if arrivals and draw(st.integers(0, 3)) == 0:
            prompt = arrivals[-1][1].prompt_token_ids  # A twin's blocks outlive a preemption.
        prompt = prompt[: scheduler.max_seq_len - 1]
        logprobs = draw(st.sampled_from([None] * 7 + [1]))
        params = SamplingParams(max_tokens=draw(st.integers(1, 20)), ignore_eos=draw(st.booleans()), logprobs=logprobs)
        arrivals.append((draw(st.integers(0, 12)), Sequence(prompt, params, Request(params, i))))
    arrivals.sort(key=lambda arrival: arrival[0])
    return scheduler, arrivals


RARE = {
    "gave back",
    "snapshot read",
    "preempted",
    "chunk",
    "mixed",
    "shared",
    "several readers",
    "decoded side by side",
    "stop",
    "length",
}


def test_random_traffic_gives_everybody_the_tokens_it_gets_alone():
    seen = Counter()

    @settings(max_examples=300, print_blob=True)
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

    @settings(max_examples=300, print_blob=True)
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


@pytest.mark.parametrize("num_cells", [None, 8, 30, "windows"], ids=["", "few cells", "cells", "windows"])
@pytest.mark.parametrize(("max_num_seqs", "mixed_step_rows"), [(6, 0), (32, 12)], ids=["", "mixed"])
@pytest.mark.parametrize("overlap", [False, True], ids=["one by one", "overlapped"])
@pytest.mark.parametrize("seed", range(4))
def test_a_crowd_that_thrashes_a_small_cache(seed, overlap, max_num_seqs, mixed_step_rows, num_cells):
    """The same with a fixed crowd, so that preemption, chunks and sharing are there in numbers for certain."""
    rng = random.Random(seed)
    limits = {"max_num_seqs": max_num_seqs, "mixed_step_rows": mixed_step_rows}
    if num_cells == "windows":
        limits["windows"] = 9, 6
    elif num_cells is not None:
        limits["make_cells"] = partial(Cells, num_cells, SIZE)
    scheduler = make_scheduler(num_blocks=12, max_num_batched_tokens=12, **limits)
    beginnings = [[rng.randrange(VOCAB_SIZE) for _ in range(n)] for n in (10, 17)]
    arrivals = []
    for i in range(30):
        prompt = rng.choice(beginnings) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
        params = SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=rng.random() < 0.8)
        arrivals.append((i // 2, Sequence(prompt, params, Request(params, i))))
    seen = Counter()
    drive(scheduler, arrivals, seen, overlap=overlap)
    check_outputs(scheduler, [seq for _, seq in arrivals], seen)
    assert scheduler.num_preemptions >= 10
    assert (seen["snapshot read"] > 0) == (num_cells in (8, 30))
    assert (seen["gave back"] > 0) == (num_cells == "windows")
    assert seen["chunk"] >= (5 if mixed_step_rows or num_cells else 10)
    assert seen["shared"] >= 10
    assert seen["several readers"] >= 10
    assert (seen["mixed"] >= 5) == bool(mixed_step_rows)
