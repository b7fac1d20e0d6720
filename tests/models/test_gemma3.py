"""What is Gemma 3's own: two spellings of its configuration, the rounded scale of its embeddings, windows on a GPU.

The table in tests/helpers/families.py has the rest.
"""

from types import SimpleNamespace

import pytest
import torch
from checkpoints import Reference, complete, edit_tensors, greedy, make_checkpoint, random_prompt
from gpu_engines import REGRET, gpu_llm, needs_flash_attn

from nanovllm.models.gemma3 import Gemma3ForCausalLM


def soften_attention(tensors) -> None:
    """Bring the scores to about N(0, 1). In sharper attention bfloat16's rounding changes tokens, on a CPU too."""
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.sub_(1)
        elif name.endswith("q_proj.weight"):
            tensor.mul_(0.35)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize(
    ("backend", "dtype", "most_regret"),
    [
        ("triton", "float32", 1e-3),
        ("triton", "bfloat16", REGRET["bfloat16"]),
        pytest.param("flash_attn", "float16", REGRET["float16"], marks=needs_flash_attn),
    ],
)
def test_a_gpus_tokens_are_nearly_the_references(backend, dtype, most_regret, head_dim, tmp_path):
    """With CUDA graphs, which read a plan for each window, and with mixed steps."""
    fields = {"num_hidden_layers": 7, "sliding_window": 100, "rope_theta": 700.0, "rope_local_base_freq": 30.0}
    fields |= {"head_dim": head_dim, "query_pre_attn_scalar": head_dim}
    path = make_checkpoint(tmp_path, family="gemma3_text", **fields)
    edit_tensors(path, soften_attention)
    reference = Reference(path)
    prompts = [random_prompt(length, seed=length) for length in (1, 99, 100, 101, 300, 700)]
    for options in ({"mixed_step_rows": 0}, {"mixed_step_rows": 128, "max_num_batched_tokens": 400}):
        with gpu_llm(path, attention_backend=backend, dtype=dtype, **options) as llm:
            for _ in range(2):  # and from the cache
                outputs = complete(llm, prompts, greedy(12))
                for prompt, tokens in zip(prompts, outputs, strict=True):
                    assert reference.regret(prompt, tokens) < most_regret


def spec_of(**changes):
    """The specification of a configuration with two layers, as transformers 4.51 has it."""
    fields = {
        "hidden_size": 3072,
        "num_hidden_layers": 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "sliding_window": 512,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "model_type": "gemma3_text",
    }
    return Gemma3ForCausalLM.checked_spec(SimpleNamespace(**fields | changes))


def test_either_transformers_spelling_means_the_same():
    old = spec_of()
    fields = {"sliding_window": 512, "query_pre_attn_scalar": 256, "hidden_size": 3072, "num_hidden_layers": 2}
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = ["sliding_attention", "full_attention"]
    current = {"rope_parameters": ropes, "layer_types": kinds, "rope_local_base_freq": None}
    assert spec_of(**fields | current) == old
    assert old.windows == (512, None)
    assert [rope.base for rope in old.ropes] == [1e4, 1e6]
    assert [rope.factor for rope in old.ropes] == [1.0, 8.0]
    # transformers 4 adds its default to a configuration in the spelling of 5.
    ropes["sliding_attention"] = {"rope_type": "default", "rope_theta": 70.0}
    assert spec_of(**fields | current | {"rope_local_base_freq": 1e4}).ropes[0].base == 70.0


def test_the_scale_of_embeddings_is_rounded_as_in_training():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert spec_of().embedding_scale == 55.5
    finally:
        torch.set_default_dtype(before)
    assert spec_of().embedding_scale == pytest.approx(3072**0.5)
