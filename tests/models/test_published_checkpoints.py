"""Quantized checkpoints as tools write them: the same weights in other spellings give the same bits."""

import json

import pytest
import torch
from checkpoints import edit_json, edit_tensors, make_checkpoint, make_llm, needs_family, random_prompt
from fp8_checkpoints import BLOCK_SIZES, BLOCKS, CHANNELS, make_fp8_checkpoint, rounded, scored
from int4_checkpoints import quantize_checkpoint, settings

from nanovllm.config import Config

PROMPT, COMPLETION = random_prompt(20, 1), random_prompt(20, 2)
SIZES = {"hidden_size": 128, "intermediate_size": 192}
GROUP = CHANNELS["config_groups"]["group_0"]


def score(path):
    with make_llm(path) as llm:
        return scored(llm, PROMPT, COMPLETION)


def fp8_settings(weights, inputs):
    group = GROUP | {"weights": GROUP["weights"] | weights, "input_activations": GROUP["input_activations"] | inputs}
    return CHANNELS | {"config_groups": {"group_0": group}}


def one_scale_a_tensor(tensors):
    """The same scale for each channel, [N, 1]."""
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        values, scale = rounded(tensors[name], *tensors[name].shape)
        tensors |= {name: values, f"{name}_scale": scale.expand(len(values), 1).contiguous()}


def without_dimension(tensors):
    tensors |= {name: scale.squeeze(1) for name, scale in tensors.items() if name.endswith("_scale")}


def as_static(tensors):
    """One number for each tensor, and one for its inputs."""
    for name in [name for name in tensors if name.endswith(".weight_scale")]:
        tensors |= {name: tensors[name][:1, 0].clone(), name.replace("weight", "input"): torch.tensor([0.01])}


@pytest.mark.parametrize(
    ("edit", "quantization"),
    [
        (without_dimension, CHANNELS),
        (as_static, fp8_settings({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": False})),
        (as_static, fp8_settings({"strategy": "tensor"}, {})),
    ],
)
def test_fp8_of_compressed_tensors(tmp_path, edit, quantization):
    path = make_checkpoint(tmp_path)
    edit_tensors(path, one_scale_a_tensor)
    edit_json(path / "config.json", quantization_config=CHANNELS)
    expected = score(path)
    edit_tensors(path, edit)
    edit_json(path / "config.json", quantization_config=quantization)
    assert torch.equal(score(path), expected)


def test_blocks_of_compressed_tensors(tmp_path):
    path = make_fp8_checkpoint(tmp_path, in_blocks=True)
    expected = score(path)

    def rename(tensors):
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            tensors[name.removesuffix("_inv")] = tensors.pop(name)

    edit_tensors(path, rename)
    blocks = fp8_settings(
        {"strategy": "block", "block_structure": [128, 128]}, {"strategy": "group", "group_size": 128}
    )
    edit_json(path / "config.json", quantization_config=blocks)
    assert torch.equal(score(path), expected)


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        (fp8_settings({"strategy": "tensor_group"}, {}), "strategy 'tensor_group'"),
        (fp8_settings({"strategy": "block", "block_structure": [64, 64]}, {}), r"block_structure \[64, 64\]"),
        (fp8_settings({}, {"strategy": "group", "group_size": 64}), "strategy 'group', group_size 64"),
        (CHANNELS | {"config_groups": {"group_0": GROUP, "group_1": GROUP}}, "'group_1'"),
        (CHANNELS | {"config_groups": {"group_0": GROUP | {"format": "nvfp4-pack-quantized", "weights": {}}}}, "nvfp4"),
        (BLOCKS | {"activation_scheme": "static"}, "activation_scheme='static'"),
        (BLOCKS | {"weight_block_size": [64, 64]}, r"weight_block_size=\[64, 64\]"),
    ],
)
def test_what_is_refused_is_quoted(tmp_path, quantization, words):
    path = make_checkpoint(tmp_path, **BLOCK_SIZES)
    edit_json(path / "config.json", quantization_config=quantization)
    with pytest.raises(ValueError, match=rf"config\.json: quantization_config .*not supported.*{words}"):
        Config(str(path), device="cpu", skip_tokenizer_init=True)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored", [0x77777777, 0x88888888 - 2**32])
def test_symmetric_gptq_whatever_its_zeros_are_stored_as(tmp_path, version, stored):
    path = make_checkpoint(tmp_path / "model", **SIZES)
    quantize_checkpoint(path, "gptq", 32)
    expected = score(path)
    edit_json(path / "config.json", quantization_config=settings("gptq", 32) | {"checkpoint_format": version})
    edit_tensors(path, lambda tensors: [x.fill_(stored) for name, x in tensors.items() if name.endswith("qzeros")])
    assert torch.equal(score(path), expected)


@pytest.mark.parametrize("kind", ["packed", "int8"])
def test_symmetric_weights_with_zero_points_of_zero(tmp_path, kind):
    path = make_checkpoint(tmp_path / "model", **SIZES)
    quantize_checkpoint(path, "compressed", 32)
    expected = score(path)

    def add(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            N, groups = tensors[name].shape
            zeros = torch.full((N // 8, groups), 0x88888888 - 2**32, dtype=torch.int32)
            zeros = zeros if kind == "packed" else torch.zeros(N, groups, dtype=torch.int8)
            tensors[name.replace("scale", "zero_point")] = zeros

    edit_tensors(path, add)
    assert torch.equal(score(path), expected)
    name = "model.layers.1.mlp.up_proj.weight_zero_point"
    edit_tensors(path, lambda tensors: tensors[name][0].fill_(3))
    with pytest.raises(ValueError, match=f"tensor '{name}' must hold zeros alone, for config.json says symmetric"):
        make_llm(path)


@pytest.mark.parametrize(
    "ignored",
    [
        [r"re:model\.vision_tower\..*", "re:visual.*", "model.visual.blocks.0.attn.qkv", "re:vision_model.*"],
        [r"re:.*in_proj_(a|b)$", "re:.*linear_attn.conv1d", "re:.*shared_expert_gate$", "re:^mtp.*"],
        ["mlp.gate.", r"re:.*\.mlp\.gate$", r"re:.*mlp[.]gate[.].*", "re:.*router"],
    ],
)
def test_modules_that_are_never_quantized_may_be_named(tmp_path, ignored):
    path = make_checkpoint(tmp_path)
    edit_json(path / "config.json", quantization_config=CHANNELS | {"ignore": ignored})
    assert Config(str(path), device="cpu", skip_tokenizer_init=True).weight_format


@pytest.mark.parametrize("ignored", [r"re:.*\.(gate|up)_proj$", "re:.*(q|k)_proj", r"re:model\.layers\.0\..*", "mlp"])
def test_other_modules_that_are_left_out_are_refused(tmp_path, ignored):
    path = make_checkpoint(tmp_path)
    edit_json(path / "config.json", quantization_config=CHANNELS | {"ignore": ["lm_head", ignored]})
    with pytest.raises(ValueError, match=r"ignore names '.*: linear layers must all be quantized"):
        Config(str(path), device="cpu", skip_tokenizer_init=True)


@pytest.mark.parametrize("family", [pytest.param("qwen3_5_text", marks=needs_family("qwen3_5_text"))])
def test_a_head_that_only_the_text_model_ties(tmp_path, family):
    path = make_checkpoint(tmp_path, family=family, tie_word_embeddings=True)
    expected = score(path)
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").unlink()
    content = {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    edit_json(path / "config.json", **content)
    edit_tensors(path, lambda tensors: tensors.pop("lm_head.weight", None))
    assert torch.equal(score(path), expected)
    edit_json(path / "config.json", tie_word_embeddings=False)
    assert torch.equal(score(path), expected)
