"""Layers with a window that give blocks back: the tokens are those of transformers, whatever else goes on."""

import math
import pickle
from contextlib import contextmanager

import pytest
from checkpoints import (
    VOCAB_SIZE,
    Reference,
    assert_idle,
    complete,
    generate,
    greedy,
    make_checkpoint,
    make_llm,
    needs_family,
    random_prompt,
)
from invariants import check_scheduler
from thread_ranks import make_llm_of_ranks

from nanovllm import SamplingParams
from nanovllm.engine.features.speculation import speculative_scheduler
from nanovllm.engine.features.speculation.suffix_index import SuffixProposer
from nanovllm.engine.features.windows.window_blocks import WindowBlocks
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.start.schedulers import make_scheduler
from nanovllm.layers.stores.store import StoreLimits, count_blocks, total_bytes
from nanovllm.layers.stores.window_split import WindowSplit, num_blocks_before
from nanovllm.layers.stores.windowed_kv_cache import WindowedKVCache

NUM_TOKENS = 24
LENGTHS = 120, 40, 9, 9, 9
BEGINNING = random_prompt(70, 99)  # four blocks of 16 and a little
SHAPE = {"num_hidden_layers": 3, "max_position_embeddings": 512, "head_dim": 32}
# Layers of both kinds, layers with a window alone, and sinks.
FAMILIES = {
    "gemma3_text": {"sliding_window": 21, "sliding_window_pattern": 2},
    "mistral": {"sliding_window": 33},
    "gpt_oss": {
        "sliding_window": 13,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
}


class Case:
    """A checkpoint, prompts, and transformers' completions of them."""

    def __init__(self, path, family: str):
        self.path = make_checkpoint(path, family, **SHAPE, **FAMILIES[family])
        self.reference = Reference(self.path)
        self.prompts = self.reference.draw_prompts(LENGTHS, NUM_TOKENS)
        self.prompts += self.reference.draw_prompts((len(BEGINNING) + 9,) * 2, NUM_TOKENS, 1, prefix=BEGINNING)
        self.completions = self.reference.greedy(self.prompts, NUM_TOKENS)

    def assert_equal(self, llm) -> None:
        assert complete(llm, self.prompts, greedy(NUM_TOKENS)) == self.completions


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    return Case(tmp_path_factory.mktemp("gemma3"), "gemma3_text")


@pytest.fixture(scope="module", params=[pytest.param(name, marks=needs_family(name)) for name in FAMILIES])
def any_case(request, case, tmp_path_factory):
    return case if request.param == "gemma3_text" else Case(tmp_path_factory.mktemp(request.param), request.param)


@contextmanager
def windowed_llm(path, **options):
    """An engine whose bookkeeping is checked after each step, and whose blocks that nobody owns hold NaN then."""
    with make_llm(path, **{"max_model_len": 512} | options) as llm:
        cells, step = llm.scheduler.block_manager.cells, llm._step
        assert isinstance(cells, WindowBlocks)
        cache = next(store for store in llm.model_runner.stores if isinstance(store, WindowedKVCache))

        def checked_step():
            result = step()
            check_scheduler_in_flight(llm.scheduler)
            findable = set(cells.known.values())
            unowned = [i for i in cells.free_block_ids if i not in findable]
            for tensor in cache.tensors:
                tensor[:, :, unowned] = float("nan")
            return result

        llm._step = checked_step
        yield llm
        assert_idle(llm)


def check_scheduler_in_flight(scheduler) -> None:
    if not any(seq.pending_row >= 0 for seq in scheduler.running):
        check_scheduler(scheduler)


def held_blocks(llm) -> list[int]:
    """Of each sequence that runs."""
    return [len(seq.cell.held) for seq in llm.scheduler.running]


def test_tokens_are_those_of_transformers(any_case):
    """Also in chunks, with preemptions, and from the cache."""
    with windowed_llm(any_case.path, max_num_batched_tokens=48, num_kvcache_blocks=26) as llm:
        any_case.assert_equal(llm)
        assert llm.scheduler.num_preemptions > 0
        any_case.assert_equal(llm)
        llm.reset_prefix_cache()
        any_case.assert_equal(llm)


def test_mixed_steps_and_the_deterministic_back_end(case):
    with windowed_llm(case.path, mixed_step_rows=16, deterministic=True) as llm:
        queued, *others = [llm.add_request(prompt, greedy(NUM_TOKENS)) for prompt in case.prompts[:1]]
        finished, mixed = {}, 0
        for prompt in case.prompts[1:]:
            llm.step()
            others.append(llm.add_request(prompt, greedy(NUM_TOKENS)))
        while not llm.is_finished():
            finished |= dict(llm.step()[0])
            mixed += sum(seq.is_prefill for seq in llm.scheduler.running)
        assert [finished[i] for i in (queued, *others)] == case.completions


def test_speculation(case, monkeypatch):
    """All that is proposed is tried, and the last proposed token is always wrong: it has to be taken back."""
    propose = SuffixProposer.propose

    def propose_a_wrong_end(*args):
        proposal = propose(*args)
        if proposal is None:
            return None
        *right, last = proposal.tokens
        return proposal._replace(tokens=[*right, (last + 1) % VOCAB_SIZE])

    monkeypatch.setattr(SuffixProposer, "propose", propose_a_wrong_end)
    monkeypatch.setattr(speculative_scheduler, "_MAX_LOOKING_SHARE", math.inf)
    monkeypatch.setattr(speculative_scheduler, "choose_counts", lambda chances, *_: [len(each) for each in chances])
    with windowed_llm(case.path, speculation="suffix", num_kvcache_blocks=40) as llm:
        case.assert_equal(llm)
        case.assert_equal(llm)  # Now it knows what may follow.
        assert llm.scheduler.num_accepted_tokens > 50
        assert llm.scheduler.num_proposed_tokens > llm.scheduler.num_accepted_tokens


def test_samples_of_one_prompt_and_their_twin(case, monkeypatch):
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, n=3, seed=5, ignore_eos=True, prompt_logprobs=0)
    with windowed_llm(case.path) as llm:
        found = generate(llm, case.prompts, params)
    monkeypatch.setattr(WindowSplit, "gives_back", False)
    with make_llm(case.path, max_model_len=512) as llm:
        assert len(llm.model_runner.stores) == 1
        twin = generate(llm, case.prompts, params)
    assert tokens_of_samples(found) == tokens_of_samples(twin)


def tokens_of_samples(results) -> list[list[list[int]]]:
    return [[sample["token_ids"] for sample in result["samples"]] for result in results]


def test_a_sequence_keeps_its_window_and_its_end_gives_all_back(case):
    with windowed_llm(case.path, max_num_batched_tokens=64) as llm:
        llm.add_request(case.prompts[0], greedy(100))
        most = 0
        while not llm.is_finished():
            llm.step()
            most = max([most, *held_blocks(llm)])
        assert most == 1 + num_blocks_before(21, 16) == 3, "of 16 blocks"
        llm.add_request(case.prompts[0], greedy(100))
        for _ in range(5):
            llm.step()
        llm.abort_request()
        while not llm.is_finished():
            llm.step()
        llm.sleep()
        llm.wake_up()
        case.assert_equal(llm)


def test_a_prefix_is_a_hit_only_where_windows_still_hold_it(case):
    """Its blocks of the other layers are known all along."""
    prompt, others = case.prompts[-1], [random_prompt(90, seed) for seed in range(20)]
    with windowed_llm(case.path, num_kvcache_blocks=500, max_num_seqs=1, max_num_batched_tokens=128) as llm:
        assert llm.scheduler.block_manager.cells.num_blocks < 30

        def num_cached() -> int:
            (result,) = generate(llm, [prompt], greedy(NUM_TOKENS))
            assert result["token_ids"] == case.completions[-1]
            return result["num_cached_tokens"]

        assert [num_cached(), num_cached()] == [0, 64]
        complete(llm, others, greedy(1))
        manager = llm.scheduler.block_manager
        assert num_cached() == 0
        assert num_cached() == 64, "and it is known again"
        assert manager.cells.known


def test_two_ranks(case):
    with make_llm_of_ranks(case.path, 2, max_model_len=512, max_num_batched_tokens=48) as llm:
        case.assert_equal(llm)
        assert isinstance(llm.scheduler.block_manager.cells, WindowBlocks)


def test_a_loop_by_hand(case):
    with make_llm(case.path, max_model_len=512) as llm:
        runner, prompts = llm.model_runner, case.prompts[-2:]
        scheduler = make_scheduler(llm.config, runner)
        seqs = [Sequence(prompt, greedy(NUM_TOKENS)) for prompt in prompts]
        for seq in seqs:
            scheduler.add(seq)
        while not scheduler.is_finished():
            step_seqs, is_prefill = scheduler.schedule()
            token_ids = runner.call("run", pickle.loads(pickle.dumps(step_seqs)), is_prefill)  # as a worker gets them
            scheduler.postprocess(step_seqs, token_ids, is_prefill)
        assert [seq.completion_token_ids for seq in seqs] == case.completions[-2:]
        scheduler = Scheduler(llm.config)
        scheduler.add(Sequence(prompts[0], greedy(NUM_TOKENS)))
        with pytest.raises(ValueError, match=r"make_scheduler\(config, model_runner\)"):
            runner.call("run", *scheduler.schedule())


def test_a_sequence_fits_that_did_not(case, monkeypatch, caplog):
    options = {"max_model_len": 512, "num_kvcache_blocks": -1, "kvcache_gib": 400 * 1024 / 2**30, "max_num_seqs": 2}
    prompt = case.reference.draw_prompts((300,), NUM_TOKENS)
    with caplog.at_level("INFO", "nanovllm"), make_llm(case.path, **options) as llm:
        assert "with a window: 8 blocks; of a window of 21 tokens a sequence keeps 3 (48 tokens)" in caplog.text
        assert llm.scheduler.max_seq_len > 340
        caches = llm.model_runner.stores
        assert sum(tensor.nbytes for cache in caches for tensor in cache.tensors) <= 400 * 1024
        assert complete(llm, prompt, greedy(NUM_TOKENS)) == case.reference.greedy(prompt, NUM_TOKENS)
    monkeypatch.setattr(WindowSplit, "gives_back", False)
    with make_llm(case.path, **options) as llm:
        assert llm.scheduler.max_seq_len < 300


def test_the_split():
    """Of layers whose blocks take 1 byte, and of layers with a window of 1,024 whose blocks take 10."""
    limits = StoreLimits(max_model_len=8192, max_num_seqs=512, max_num_batched_tokens=16384)
    split = WindowSplit.of(1024, 256, 1, 10, limits)
    assert split.per_sequence == 5
    assert split.num_blocks(16 * 40) == 5 * 40, "as sequences of 4,096 tokens need them"
    assert [split.num_blocks(n) for n in (1, 4, 6, 16)] == [1, 4, 5, 5], "one that is alone fits"
    assert split.num_blocks(10**6) == 2 * (512 * 5 + 64)
    longer = WindowSplit.of(1024, 256, 1, 10, limits._replace(max_model_len=2**20))
    num_others = max(n for n in range(6000) if n + 10 * longer.num_blocks(n) <= 5500)
    assert longer.num_blocks(num_others) in (250, 251), "half of the 500 that both kinds would have"
    assert not WindowSplit.of(1024, 256, 1, 10, limits._replace(max_model_len=2048)).gives_back


class FakeStore:
    bytes_per_block = 3

    def num_bytes(self, num_blocks, num_cells):
        return 3 * num_blocks + num_cells


def test_blocks_that_fit():
    stores = [FakeStore(), FakeStore()]
    assert [count_blocks(stores, n, 1, 4) for n in (1, 2, 7, 8, 13, 14, 1000)] == [-1, 0, 0, 1, 1, 2, 4]
    assert total_bytes(stores, 2, 1) == 14
