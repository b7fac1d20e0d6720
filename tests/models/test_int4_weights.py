"""Engines with weights in int4, against the same model with the same numbers in floats; and what is refused."""

import pytest
import torch
from checkpoints import (
    Reference,
    complete,
    edit_tensors,
    greedy,
    make_checkpoint,
    make_llm,
    needs_family,
    random_prompt,
)
from families import fields_of
from fp8_checkpoints import scored
from int4_checkpoints import KINDS, quantize_checkpoint, settings
from safetensors.torch import load_file
from thread_ranks import make_llm_of_ranks
from transformers import AutoModelForCausalLM

from nanovllm.config import Config
from nanovllm.layers.formats.int4 import Int4, round_groups

PROMPT, COMPLETION = random_prompt(40, 1), random_prompt(60, 2)
SIZES = {"hidden_size": 128, "intermediate_size": 192}


def score(path, **options):
    with make_llm(path, **options) as llm:
        return scored(llm, PROMPT, COMPLETION)


# What is special of a family's weights: fused tensors, factors, experts, rows of heads that are taken one by one.
STORED = [(kind, "qwen3", 32) for kind in KINDS] + [
    ("compressed with zeros", "qwen3", None),
    ("awq", "phi3", 32),
    *(("compressed with zeros", family, 32) for family in ("granite", "qwen3_moe", "qwen3_next")),
]


@pytest.mark.parametrize(
    ("kind", "family", "group"), [pytest.param(*row, marks=needs_family(row[1]), id=str(row)) for row in STORED]
)
def test_logits_are_those_of_the_dequantized_weights(kind, family, group, tmp_path):
    """On one rank, and on two."""
    path = make_checkpoint(tmp_path / "model", family=family, **fields_of(family))
    floats = quantize_checkpoint(path, kind, group)
    reference = Reference(floats)
    for num_ranks in (1, 2):
        with make_llm_of_ranks(path, num_ranks) as llm:
            difference = scored(llm, PROMPT, COMPLETION) - reference.logprobs(PROMPT, COMPLETION)
        assert difference.abs().max() <= 2 * reference.rounding(PROMPT, COMPLETION)


def test_groups_that_ranks_would_cut_are_refused(tmp_path):
    path = make_checkpoint(tmp_path / "model", hidden_size=128, intermediate_size=256)
    quantize_checkpoint(path, "compressed", 128)
    message = (
        r"tensor_parallel_size=2: weights in int4 .* multiples of 128 .* num_attention_heads \* head_dim would be 64"
    )
    with pytest.raises(ValueError, match=message):
        make_llm(path, tensor_parallel_size=2)


@pytest.mark.parametrize("kind", ["awq", "compressed", None], ids=str)
def test_sleep_and_updates(kind, tmp_path):
    """Of a checkpoint in int4, by the tensors of another one; of weights rounded while they are loaded, by floats."""
    paths = [make_checkpoint(tmp_path / str(seed), seed=seed, **SIZES) for seed in range(2)]
    for path in paths if kind else ():
        quantize_checkpoint(path, kind, 32)
    with make_llm(paths[0], quantization="int4") as llm:
        llm.sleep(1)
        llm.wake_up()
        llm.update_weights(load_file(paths[1] / "model.safetensors").items())
        found = scored(llm, PROMPT, COMPLETION)
    assert torch.equal(found, score(paths[1], quantization="int4"))


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_groups_of_weights_that_are_rounded_while_they_are_loaded(tmp_path, load_format):
    """test_families.py has what they compute."""
    path = make_checkpoint(tmp_path / "model", **SIZES)
    with make_llm(path, quantization="int4", load_format=load_format) as llm:
        layer = llm.model_runner.model.model.layers[0]
        for linear, group in ((layer.self_attn.qkv_proj, 128), (layer.mlp.down_proj, 64)):
            N, K = linear.matrix.shape
            assert linear.weight.shape == (N, K // 2)
            assert linear.weight_scale.shape == (N, K // group)
        assert llm.model_runner.model.lm_head.weight.dtype == torch.float32
        if load_format == "dummy":
            weight = layer.self_attn.o_proj.matrix
            assert abs(weight.format.dequantized(weight).std() - 0.02) < 0.002
            assert len(complete(llm, [PROMPT], greedy(4))[0]) == 4


def test_rounding_moves_no_number_by_more_than_a_step():
    weight = torch.randn(5, 96)
    weight[1] = 0
    weight[2, :32] = torch.randn(32) * 1e-39
    for dtype in (torch.float32, torch.float16):
        values, scale = round_groups(weight, 32, dtype)
        assert values.dtype == torch.uint8
        assert scale.dtype == dtype
        rounded = Int4().dequantized(Int4().quantize(weight, dtype))
        step = scale.abs().float().repeat_interleave(32, dim=1)
        # Of the two ends of the range only one has a number for it.
        assert ((rounded.float() - weight).abs() <= 1.001 * step + 1e-6).all()
        assert not rounded[1].any()


def with_weights(**changes):
    found = settings("compressed", 32)
    group = found["config_groups"]["group_0"]
    return found | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (with_weights(num_bits=8), "num_bits=8: must be 4"),
        (with_weights(group_size=48), "group_size=48: must be -1, or 32"),
        (with_weights(actorder="group"), "actorder='group': must be None or False or 'static'"),
        (with_weights(type="float"), "not supported"),
        (settings("awq", 32) | {"bits": 3}, "bits=3: must be 4"),
        (settings("awq", 32) | {"version": "gemv"}, "version='gemv': must be 'gemm'"),
        (settings("awq", 16), "group_size=16"),
        (settings("gptq", 32) | {"bits": 8}, "bits=8: must be 4"),
        (settings("gptq", 32) | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin': must be 'gptq'"),
        (settings("gptq", 32) | {"dynamic": {"+:.*down_proj": {"bits": 8}}}, "dynamic="),
        (settings("gptq", 32) | {"dynamic": {"-:.*mlp.*": {}}}, "dynamic names '-:"),
        (settings("awq", 32) | {"modules_to_not_convert": ["mlp"]}, "modules_to_not_convert names 'mlp'"),
    ],
)
def test_settings_that_are_refused(model_dir, wrong, message):
    with pytest.raises(ValueError, match=rf"config\.json: quantization_config.*{message}"):
        Config(model_dir(quantization_config=wrong, **SIZES), device="cpu", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    "changes",
    [
        settings("gptq", 32) | {"dynamic": {"-:.*\\.mlp\\.gate": {}, "-:lm_head": {}}},
        settings("awq", 32) | {"modules_to_not_convert": ["lm_head", "mlp.gate"]},
        with_weights(actorder="static"),
    ],
)
def test_settings_that_are_read(model_dir, changes):
    path = model_dir(quantization_config=changes, **SIZES)
    assert isinstance(Config(path, device="cpu", skip_tokenizer_init=True).weight_format, Int4)


@pytest.mark.parametrize(
    ("kind", "name", "edit", "message"),
    [
        ("gptq", "g_idx", lambda x: x.copy_(x.flip(0)), r"groups columns that are not side by side \(desc_act\)"),
        ("gptq", "qzeros", lambda x: x.fill_(0), "must hold zeros of 8, for config.json says sym"),
        ("awq", "scales", lambda x: x[0].fill_(-1), "must hold finite scales >= 0"),
        ("compressed", "weight_shape", lambda x: x.fill_(5), r"is \[5, 5\], and the model needs \[192, 128\]"),
    ],
)
def test_tensors_that_are_refused(tmp_path, kind, name, edit, message):
    path = make_checkpoint(tmp_path / "model", **SIZES)
    quantize_checkpoint(path, kind, 32)
    name = f"model.layers.1.mlp.up_proj.{name}"
    edit_tensors(path, lambda tensors: edit(tensors[name]))
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor '{name}' {message}"):
        make_llm(path)


def test_biases_that_auto_gptq_adds(tmp_path):
    path = make_checkpoint(tmp_path / "model", **SIZES)
    quantize_checkpoint(path, "gptq", 32)
    plain = score(path)
    name = "model.layers.1.mlp.up_proj.bias"
    edit_tensors(path, lambda tensors: tensors.update({name: torch.zeros(192)}))
    assert torch.equal(score(path), plain)
    edit_tensors(path, lambda tensors: tensors[name][5].fill_(1))
    with pytest.raises(ValueError, match=f"tensors that the model does not have: '{name}'"):
        make_llm(path)


def test_a_checkpoint_in_another_format_than_the_option(tmp_path):
    path = make_checkpoint(tmp_path / "model", **SIZES)
    quantize_checkpoint(path, "awq", 32)
    assert torch.equal(score(path, quantization="int4"), score(path))
    with pytest.raises(ValueError, match="quantization='fp8': must be None or 'int4', of a checkpoint in int4"):
        make_llm(path, quantization="fp8")


def test_memory_and_parameters_are_counted_as_they_are(tmp_path):
    """A meta model has the bytes of the packed weights, and the log the model's numbers."""
    from nanovllm.models.loader import num_checkpoint_params
    from nanovllm.models.model_size import meta_model, model_bytes

    path = make_checkpoint(tmp_path / "model", **SIZES)
    counts, sizes = [], []
    for kind in (None, "compressed with zeros"):
        if kind is not None:
            quantize_checkpoint(path, kind, 32)
        config = Config(str(path), device="cpu", skip_tokenizer_init=True)
        model = meta_model(config)
        counts.append(num_checkpoint_params(model))
        sizes.append(model_bytes(config, model).weights)
    assert counts[0] == counts[1]
    tensors = AutoModelForCausalLM.from_config(config.hf_config).state_dict()
    layers = sum(tensor.numel() for name, tensor in tensors.items() if name.endswith("proj.weight"))
    # Four bits, and of 32 a scale in float32 and a zero of 8 bits.
    assert sizes[1] == sizes[0] - layers * 4 + layers * (4 + 40 / 32) / 8
