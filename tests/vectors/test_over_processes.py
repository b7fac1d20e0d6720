"""Vectors over two ranks, and over two replicas."""

import numpy as np
import pytest
from checkpoints import EOS, assert_idle, greedy, make_checkpoint, make_llm, make_tokenizer, random_prompt
from thread_ranks import make_llm_of_ranks
from thread_replicas import ThreadReplicas
from vector_checkpoints import TOLERANCE, VectorReference, make_pooling_checkpoint, reference_logits

from nanovllm import PoolingParams
from nanovllm.engine.replicas import replicated_engine

POOLINGS = "last", "mean", "cls"
PROMPTS = [random_prompt(length, seed=length) for length in (1, 5, 16, 24, 33, 70, 2, 48)]
# Chunks of one and a half blocks.
CRAMPED = {"max_num_batched_tokens": 24}


def assert_embeds(llm, reference) -> None:
    for pooling in POOLINGS:
        found = llm.embed(PROMPTS, pooling=pooling, normalize=False, use_tqdm=False)
        for each, expected in zip(found, reference.vectors(PROMPTS, pooling), strict=True):
            np.testing.assert_allclose(each["embedding"], expected, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("make", "task"),
    [
        pytest.param(make_llm_of_ranks, "generate", id="threads"),
        pytest.param(make_llm_of_ranks, "embed", id="threads without a head"),
        pytest.param(make_llm, "embed", id="processes", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_embed_as_transformers_does(path, make, task):
    kind = {"num_ranks": 2} if make is make_llm_of_ranks else {"tensor_parallel_size": 2}
    with make(path, task=task, **CRAMPED, **kind) as llm:
        assert_embeds(llm, VectorReference(path))
        if task == "generate":
            (expected,) = llm.generate([PROMPTS[5]], greedy(6), use_tqdm=False)
            llm.add_request(PROMPTS[5], greedy(6))
            for pooling in POOLINGS:
                llm.add_request(PROMPTS[5], PoolingParams(pooling))
            tokens = []
            while not llm.is_finished():
                tokens += [token for delta in llm.step_deltas() for token in delta["token_ids"]]
            assert tokens == expected["token_ids"]
        assert_idle(llm)


def test_two_ranks_classify(tmp_path):
    path = make_pooling_checkpoint(tmp_path, "llama", num_labels=3, bias=True)
    with make_llm_of_ranks(path, num_ranks=2, **CRAMPED) as llm:
        found = llm.classify(PROMPTS, use_tqdm=False)
        for each, expected in zip(found, reference_logits(path, PROMPTS, bias=True), strict=True):
            np.testing.assert_allclose(each["logits"], expected, atol=TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_two_ranks_answer_yes_or_no(tmp_path, tied):
    """Each has a part of the vocabulary."""
    path = make_checkpoint(tmp_path, tie_word_embeddings=tied)
    make_tokenizer(path, ("<|endoftext|>", EOS, "<|im_start|>", "yes", "no"))
    documents = ["a block", "a row of slots", "a table names the blocks"]
    with make_llm(path, skip_tokenizer_init=False) as llm:
        expected = llm.rerank("a block", documents, use_tqdm=False)
    with make_llm_of_ranks(path, num_ranks=2, task="rerank", skip_tokenizer_init=False) as llm:
        found = llm.rerank("a block", documents, use_tqdm=False)
        assert [each["index"] for each in found] == [each["index"] for each in expected]
        scores = [each["relevance_score"] for each in found]
        assert scores == pytest.approx([each["relevance_score"] for each in expected], abs=TOLERANCE)


def test_replicas_embed_and_classify_as_one_engine(path, tmp_path, monkeypatch):
    monkeypatch.setattr(replicated_engine, "Replicas", ThreadReplicas)
    three = make_pooling_checkpoint(tmp_path, num_labels=3)
    with make_llm(path, data_parallel_size=2, max_num_seqs=2) as llm:
        assert_embeds(llm, VectorReference(path))
        found = dict(llm.embed_iter(PROMPTS * 4, dimensions=8))
        assert [found[i]["embedding"].shape for i in range(4 * len(PROMPTS))] == [(8,)] * (4 * len(PROMPTS))
        request = llm.add_request(PROMPTS[5], PoolingParams("mean"))
        outputs = []
        while not llm.is_finished():
            outputs += [(delta["request_id"], delta["output"]) for delta in llm.step_deltas() if "output" in delta]
        (expected,) = llm.embed([PROMPTS[5]], pooling="mean", use_tqdm=False)
        assert outputs[0][0] == request
        np.testing.assert_allclose(outputs[0][1]["embedding"], expected["embedding"], atol=TOLERANCE)
        assert llm.stats()["generated_tokens"] == 0
        with pytest.raises(ValueError, match=r"dimensions=65: must be in 1\.\.64"):
            llm.embed(PROMPTS, dimensions=65)
    with make_llm(three, data_parallel_size=2, max_num_seqs=2) as llm:
        found = llm.classify(PROMPTS, use_tqdm=False)
        for each, logits in zip(found, reference_logits(three, PROMPTS), strict=True):
            np.testing.assert_allclose(each["logits"], logits, atol=TOLERANCE)
