"""The smallest and the largest value of every engine option: the engine starts, and generates what it should."""

import pytest
from checkpoints import assert_idle, complete, greedy, make_llm
from configs import OPTION_LIMITS

# Of each prompt. One goes on for longer, so that others may be computed beside its decode steps.
MAX_TOKENS = (16, 3, 6, 3)
GPU = {"device": "cuda", "dtype": "float32", "attention_backend": "triton"}


@pytest.fixture(scope="module")
def prompts(reference):
    """As short as any limit wants, and longer than a step's tokens or a block where these are few."""
    return reference.draw_prompts((1, 30, 4, 1), max(MAX_TOKENS))


def check(path, reference, prompts, **options) -> None:
    with make_llm(path, **options) as llm:
        longest = llm.scheduler.max_seq_len
        requests = [(prompt, n) for prompt, n in zip(prompts, MAX_TOKENS, strict=True) if len(prompt) < longest]
        expected = [
            reference.greedy([prompt], max(MAX_TOKENS))[0][: min(n, longest - len(prompt))] for prompt, n in requests
        ]
        # The second ones are sampled from logits, which is another way through the engine.
        for fields in ({}, {"top_k": 5}):
            params = [greedy(n, **fields) for _, n in requests]
            assert complete(llm, [prompt for prompt, _ in requests], params) == expected
            assert_idle(llm)


@pytest.mark.parametrize("options", OPTION_LIMITS, ids=str)
def test_an_engine_at_its_limits(path, reference, prompts, options):
    check(path, reference, prompts, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", OPTION_LIMITS, ids=str)
def test_an_engine_on_a_gpu_at_its_limits(path, reference, prompts, options):
    check(path, reference, prompts, **GPU | options)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("options", [each for each in OPTION_LIMITS if not each.get("mixed_step_rows")], ids=str)
def test_an_engine_on_two_gpus_at_its_limits(path, reference, prompts, options):
    check(path, reference, prompts, **GPU | options, tensor_parallel_size=2)


def test_every_option_with_a_limit_is_tried():
    tried = {name for options in OPTION_LIMITS for name in options}
    assert tried >= {
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "kvcache_block_size",
        "num_kvcache_blocks",
        "kvcache_gib",
        "gpu_memory_utilization",
        "mixed_step_rows",
        "seed",
        "eos",
    }
