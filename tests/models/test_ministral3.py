"""Ministral 3's checkpoints: the text part of a larger model, in fp8 with one scale for each tensor."""

import pytest
import torch
from checkpoints import (
    Reference,
    edit_json,
    edit_tensors,
    make_checkpoint,
    make_llm,
    needs_family,
    random_prompt,
)
from fp8_checkpoints import (
    TOLERANCE,
    dequantized,
    is_quantized,
    many_scores,
    recorded_inputs,
    round_input,
    rounded,
    scored,
)
from thread_ranks import make_llm_of_ranks
from transformers import AutoConfig

from nanovllm.layers.rope_parameters import RopeParameters
from nanovllm.layers.rotary_embedding import RotaryEmbedding

pytestmark = needs_family("ministral3")

ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.3}
STATIC = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False}
STATIC |= {"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]}
PROMPT, COMPLETION = random_prompt(40, 1), random_prompt(60, 2)


def make(directory, **fields):
    return make_checkpoint(directory, family="ministral3", rope_scaling=ROPE, head_dim=16, **fields)


def nest(path, outer: str, model_type: str = "ministral3", **fields) -> None:
    """Make the checkpoint the text part of a larger one. outer: what names begin with."""

    def rename(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[outer + name.removeprefix("model.")] = tensors.pop(name)

    edit_tensors(path, rename)
    text = AutoConfig.from_pretrained(path).to_dict() | {"model_type": model_type}
    (path / "config.json").unlink()
    larger = {"model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"]}
    larger |= {"tie_word_embeddings": False}
    vision = {"model_type": "pixtral", "hidden_size": 8}
    edit_json(path / "config.json", **larger, text_config=text, vision_config=vision, **fields)


def quantize(tensors) -> None:
    """As Mistral publishes them."""
    for name in [name for name in tensors if is_quantized(name.removesuffix(".weight"))]:
        values, scale = rounded(tensors[name], *tensors[name].shape)
        tensors[name] = values
        tensors[name + "_scale_inv"] = scale.reshape(())
        tensors[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.01)


def test_another_text_model_is_refused(tmp_path):
    path = make_checkpoint(tmp_path, family="llama")
    nest(path, "model.language_model.", model_type="llama")
    with pytest.raises(ValueError, match=r"text_config\.model_type='llama': must be mistral or ministral3"):
        make_llm(path)


def test_one_scale_for_each_tensor(tmp_path):
    path = make(tmp_path)
    reference = Reference(path)
    with make_llm(path) as llm:
        plain = many_scores(llm)
    edit_tensors(path, quantize)
    nest(path, "model.language_model.", quantization_config=STATIC)
    with make_llm(path) as llm:
        with recorded_inputs() as inputs:
            found = scored(llm, PROMPT, COMPLETION)
        error = (many_scores(llm) - plain).norm()

    for name, module in reference.model.named_modules():
        if is_quantized(name):
            weight = module.weight.data
            module.weight.data = dequantized(*rounded(weight, *weight.shape))
            module.register_forward_pre_hook(round_input(False, inputs))
    expected = reference.logprobs(PROMPT, COMPLETION)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)

    with make_llm_of_ranks(path, 2) as llm:
        # Each rank rounds its own columns of some inputs, but no more.
        assert 0.75 * error < (many_scores(llm) - plain).norm() < 1.25 * error


def test_a_scale_of_another_shape_is_refused(tmp_path):
    path = make(tmp_path)
    edit_tensors(path, quantize)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.ones(96, 1)}))
    edit_json(path / "config.json", quantization_config=STATIC)
    with pytest.raises(ValueError, match=rf"tensor '{name}' has shape \[96, 1\], the model needs \[\]"):
        make_llm(path)


def test_queries_grow_at_each_original_context():
    rope = RopeParameters(original_max_position_embeddings=16, llama_4_scaling_beta=0.5)
    rotary = RotaryEmbedding.of(rope, 8, 40)
    q = torch.ones(3, 1, 8)
    positions = torch.tensor([15, 16, 39])
    grown, _ = rotary(positions, q, q)
    plain, _ = RotaryEmbedding.of(RopeParameters(), 8, 40)(positions, q, q)
    expected = 1 + 0.5 * torch.tensor([1.0, 2.0, 3.0]).log()
    torch.testing.assert_close(grown / plain, expected[:, None, None].expand(3, 1, 8))
    assert RotaryEmbedding.of(rope, 8, 16).query_scales is None  # No sequence is longer.
