"""What requests ask of their sampling gives the same over two ranks as on one: float32 on the CPU, over gloo."""

import dataclasses

import pytest
import torch
from checkpoints import assert_idle, greedy, make_checkpoint, make_llm, random_prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_reference import run

from nanovllm import SamplingParams, StructuredOutputsParams

# Room for a few of the prompts at a time, and chunks of one and a half blocks.
OPTIONS = {"skip_tokenizer_init": False, "seed": 5, "num_kvcache_blocks": 10, "max_num_batched_tokens": 24}
PROMPTS = [random_prompt(length, seed=length) for length in (20, 45, 7, 31, 1, 40)]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    # 320 tokens in shards of a multiple of 64: the second rank's is padded.
    return make_checkpoint(tmp_path_factory.mktemp("tp-sampling"), tokenizer=True)


@pytest.fixture(scope="module")
def engines(path):
    """(one rank, two ranks)."""
    with make_llm(path, **OPTIONS) as alone, make_llm(path, tensor_parallel_size=2, **OPTIONS) as llm:
        yield alone, llm


def assert_same_logprobs(found: list | None, expected: list | None) -> None:
    assert (found is None) == (expected is None)
    for ours, theirs in zip(found or [], expected or [], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert list(ours) == list(theirs)
            torch.testing.assert_close(torch.tensor([*ours.values()]), torch.tensor([*theirs.values()]))


def assert_same(engines, prompts, params) -> None:
    """Both engines give the same for the batch, and nothing is left of it."""
    for llm in engines:
        llm._sequences.num_requests = 0
    expected, found = (llm.generate(prompts, params, use_tqdm=False) for llm in engines)
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_logprobs(ours["prompt_logprobs"], theirs["prompt_logprobs"])
        for a, b in zip(ours.get("samples", [ours]), theirs.get("samples", [theirs]), strict=True):
            for name in ("token_ids", "text", "finish_reason", "stop_reason"):
                assert a[name] == b[name]
            assert_same_logprobs(a["logprobs"], b["logprobs"])
    for llm in engines:
        assert_idle(llm)


def sampling(**fields) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, "ignore_eos": True} | fields)


MIXED = [
    sampling(temperature=0.6, top_k=20, top_p=0.95),
    sampling(temperature=0.0, repetition_penalty=1.8, logprobs=3, prompt_logprobs=2, prompt_logprobs_start=-9),
    sampling(presence_penalty=1.5, frequency_penalty=1.0, top_p=0.9, seed=3),
    greedy(20),
    sampling(temperature=1.3, min_p=0.1, min_tokens=4, stop_token_ids=range(0, 300, 9), prompt_logprobs=0, logprobs=0),
    sampling(temperature=0.9, n=3, logprobs=1, top_k=50, logprob_token_ids=[7, 200]),
]


def test_a_mixed_batch_preempted_and_in_chunks(engines):
    before = [llm.scheduler.num_preemptions for llm in engines]
    assert_same(engines, PROMPTS, MIXED)
    assert all(llm.scheduler.num_preemptions > n for llm, n in zip(engines, before, strict=True))


def test_plain_batches_before_and_after_others(engines):
    for params in (greedy(12), sampling(top_k=5), sampling(temperature=0.8), MIXED[::-1], greedy(12)):
        assert_same(engines, PROMPTS, params)


def test_structured_outputs_beside_others(engines):
    schema = {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 3, "maxItems": 3}
    forms = [{"choice": ("red", "green", "dark red")}, {"regex": "[a-z ]{20,40}"}, {"json": schema}]
    params = [SamplingParams(0.9, 50, structured_outputs=StructuredOutputsParams(**form)) for form in forms]
    params[0] = dataclasses.replace(params[0], n=3)
    params[1] = dataclasses.replace(params[1], logprobs=2, top_k=30)
    assert_same(engines, PROMPTS, [*params, *MIXED[1:4]])


def test_tokens_that_may_and_may_not_be_drawn(engines):
    few = range(0, 300, 7)
    words = [engines[0].tokenizer.decode([i, j]) for i in range(60, 80, 2) for j in range(60, 80)]
    params = [
        sampling(temperature=0.0, allowed_token_ids=few),
        sampling(temperature=0.9, logit_bias=dict.fromkeys(few, 5), n=2, logprobs=1),
        # Which tokens these may draw depends on the one before, so that their steps come back half-way.
        sampling(temperature=0.0, bad_words=words),
        sampling(temperature=0.9, bad_words=words, allowed_token_ids=range(60, 80)),
    ]
    assert_same(engines, PROMPTS, [*params, *MIXED[2:4]])


def test_prompts_that_fill_the_cache(engines):
    prompts = [random_prompt(150, seed=1), random_prompt(140, seed=2)]
    assert_same(engines, prompts, greedy(2, prompt_logprobs=1, logprobs=1))


def test_steps_by_hand_and_scores(engines):
    ours, theirs = ([seq.completion_token_ids for seq in run(llm, PROMPTS[:2], MIXED[2:4])] for llm in engines)
    assert ours == theirs
    scores = [llm.score(PROMPTS[:3], [[1, 2, 3], [4], [5] * 9], use_tqdm=False) for llm in engines]
    for ours, theirs in zip(*scores, strict=True):
        assert ours["token_ids"] == theirs["token_ids"]
        assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=1e-4)


settings_of_any_kind = st.builds(
    sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    max_tokens=st.integers(1, 12),
    top_k=st.sampled_from([0, 0, 3, 40]),
    top_p=st.sampled_from([1.0, 0.8]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.4]),
    logprobs=st.sampled_from([None, None, 2]),
    prompt_logprobs=st.sampled_from([None, None, 0, 2]),
    n=st.sampled_from([1, 1, 2]),
)


@given(st.lists(settings_of_any_kind, min_size=1, max_size=6))
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_mixture(engines, params):
    assert_same(engines, PROMPTS[: len(params)], params)


def test_an_exception_between_the_halves_leaves_a_usable_engine(engines, monkeypatch):
    """As Ctrl-C there: the workers have run a forward whose tokens nobody draws."""
    llm = engines[1]
    advance = llm._advance
    constrained = SamplingParams(0.9, 50, structured_outputs=StructuredOutputsParams(regex="[a-z]{30}"))

    def interrupted(step):
        if step.num_tokens < 0:
            raise KeyboardInterrupt
        return advance(step)

    with monkeypatch.context() as patch:
        patch.setattr(llm, "_advance", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[:3], [constrained, greedy(9), MIXED[0]], use_tqdm=False)
    assert_idle(llm)
    assert_same(engines, PROMPTS, MIXED)
