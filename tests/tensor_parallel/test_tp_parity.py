"""Several ranks give the tokens of one: float32 on the CPU, over gloo. The first are processes, the others threads."""

import pytest
import torch
import torch.distributed as dist
from checkpoints import Reference, assert_idle, complete, complete_by_steps, greedy, make_checkpoint, make_llm
from thread_ranks import make_llm_of_ranks

from nanovllm import SamplingParams

# Room for three of the prompts at a time, and chunks of one and a half blocks.
CRAMPED = {"num_kvcache_blocks": 9, "max_num_batched_tokens": 24}
CONFIGS = {
    # 307 tokens in shards of a multiple of 64: the last of two ranks has a part of one, the last of four has none.
    # Four ranks share two KV heads.
    "tied-2": ({"vocab_size": 307, "tie_word_embeddings": True}, 2),
    "tied-4": ({"vocab_size": 307, "tie_word_embeddings": True}, 4),
    "bias-2": ({"attention_bias": True, "num_key_value_heads": 4, "intermediate_size": 98}, 2),
    "qwen2-mqa-2": ({"family": "qwen2", "num_key_value_heads": 1}, 2),
}


@pytest.fixture(scope="module", params=CONFIGS)
def case(request, tmp_path_factory):
    """(checkpoint, its Reference, engine with several ranks)."""
    fields, size = CONFIGS[request.param]
    path = make_checkpoint(tmp_path_factory.mktemp(request.param), **fields)
    kind = {"tensor_parallel_size": size} if request.param == "tied-2" else {"num_ranks": size}
    make = make_llm if request.param == "tied-2" else make_llm_of_ranks
    with make(path, seed=5, **CRAMPED, **kind) as llm:
        yield path, Reference(path), llm


def test_greedy_output_is_that_of_one_rank(case):
    _, reference, llm = case
    head = reference.draw_prompts((34,), 20)[0]
    prompts = reference.draw_prompts((20, 45, 7, 31), 20) + reference.draw_prompts((40, 50), 20, prefix=head)
    expected = reference.greedy(prompts, 20)
    preemptions = llm.scheduler.num_preemptions
    outputs = llm.generate(prompts, greedy(20), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == expected
    assert llm.scheduler.num_preemptions > preemptions
    assert sum(output["num_cached_tokens"] for output in outputs) > 0
    # Without overlap every token is known to the host before it is fed.
    assert complete_by_steps(llm, prompts[2:4], greedy(20))[0] == expected[2:4]
    assert_idle(llm)


def test_seeded_draws_are_those_of_one_rank(case):
    path, _, llm = case
    prompts = [[1, 2, 3], [4] * 20, [5, 6] * 10, [7]]
    params = [SamplingParams(t, 12, ignore_eos=True, seed=i) for i, t in enumerate((0.5, 1.0, 1.5, 0.0))]
    params[2] = SamplingParams(1.2, 12, ignore_eos=True)
    with make_llm(path, seed=5) as alone:
        expected = [complete(alone, prompts, params) for _ in range(2)]
    # An unseeded request draws from the engine's seed by the number of its request.
    llm._sequences.num_requests = 0
    assert [complete(llm, prompts, params) for _ in range(2)] == expected


@pytest.mark.parametrize("case", ["tied-2"], indirect=True)
def test_a_process_group_of_the_callers_is_left_alone(case, tmp_path):
    *_, llm = case
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        complete(llm, [[1, 2, 3]], greedy(4))
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 1
    finally:
        dist.destroy_process_group()
    assert len(complete(llm, [[1, 2, 3]], greedy(4))[0]) == 4
