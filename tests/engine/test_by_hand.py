"""nano-vLLM's loop, turned by hand: a Scheduler, a ModelRunner, and sequences of one's own."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from checkpoints import Reference, make_checkpoint

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.ranks.workers import Workers
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.utils.context import get_context, reset_context

LENGTHS = 20, 45, 7


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("by-hand"))


@pytest.fixture(scope="module")
def reference(path):
    return Reference(path)


@contextmanager
def parts(path, **options):
    """A Config, and a ModelRunner that is closed at the end."""
    defaults = {"device": "cpu", "skip_tokenizer_init": True, "kvcache_block_size": 16, "num_kvcache_blocks": 64}
    config = Config(str(path), **defaults | {"max_model_len": 128} | options)
    runner = ModelRunner(config, 0, Workers(config) if config.tensor_parallel_size > 1 else None)
    try:
        yield config, runner
    finally:
        runner.exit()


def run(config: Config, runner: ModelRunner, seqs: list[Sequence]) -> list[tuple[int, bool]]:
    """The loop. Returns of each step the number of sequences, and whether it was a prefill."""
    scheduler, steps = Scheduler(config), []
    for seq in seqs:
        scheduler.add(seq)
    while not scheduler.is_finished():
        step_seqs, is_prefill = scheduler.schedule()
        token_ids = runner.call("run", step_seqs, is_prefill)
        scheduler.postprocess(step_seqs, token_ids, is_prefill)
        steps.append((len(step_seqs), is_prefill))
    assert not scheduler.block_manager.used_block_ids
    return steps


def greedy(prompt: list[int], max_tokens: int = 12) -> Sequence:
    return Sequence(prompt, SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"plain": True}, {"max_num_batched_tokens": 16}, {"num_kvcache_blocks": 6, "plain": True}],
    ids=["fast", "plain", "chunks", "preempted"],
)
def test_the_loop_by_hand(path, reference, options):
    prompts = reference.draw_prompts(LENGTHS, 12)
    seqs = [greedy(prompt) for prompt in prompts]
    with parts(path, **options) as (config, runner):
        assert config.num_kvcache_blocks == runner.kv_cache.shape[2] == options.get("num_kvcache_blocks", 64)
        steps = run(config, runner, seqs)
    assert [seq.completion_token_ids for seq in seqs] == reference.greedy(prompts, 12)
    assert steps[0][1]
    assert all(seq.is_finished and seq.completion.finish_reason == "length" for seq in seqs)


def test_the_kv_cache_is_as_large_as_the_memory_allows(path):
    """Its number of blocks is not given, and the scheduler finds it in the Config."""
    with parts(path, num_kvcache_blocks=-1, kvcache_gib=0.01) as (config, runner):
        assert config.num_kvcache_blocks == runner.kv_cache.shape[2] > 0
        assert len(Scheduler(config).block_manager.blocks) == config.num_kvcache_blocks


@pytest.mark.parametrize("plain", [False, True])
def test_two_ranks_by_hand(path, reference, plain):
    """The workers get the sequences themselves, prefilled and decoding, and prepare the step as rank 0 does."""
    prompts = reference.draw_prompts(LENGTHS, 12)
    seqs = [greedy(prompt) for prompt in prompts]
    top_p = Sequence(prompts[0], SamplingParams(temperature=0.8, top_p=0.5, max_tokens=12, ignore_eos=True, seed=3))
    with parts(path) as (config, runner):
        alone = Sequence(prompts[0], top_p.request.params)
        run(config, runner, [alone])
    with parts(path, tensor_parallel_size=2, plain=plain) as (config, runner):
        assert runner.world_size == 2
        assert runner.shm is not None
        run(config, runner, [*seqs, top_p])
    assert [seq.completion_token_ids for seq in seqs] == reference.greedy(prompts, 12)
    assert top_p.completion_token_ids == alone.completion_token_ids


def test_logits_by_hand(path, reference):
    """prepare_prefill, prepare_decode and run_model, step by step."""
    prompts = reference.draw_prompts(LENGTHS, 3)
    seqs = [greedy(prompt, 3) for prompt in prompts]
    with parts(path) as (config, runner):
        scheduler = Scheduler(config)
        for seq in seqs:
            scheduler.add(seq)
        while not scheduler.is_finished():
            step_seqs, is_prefill = scheduler.schedule()
            prepare = runner.prepare_prefill if is_prefill else runner.prepare_decode
            input_ids, positions = prepare(step_seqs)
            assert input_ids.shape == positions.shape
            assert get_context().is_prefill == is_prefill
            logits = runner.run_model(input_ids, positions, is_prefill)
            reset_context()
            for seq, found in zip(step_seqs, logits, strict=True):
                completion = seq.completion_token_ids
                expected = reference.logits(seq.prompt_token_ids, [*completion, 0])[len(completion)]
                torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
            assert runner.prepare_sample(step_seqs).tolist() == [0.0] * len(step_seqs)
            tables = runner.prepare_block_tables(step_seqs)
            assert tables.shape == (len(step_seqs), max(len(seq.block_table) for seq in step_seqs))
            scheduler.postprocess(step_seqs, logits.argmax(-1).tolist(), is_prefill)
    assert [seq.completion_token_ids for seq in seqs] == reference.greedy(prompts, 3)


def test_sequences_without_a_seed_draw_apart(path):
    """Each has noise of its own, from torch's generator."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        seqs = [Sequence([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True)) for _ in range(4)]
    with parts(path) as (config, runner):
        run(config, runner, seqs)
    assert len({tuple(seq.completion_token_ids) for seq in seqs}) == 4


def test_engines_with_other_block_sizes_side_by_side(path, reference):
    """Whatever the class's default is, which a reader may set."""
    prompts = reference.draw_prompts(LENGTHS, 12)
    before = Sequence.block_size
    try:
        Sequence.block_size = 4
        with parts(path) as small, parts(path, kvcache_block_size=32) as large:
            for config, runner in (small, large, small):
                seqs = [greedy(prompt) for prompt in prompts]
                run(config, runner, seqs)
                assert [seq.completion_token_ids for seq in seqs] == reference.greedy(prompts, 12)
                assert {seq.block_size for seq in seqs} == {config.kvcache_block_size}
    finally:
        Sequence.block_size = before


def test_a_scheduler_needs_five_options():
    """Those of nano-vLLM. One end-of-sequence token is a number."""
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 64, "kvcache_block_size": 256, "num_kvcache_blocks": 4}
    scheduler = Scheduler(SimpleNamespace(**options, eos=9))
    seqs = [Sequence([1, 2, 3]) for _ in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    chosen, is_prefill = scheduler.schedule()
    assert (chosen, is_prefill) == (seqs[:2], True)
    assert scheduler.postprocess(chosen, [5, 9], is_prefill) == [seqs[1]]
    assert seqs[0].completion_token_ids == [5]


def test_blocks_by_hand(monkeypatch):
    monkeypatch.setattr(Sequence, "block_size", 4)
    manager = BlockManager(4, 4)
    assert [manager.free_block_ids[0], manager.free_block_ids[-1], len(manager.free_block_ids)] == [0, 3, 4]
    seq = Sequence(list(range(10)))
    assert manager.can_allocate(seq) == 0
    assert BlockManager(2, 4).can_allocate(seq) == -1
    manager.allocate(seq, 0)
    seq.num_scheduled_tokens = 8
    manager.hash_blocks(seq)
    assert seq.block(0) == manager.blocks[0].token_ids == [0, 1, 2, 3]
    other = Sequence([*range(8), 50])
    assert manager.can_allocate(other) == 2
    manager.allocate(other, 2)
    assert (other.block_table, other.num_cached_tokens) == ([0, 1, 3], 8)
    manager.deallocate(seq)
    assert list(manager.free_block_ids) == [2]
