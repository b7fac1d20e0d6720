"""Every family in fp8: against transformers' model that rounds in the same places, and over two ranks."""

import pytest
import torch
from checkpoints import complete, edit_json, greedy, make_checkpoint, make_llm, needs_family, random_prompt
from fp8_checkpoints import (
    BLOCK_SIZES,
    BLOCKS,
    TOLERANCE,
    assert_scores_like_the_reference,
    many_scores,
    quantize_checkpoint,
    short_scores,
)
from products import dequantized

from nanovllm.layers.formats.fp8 import Fp8

# Sizes that two ranks may divide, in units of 16.
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
HYBRID = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
HYBRID |= {"linear_value_head_dim": 32, "head_dim": 32, "full_attention_interval": 2}
SHARED_EXPERT = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED_EXPERT |= {"shared_expert_intermediate_size": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 16},
    "ministral3": {"head_dim": 16, "rope_scaling": YARN | {"llama_4_scaling_beta": 0.3}},
    "phi3": {"partial_rotary_factor": 0.75, "head_dim": 16},
    "smollm3": {},
    "olmo2": {},
    "olmo3": {"sliding_window": 16},
    "granite": {
        "embedding_multiplier": 8.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.22,
        "logits_scaling": 3.0,
    },
    "gemma3_text": {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16, "sliding_window_pattern": 2},
    "gemma4_text": {"head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    "qwen2": {},
    "qwen3": {},
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID | SHARED_EXPERT,
    "qwen3_next": HYBRID | SHARED_EXPERT | {"mlp_only_layers": [0]},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
}
PROMPT, COMPLETION = random_prompt(40, 1), random_prompt(60, 2)


every_family = pytest.mark.parametrize("family", [pytest.param(name, marks=needs_family(name)) for name in FAMILIES])


@every_family
def test_weights_and_inputs_are_rounded_and_nothing_else(family, tmp_path):
    path = make_checkpoint(tmp_path, family=family, **SHAPE | FAMILIES[family])
    assert_scores_like_the_reference(path, path, PROMPT, COMPLETION, quantization="fp8")


# One of each way in which weights are divided; the others divide theirs as one of these.
DIVIDED = ("qwen3", "phi3", "olmo2", "granite", "gemma4_text", "qwen3_next", "qwen3_moe")


@pytest.mark.parametrize("family", [pytest.param(name, marks=needs_family(name)) for name in DIVIDED])
def test_two_ranks_with_an_fp8_cache(family, tmp_path):
    path = make_checkpoint(tmp_path, family=family, **SHAPE | FAMILIES[family])
    with make_llm(path) as llm:
        plain = many_scores(llm)
    errors = []
    for num_ranks in (1, 2):
        options = {"quantization": "fp8", "kv_cache_dtype": "fp8", "tensor_parallel_size": num_ranks}
        with make_llm(path, **options) as llm:
            errors.append((many_scores(llm) - plain).norm())
            assert len(complete(llm, [PROMPT], greedy(4))[0]) == 4
    # Each rank has scales for its own columns, so the ranks round in other places, but no more.
    assert 0.75 * errors[0] < errors[1] < 1.25 * errors[0]


@pytest.mark.parametrize("in_blocks", [False, True], ids=["channels", "blocks"])
def test_factors_of_weights_that_are_stored_in_fp8(tmp_path, in_blocks):
    """Their scales have them, since e4m3 numbers cannot. The bias has it as ever."""
    sizes = BLOCK_SIZES if in_blocks else {}
    fields = SHAPE | FAMILIES["granite"] | sizes | {"attention_bias": True}
    plain, path = (make_checkpoint(tmp_path / name, family="granite", **fields) for name in ("plain", "quantized"))
    quantize_checkpoint(path, in_blocks)
    assert_scores_like_the_reference(path, plain, PROMPT, COMPLETION, in_blocks)


def test_experts_in_blocks(tmp_path):
    sizes = {"hidden_size": 128, "head_dim": 64, "intermediate_size": 384, "moe_intermediate_size": 256}
    fields = SHAPE | FAMILIES["qwen3_moe"] | sizes
    plain, path = (make_checkpoint(tmp_path / name, family="qwen3_moe", **fields) for name in ("plain", "quantized"))
    quantize_checkpoint(path, in_blocks=True)
    names = [f"model.layers.1.{name}" for name in ("mlp.gate", "input_layernorm")]
    edit_json(path / "config.json", quantization_config=BLOCKS | {"modules_to_not_convert": ["lm_head", *names]})
    assert_scores_like_the_reference(path, plain, PROMPT, COMPLETION, in_blocks=True)


@needs_family("qwen3_5_moe_text")
@pytest.mark.parametrize("family", ["qwen3_5_moe_text", "qwen3_next"])
def test_hybrids_in_blocks(family, tmp_path):
    """As published: the gates of linear attention and of the shared expert are not quantized."""
    sizes = {"hidden_size": 128, "head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    sizes |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "intermediate_size": 128}
    fields = SHAPE | HYBRID | SHARED_EXPERT | sizes
    plain, path = (make_checkpoint(tmp_path / name, family=family, **fields) for name in ("plain", "quantized"))
    quantize_checkpoint(path, in_blocks=True)
    gates = ["in_proj_a", "in_proj_b", "in_proj_ba", "conv1d"]
    names = [f"model.layers.0.linear_attn.{gate}" for gate in gates] + ["model.layers.0.mlp.shared_expert_gate"]
    ignored = {"modules_to_not_convert": ["lm_head", "model.visual", "mtp.fc", "model.layers.0.mlp.gate", *names]}
    edit_json(path / "config.json", quantization_config=BLOCKS | ignored)
    assert_scores_like_the_reference(path, plain, PROMPT, COMPLETION, in_blocks=True)


def test_blocks_of_experts_that_ranks_would_cut(tmp_path):
    sizes = {"hidden_size": 128, "head_dim": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
    path = make_checkpoint(tmp_path, family="qwen3_moe", **SHAPE | FAMILIES["qwen3_moe"] | sizes)
    quantize_checkpoint(path, in_blocks=True)
    with pytest.raises(ValueError, match="multiples of 128 on each rank, and its moe_intermediate_size would be 64"):
        make_llm(path, tensor_parallel_size=2)


def test_experts_are_quantized_one_by_one(tmp_path, monkeypatch):
    """A second copy of all experts would not fit beside the first."""
    path = make_checkpoint(tmp_path, family="qwen3_moe", **SHAPE | FAMILIES["qwen3_moe"])
    sizes = []
    quantize = Fp8._quantized
    monkeypatch.setattr(Fp8, "_quantized", lambda format, x: sizes.append(x.dim()) or quantize(format, x))
    for load_format in ("auto", "dummy"):
        with make_llm(path, quantization="fp8", load_format=load_format) as llm:
            experts = llm.model_runner.model.model.layers[1].mlp.experts
            for weight in (experts.gate_up_proj.matrix, experts.down_proj.matrix):
                assert weight.values.dtype == torch.float8_e4m3fn
                assert (dequantized(weight).std((1, 2)) > 0.01).all()
    assert set(sizes) == {2}


def test_blocks_of_fused_tensors(tmp_path):
    """Those of Phi-3, whose checkpoints hold q, k and v as one tensor, and gate and up as another."""
    sizes = {"hidden_size": 512, "head_dim": 128, "intermediate_size": 256}
    path = make_checkpoint(tmp_path, family="phi3", **SHAPE | sizes)
    quantize_checkpoint(path, in_blocks=True)
    found = []
    for num_ranks in (1, 2):
        with make_llm(path, tensor_parallel_size=num_ranks) as llm:
            found.append(short_scores(llm))
    assert (found[1] - found[0]).abs().amax(1).median() < TOLERANCE
