"""Ranks that hold whole experts give the tokens of one rank: float32 on the CPU, over gloo."""

import pytest
from checkpoints import assert_idle, complete, greedy, make_checkpoint, make_llm, needs_family, random_prompt
from kernel_harness import nightly
from thread_ranks import make_llm_of_ranks

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": 4}
FAMILIES = {
    # No number of ranks divides the columns of an expert.
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 33, "max_window_layers": 0},
    "qwen3_5_moe_text": EXPERTS
    | {
        "moe_intermediate_size": 33,
        "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
    },
}
PROMPTS = [random_prompt(length, length) for length in (1, 20, 45)]


def sampled(llm):
    """Tokens of steps with many rows and with few."""
    return complete(llm, PROMPTS, greedy(12)), complete(llm, PROMPTS[:1], greedy(12))


@pytest.mark.parametrize("family", [pytest.param(name, marks=needs_family(name)) for name in FAMILIES])
def test_whole_experts_give_the_tokens_of_one_rank(family, tmp_path):
    path = make_checkpoint(tmp_path, family=family, **FAMILIES[family])
    options = {"num_kvcache_blocks": 12, "max_num_batched_tokens": 24}
    with make_llm(path, **options) as llm:
        expected = sampled(llm)
    for num_ranks in (2, 4):
        with make_llm_of_ranks(path, num_ranks, **options) as llm:
            experts = llm.model_runner.model.model.layers[1].mlp.experts
            assert experts.shards.mine == range(8 // num_ranks)
            assert sampled(llm) == expected
            assert_idle(llm)


@pytest.mark.parametrize("num_ranks", [2, *nightly(4)])
def test_ranks_that_are_processes(num_ranks, tmp_path):
    path = make_checkpoint(tmp_path, family="qwen3_moe", **FAMILIES["qwen3_moe"])
    with make_llm(path) as llm:
        expected = sampled(llm)
    with make_llm(path, tensor_parallel_size=num_ranks) as llm:
        assert sampled(llm) == expected
