"""Embeddings are transformers' hidden states, whatever else is in the batch and however prompts are divided."""

import numpy as np
import pytest
from checkpoints import assert_idle, greedy, make_checkpoint, make_llm, random_prompt
from vector_checkpoints import TOLERANCE, VectorReference, make_pooling_checkpoint

from nanovllm import PoolingParams

POOLINGS = "last", "mean", "cls"
# Shorter and longer than a block of 16 tokens, and than a chunk of 24.
LENGTHS = 1, 5, 16, 24, 33, 70, 2, 48
PROMPTS = [random_prompt(length, seed=length) for length in LENGTHS]


@pytest.fixture(scope="module")
def reference(path):
    return VectorReference(path)


def vectors_of(outputs) -> list[np.ndarray]:
    assert all(each["embedding"].dtype == np.float32 for each in outputs)
    return [each["embedding"] for each in outputs]


def assert_equal(found, expected) -> None:
    for vector, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(vector, other, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 24}, {"overlap_steps": False}], ids=str)
def test_vectors_are_those_of_transformers(path, reference, pooling, options):
    with make_llm(path, **options) as llm:
        found = llm.embed(PROMPTS, pooling=pooling, normalize=False, use_tqdm=False)
        assert_equal(vectors_of(found), reference.vectors(PROMPTS, pooling))
        assert [each["num_prompt_tokens"] for each in found] == list(LENGTHS)
        assert_idle(llm)
        # Alone and in another order.
        again = llm.embed(PROMPTS[::-1], pooling=pooling, normalize=False, use_tqdm=False)[::-1]
        assert_equal(vectors_of(again), reference.vectors(PROMPTS, pooling))
        alone = llm.embed(PROMPTS[4], pooling=pooling, use_tqdm=False)[0]["embedding"]
        expected = reference.pooled(PROMPTS[4], pooling).numpy()
        np.testing.assert_allclose(alone, expected / np.linalg.norm(expected), atol=TOLERANCE)


def test_a_known_beginning_is_reused_by_the_last_token_alone(path, reference):
    head = random_prompt(40, seed=1)
    prompts = [head + random_prompt(length, seed=length) for length in (9, 30, 1)]
    with make_llm(path) as llm:
        llm.embed(head, pooling="mean", use_tqdm=False)  # fills the cache
        for pooling, num_cached in (("last", 32), ("mean", 0), ("cls", 0)):
            found = llm.embed(prompts, pooling=pooling, normalize=False, use_tqdm=False)
            assert_equal(vectors_of(found), reference.vectors(prompts, pooling))
            assert found[0]["num_cached_tokens"] == num_cached
        # And a completion may begin with what an embedding has computed.
        assert llm.generate([prompts[1]], greedy(3), use_tqdm=False)[0]["num_cached_tokens"] == 64
        assert_idle(llm)


def test_dimensions_are_cut_and_then_normalized(path, reference):
    with make_llm(path) as llm:
        found = llm.embed(PROMPTS, dimensions=8, use_tqdm=False)
        for each, whole in zip(vectors_of(found), reference.vectors(PROMPTS, "last"), strict=True):
            expected = whole[:8].numpy()
            assert each.shape == (8,)
            np.testing.assert_allclose(each, expected / np.linalg.norm(expected), atol=TOLERANCE)
        (plain,) = llm.embed(PROMPTS[:1], dimensions=64, normalize=False, use_tqdm=False)
        assert_equal([plain["embedding"]], reference.vectors(PROMPTS[:1], "last"))


@pytest.mark.parametrize("chunk", [24, 512])
def test_requests_for_vectors_and_for_tokens_share_steps(path, reference, chunk):
    with make_llm(path, max_num_batched_tokens=chunk) as llm:
        completions = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
        llm.reset_prefix_cache()
        before, ids = llm.stats(), {}
        for i, prompt in enumerate(PROMPTS):
            ids[llm.add_request(prompt, greedy(12))] = i, None
            for pooling in POOLINGS:
                ids[llm.add_request(prompt, PoolingParams(pooling, normalize=False))] = i, pooling
        tokens, ended = {}, 0
        while not llm.is_finished():
            for delta in llm.step_deltas():
                i, pooling = ids[delta["request_id"]]
                if pooling is None:
                    assert "output" not in delta
                    tokens.setdefault(i, []).extend(delta["token_ids"])
                    continue
                assert (delta["text"], delta["token_ids"], delta["finish_reason"]) == ("", [], "stop")
                assert_equal([delta["output"]["embedding"]], [reference.pooled(PROMPTS[i], pooling)])
                ended += 1
        assert ended == 3 * len(PROMPTS)
        assert [tokens[i] for i in range(len(PROMPTS))] == [each["token_ids"] for each in completions]
        assert llm.stats()["generated_tokens"] - before["generated_tokens"] == 12 * len(PROMPTS)
        assert_idle(llm)


def test_log_probabilities_beside_a_mean(path, reference):
    params = greedy(2, prompt_logprobs=1, logprobs=1)
    with make_llm(path) as llm:
        (expected,) = llm.generate([PROMPTS[4]], params, use_tqdm=False)
        llm.add_request(PROMPTS[5], PoolingParams("mean", normalize=False))
        llm.add_request(PROMPTS[4], params)
        llm.add_request(PROMPTS[3], PoolingParams("last", normalize=False))
        outputs, logprobs = {}, []
        while not llm.is_finished():
            for delta in llm.step_deltas():
                if "output" in delta:
                    outputs[len(outputs)] = delta["output"]["embedding"]
                else:
                    logprobs += delta["logprobs"]
        assert_equal(
            [outputs[0], outputs[1]], [reference.pooled(PROMPTS[5], "mean"), reference.pooled(PROMPTS[3], "last")]
        )
        for found, other in zip(logprobs, expected["logprobs"], strict=True):
            assert found == pytest.approx(other, abs=TOLERANCE)
        assert_idle(llm)


def test_an_iterator_takes_texts_lazily_and_keeps_their_order(path, reference):
    taken = []

    def prompts():
        for i in range(300):
            taken.append(i)
            yield PROMPTS[i % len(PROMPTS)]

    expected = reference.vectors(PROMPTS, "mean")
    with make_llm(path, max_num_seqs=4) as llm:
        found = llm.embed_iter(prompts(), pooling="mean", normalize=False, ordered=True)
        assert taken == []
        index, output = next(found)
        assert index == 0
        assert 0 < len(taken) < 100
        assert_equal([output["embedding"]], expected[:1])
        rest = list(found)
        assert [index for index, _ in rest] == list(range(1, 300))
        assert_equal([each["embedding"] for _, each in rest], [expected[i % len(expected)] for i, _ in rest])
        found = llm.embed_iter(prompts())
        next(found)
        found.close()  # The others are dropped.
        assert_idle(llm)


def test_an_aborted_request_has_no_vector_and_leaves_no_block(path):
    with make_llm(path, max_num_batched_tokens=16) as llm:
        request = llm.add_request(PROMPTS[5], PoolingParams("mean"))
        llm.step_deltas()
        assert llm.scheduler.block_manager.used_block_ids
        llm.abort_request(request)
        while not llm.is_finished():  # A step is in flight.
            assert llm.step_deltas() == []
        assert_idle(llm)
        assert len(llm.embed(PROMPTS, use_tqdm=False)) == len(PROMPTS)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_a_prompt_that_is_preempted_within_its_chunks_has_the_same_vector(path, reference, pooling):
    """Its sum begins anew: running sequences take the blocks of a prompt that is computed in chunks first."""
    with make_llm(path, max_num_batched_tokens=24, overlap_steps=False) as llm:
        llm.add_request(PROMPTS[5], PoolingParams(pooling, normalize=False))
        llm.step()
        seq = llm.scheduler.waiting.popleft()
        assert seq.num_cached_tokens > 0
        llm.scheduler.preempt(seq)
        outputs = []
        while not llm.is_finished():
            outputs += [delta["output"] for delta in llm.step_deltas()]
        assert_equal([outputs[0]["embedding"]], [reference.pooled(PROMPTS[5], pooling)])
        assert_idle(llm)


def test_speculation_goes_on_beside_vectors(path, reference):
    with make_llm(path, speculation="suffix") as llm:
        expected = [each["token_ids"] for each in llm.generate(PROMPTS, greedy(12), use_tqdm=False)]
        for prompt in PROMPTS:
            llm.add_request(prompt, greedy(12))
            llm.add_request(prompt, PoolingParams(normalize=False))
        found, vectors = {}, {}
        while not llm.is_finished():
            for delta in llm.step_deltas():
                if "output" in delta:
                    vectors[delta["request_id"]] = delta["output"]["embedding"]
                else:
                    found.setdefault(delta["request_id"], []).extend(delta["token_ids"])
        assert [found[key] for key in sorted(found)] == expected
        assert_equal([vectors[key] for key in sorted(vectors)], reference.vectors(PROMPTS, "last"))


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "llama",
        pytest.param("qwen3_5_text", marks=pytest.mark.nightly),
        pytest.param("granite", marks=pytest.mark.nightly),
    ],
)
def test_a_checkpoint_without_a_head_embeds_and_does_nothing_else(tmp_path, family):
    path = make_pooling_checkpoint(tmp_path, family)
    with make_llm(path, max_num_batched_tokens=24) as llm:
        assert llm.config.task == "embed"
        assert llm.model_runner.model.lm_head is None
        for pooling in POOLINGS:
            found = llm.embed(PROMPTS, pooling=pooling, normalize=False, use_tqdm=False)
            assert_equal(vectors_of(found), VectorReference(path).vectors(PROMPTS, pooling))
        says = r"this LLM does not generate, because its task is 'embed': it can embed\(\)$"
        for call in (lambda: llm.generate([[1, 2]]), lambda: llm.add_request([1, 2]), lambda: llm.score([[1]], [[2]])):
            with pytest.raises(ValueError, match=says):
                call()
        assert_idle(llm)


def test_an_embedding_engine_leaves_out_the_head(path, reference):
    with make_llm(path, task="embed") as llm, make_llm(path) as other:
        model = llm.model_runner.model
        assert model.lm_head is None
        assert sum(each.numel() for each in model.parameters()) < sum(
            each.numel() for each in other.model_runner.model.parameters()
        )
        assert_equal(
            vectors_of(llm.embed(PROMPTS, normalize=False, use_tqdm=False)), reference.vectors(PROMPTS, "last")
        )
        with pytest.raises(ValueError, match=r"LLM\(model, task='generate'\) generates"):
            llm.generate([[1, 2]])


@pytest.mark.nightly
def test_a_scale_of_the_logits_does_not_reach_vectors(tmp_path):
    """Granite's logits are divided by a number, which the final norm's weight has in our model."""
    path = make_checkpoint(tmp_path, "granite", logits_scaling=4.0)
    with make_llm(path) as llm:
        found = llm.embed(PROMPTS, normalize=False, use_tqdm=False)
        assert_equal(vectors_of(found), VectorReference(path).vectors(PROMPTS, "last"))
