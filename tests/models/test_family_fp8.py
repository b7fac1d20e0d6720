"""Every family in fp8: against transformers' model that rounds in the same places, and over two ranks."""

import pytest
from checkpoints import complete, greedy, make_checkpoint, make_llm, random_prompt
from fp8_checkpoints import quantise_checkpoint, reference_logprobs, scored

# Sizes that two ranks may divide, in units of 16.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "phi3": {"partial_rotary_factor": 0.75, "head_dim": 16},
    "smollm3": {},
    "olmo2": {},
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "sliding_window_pattern": 2},
    "qwen2": {},
    "qwen3": {},
}
PROMPT, COMPLETION = random_prompt(40, 1), random_prompt(60, 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_and_inputs_are_rounded_and_nothing_else(family, tmp_path):
    path = make_checkpoint(tmp_path, family=family, **SHAPE | FAMILIES[family])
    with make_llm(path, quantization="fp8") as llm:
        found = scored(llm, PROMPT, COMPLETION)
    expected, unrounded = (reference_logprobs(path, PROMPT, COMPLETION, with_inputs=rounds) for rounds in (True, False))
    # Sums in another order may move an input over the edge between two e4m3 numbers, a few times in a prompt.
    assert (found - expected).norm() < 0.2 * (unrounded - expected).norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_with_an_fp8_cache(family, tmp_path):
    path = make_checkpoint(tmp_path, family=family, **SHAPE | FAMILIES[family])
    with make_llm(path) as llm:
        plain = scored(llm, PROMPT, COMPLETION)
    errors = []
    for num_ranks in (1, 2):
        options = {"quantization": "fp8", "kv_cache_dtype": "fp8", "tensor_parallel_size": num_ranks}
        with make_llm(path, **options) as llm:
            errors.append((scored(llm, PROMPT, COMPLETION) - plain).norm())
            assert len(complete(llm, [PROMPT], greedy(4))[0]) == 4
    # Each rank has scales for its own columns, so the ranks round in other places, but no more.
    assert 0.5 * errors[0] < errors[1] < 1.5 * errors[0]


def test_blocks_of_fused_tensors(tmp_path):
    """Those of Phi-3, whose checkpoints hold q, k and v as one tensor, and gate and up as another."""
    sizes = {"hidden_size": 512, "head_dim": 128, "intermediate_size": 256}
    path = make_checkpoint(tmp_path, family="phi3", **SHAPE | sizes)
    with make_llm(path) as llm:
        plain = scored(llm, PROMPT, COMPLETION)
    quantise_checkpoint(path, in_blocks=True)
    with make_llm(path) as llm:
        one_rank = scored(llm, PROMPT, COMPLETION)
    with make_llm(path, tensor_parallel_size=2) as llm:
        two_ranks = scored(llm, PROMPT, COMPLETION)
    assert (two_ranks - one_rank).norm() < 0.3 * (one_rank - plain).norm()
