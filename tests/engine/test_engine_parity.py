"""One model in any batch, chunked, cached, preempted or seeded: the output of transformers, or of a request alone."""

import random
from dataclasses import replace

import pytest
from checkpoints import (
    VOCAB_SIZE,
    Reference,
    assert_idle,
    complete,
    complete_by_steps,
    greedy,
    make_checkpoint,
    make_llm,
    random_prompt,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.inputs import DecodeInputs


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(checkpoint, its Reference) of one configuration, for what the engine does with it."""
    path = make_checkpoint(tmp_path_factory.mktemp("base"), num_key_value_heads=1)
    return path, Reference(path)


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
def test_batches_in_any_order_and_again_from_the_cache(base, block_size, caching):
    path, reference = base
    head = random_prompt(2 * block_size, seed=7)
    shared = reference.draw_prompts((2 * block_size + 1, 2 * block_size + 9, 3 * block_size), 12, prefix=head)
    # Whole prompts of full blocks, and a shorter beginning of the others.
    prompts = [*reference.draw_prompts((3, 50), 12), *shared, shared[2][: block_size + 5]]
    expected = reference.greedy(prompts, 12)
    assert reference.generate(prompts[-1], 12)[1] > 1e-4, "draw another seed"
    order = random.Random(0).sample(range(len(prompts)), len(prompts))
    with make_llm(path, kvcache_block_size=block_size, enable_prefix_caching=caching, num_kvcache_blocks=40) as llm:
        first = llm.generate(prompts, greedy(12), use_tqdm=False)
        assert [output["token_ids"] for output in first] == expected
        again = llm.generate([prompts[i] for i in order], greedy(12), use_tqdm=False)
        assert [output["token_ids"] for output in again] == [expected[i] for i in order]
        # All full blocks but that of the last token, which has to be computed for its logits.
        cached = [(len(prompts[i]) - 1) // block_size * block_size if caching else 0 for i in order]
        assert [output["num_cached_tokens"] for output in again] == cached
        assert_idle(llm)


def test_hash_collisions_cost_nothing_but_hits(base, monkeypatch):
    path, reference = base
    monkeypatch.setattr(BlockManager, "compute_hash", staticmethod(lambda token_ids, prefix=-1: 7))
    prompts = reference.draw_prompts((40, 50, 60), 12)
    with make_llm(path) as llm:
        for _ in range(2):
            assert complete(llm, prompts, greedy(12)) == reference.greedy(prompts, 12)


def test_blocks_of_completions_are_found_by_the_next_turn(base):
    path, reference = base
    (prompt,) = reference.draw_prompts((30,), 40)
    (answer,) = reference.greedy([prompt], 40)
    with make_llm(path) as llm:
        assert complete(llm, [prompt], greedy(40)) == [answer]
        (next_turn,) = reference.draw_prompts((80,), 8, prefix=prompt + answer)
        (output,) = llm.generate([next_turn], greedy(8), use_tqdm=False)
    assert output["token_ids"] == reference.greedy([next_turn], 8)[0]
    # 30 + 40 tokens, of which the last was never fed to the model: 4 full blocks.
    assert output["num_cached_tokens"] == 64


def test_rows_that_pad_a_batch_touch_nothing(base, monkeypatch):
    """With steps padded as to a graph's size: tokens and log-probabilities, and what the cache is left with."""
    path, reference = base
    prompts = reference.draw_prompts((3, 50, 7, 31, 12), 12)
    expected = reference.greedy(prompts, 12)
    params = [greedy(12) if i % 2 else replace(greedy(12), logprobs=2) for i in range(len(prompts))]
    with make_llm(path) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    write, num_padding = DecodeInputs.write, set()

    def padded(self, step, rows, num_rows):
        num_padding.add(-num_rows % 4)
        write(self, step, rows, num_rows + -num_rows % 4)

    monkeypatch.setattr(DecodeInputs, "write", padded)
    with make_llm(path) as llm:
        for _ in range(2):  # and from the cache
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output["token_ids"] for output in outputs] == expected
            for i in (0, 2, 4):
                for found, known in zip(outputs[i]["logprobs"], plain[i]["logprobs"], strict=True):
                    assert found == pytest.approx(known, abs=1e-4)
        assert complete(llm, prompts[:3], greedy(12)) == expected[:3]
        assert num_padding >= {1, 3}
        assert_idle(llm)


def test_chunked_prefill(base):
    path, reference = base
    prompts = reference.draw_prompts((150, 31, 32, 33, 1, 70), 10)
    with make_llm(path, max_num_batched_tokens=32, enable_prefix_caching=False) as llm:
        tokens, num_tokens = complete_by_steps(llm, prompts, greedy(10))
    assert tokens == reference.greedy(prompts, 10)
    prefills = [num for num in num_tokens if num > 0]
    assert max(prefills) <= 32
    assert sum(prefills) == sum(map(len, prompts))


def test_chunked_prefill_of_a_prompt_whose_head_is_cached(base):
    path, reference = base
    head = random_prompt(48, seed=3)
    prompts = reference.draw_prompts((60, 150), 10, prefix=head)
    with make_llm(path, max_num_batched_tokens=32) as llm:
        complete(llm, prompts[:1], greedy(10))
        (tokens,), num_tokens = complete_by_steps(llm, prompts[1:], greedy(10))
    assert tokens == reference.greedy(prompts[1:], 10)[0]
    prefills = [num for num in num_tokens if num > 0]
    assert max(prefills) <= 32
    assert sum(prefills) == 150 - 48


@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "one-by-one"])
def test_prompts_beside_decode_steps(base, overlap):
    path, reference = base
    prompts = reference.draw_prompts((20, 45, 150, 31, 64, 7, 48), 60)
    params = [greedy(n) for n in (60, 50, 40, 20, 14, 9, 2)]
    with make_llm(path, mixed_step_rows=16, overlap_steps=overlap, max_num_batched_tokens=70) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        expected = reference.greedy(prompts, 60)
        for output, tokens, p in zip(outputs, expected, params, strict=True):
            assert output["token_ids"] == tokens[: p.max_tokens]
        # A prefill step for the first, and the others entered beside it, one after the other.
        metrics = [output["metrics"] for output in outputs]
        first_tokens = [m["time_to_first_token"] for m in metrics]
        assert first_tokens == sorted(first_tokens)
        assert all(m["queued"] < m["time_to_first_token"] for m in metrics)
        assert llm.stats()["steps"] <= 62
        assert_idle(llm)


def test_a_request_for_logprobs_among_prompts_beside_decode_steps(base):
    path, reference = base
    prompts = reference.draw_prompts((20, 3, 9, 35), 60)
    params = [greedy(60), greedy(40), replace(greedy(9), logprobs=1), greedy(20)]
    with make_llm(path, mixed_step_rows=16, max_num_batched_tokens=32) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert_idle(llm)
    for output, tokens, p in zip(outputs, reference.greedy(prompts, 60), params, strict=True):
        assert output["token_ids"] == tokens[: p.max_tokens]
        if p.logprobs:
            assert [next(iter(found)) for found in output["logprobs"]] == output["token_ids"]


@pytest.mark.parametrize("caching", [True, False], ids=["cache", "no-cache"])
def test_preemption_within_and_across_chunks(base, caching):
    path, reference = base
    prompts = reference.draw_prompts((20, 45, 16, 31, 64, 7, 48), 40)
    options = {"num_kvcache_blocks": 9, "max_num_batched_tokens": 24, "enable_prefix_caching": caching}
    with make_llm(path, **options) as llm:
        assert complete(llm, prompts, greedy(40)) == reference.greedy(prompts, 40)
        assert llm.scheduler.num_preemptions > 2
        assert_idle(llm)


def test_a_sequence_may_fill_the_whole_cache(base):
    path, reference = base
    prompts = reference.draw_prompts((60, 40), 36)
    with make_llm(path, num_kvcache_blocks=6) as llm:
        assert complete(llm, prompts, greedy(36)) == reference.greedy(prompts, 36)


def test_more_requests_than_a_step_holds(base):
    path, reference = base
    prompts = reference.draw_prompts((4, 20, 9, 33, 2, 17, 5), 12)
    params = [greedy(n) for n in (1, 12, 3, 7, 12, 2, 9)]
    with make_llm(path, max_num_seqs=2) as llm:
        outputs = complete(llm, prompts, params)
    assert outputs == [tokens[: p.max_tokens] for tokens, p in zip(reference.greedy(prompts, 12), params, strict=True)]


traffic = st.lists(
    st.tuples(
        st.integers(0, 3),  # which of four beginnings it shares
        st.integers(0, 60),  # how much of that
        st.integers(1, 30),  # own tokens
        st.integers(1, 24),  # max_tokens
        st.booleans(),  # ignore_eos
        st.sampled_from([None, None, 1]),  # logprobs
    ),
    min_size=1,
    max_size=8,
)


@settings(max_examples=15, derandomize=True)
@given(
    traffic=traffic,
    block_size=st.sampled_from([16, 32]),
    spare_blocks=st.integers(0, 6),
    max_num_batched_tokens=st.integers(3, 80),
    max_num_seqs=st.integers(1, 8),
    mixed_step_rows=st.sampled_from([0, 8, 40]),
    caching=st.booleans(),
    overlap=st.booleans(),
)
def test_any_traffic_on_any_engine(
    base, traffic, block_size, spare_blocks, max_num_batched_tokens, max_num_seqs, mixed_step_rows, caching, overlap
):
    path, reference = base
    eos = set(range(0, VOCAB_SIZE, 10))
    heads = [random_prompt(60, seed=i) for i in range(4)]
    prompts = [heads[h][:cut] + random_prompt(own, seed=i) for i, (h, cut, own, *_) in enumerate(traffic)]
    params = [SamplingParams(0, n, ignore_eos, logprobs=logprobs) for *_, n, ignore_eos, logprobs in traffic]
    longest = max(len(prompt) + p.max_tokens for prompt, p in zip(prompts, params, strict=True))
    options = {
        "kvcache_block_size": block_size,
        "num_kvcache_blocks": -(-longest // block_size) + spare_blocks,
        "max_num_batched_tokens": max_num_batched_tokens,
        "max_num_seqs": max_num_seqs,
        "mixed_step_rows": min(mixed_step_rows, max_num_batched_tokens),
        "enable_prefix_caching": caching,
        "overlap_steps": overlap,
    }
    with make_llm(path, eos=eos, **options) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            for prompt, p, output in zip(prompts, params, outputs, strict=True):
                tokens = output["token_ids"]
                # Greedy up to a tie that float32 cannot tell apart.
                assert reference.regret(prompt, tokens) < 1e-4
                ends = [] if p.ignore_eos else [i for i, token in enumerate(tokens) if token in eos]
                assert ends in ([], [len(tokens) - 1])
                assert output["finish_reason"] == ("stop" if ends else "length")
                assert ends or len(tokens) == p.max_tokens
            assert_idle(llm)


# The same request with the same seed gives the same tokens, whatever else is in the batch.
SAMPLED_PROMPTS = [random_prompt(length, seed=length) for length in (5, 33, 16, 50, 21, 40)]
SAMPLED_PARAMS = [SamplingParams(0.3 + 0.2 * i, 30, ignore_eos=True, seed=i) for i in range(6)]


@pytest.fixture(scope="module")
def sampled_alone(base):
    with make_llm(base[0]) as llm:
        return [complete(llm, [p], [s])[0] for p, s in zip(SAMPLED_PROMPTS, SAMPLED_PARAMS, strict=True)]


@pytest.mark.parametrize(
    ("options", "preempts"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 24}, False),
        ({"max_num_batched_tokens": 24, "mixed_step_rows": 20}, False),
        ({"num_kvcache_blocks": 7}, True),
        ({"num_kvcache_blocks": 7, "max_num_batched_tokens": 24, "enable_prefix_caching": False}, True),
    ],
    ids=["one-batch", "chunked", "mixed", "preempted", "preempted-chunked-no-cache"],
)
def test_seeded_requests_in_a_batch(base, sampled_alone, options, preempts):
    with make_llm(base[0], **options) as llm:
        assert complete(llm, SAMPLED_PROMPTS, SAMPLED_PARAMS) == sampled_alone
        assert preempts == (llm.scheduler.num_preemptions > 0)
        assert complete(llm, SAMPLED_PROMPTS[::-1], SAMPLED_PARAMS[::-1]) == sampled_alone[::-1]


def test_seeded_among_greedy_and_unseeded_requests(base, sampled_alone):
    path, reference = base
    others = reference.draw_prompts((8, 60), 20)
    params = [greedy(20), *SAMPLED_PARAMS, greedy(20), SamplingParams(1.5, 40, ignore_eos=True)]
    with make_llm(path) as llm:
        outputs = complete(llm, [others[0], *SAMPLED_PROMPTS, others[1], [1]], params)
    assert outputs[1:7] == sampled_alone
    assert [outputs[0], outputs[7]] == reference.greedy(others, 20)


def test_another_seed_draws_other_tokens(base):
    params = [SamplingParams(1.0, 20, ignore_eos=True, seed=seed) for seed in (0, 1, 2, 2**32, 2**63 - 1)]
    with make_llm(base[0]) as llm:
        outputs = complete(llm, SAMPLED_PROMPTS[:1] * len(params), params)
    assert len({tuple(tokens) for tokens in outputs}) == len(params)
    assert all(0 <= token < VOCAB_SIZE for tokens in outputs for token in tokens)
