"""Engines with weights in int4, against the same model with the same numbers in floats; and what is refused."""

import pytest
import torch
from checkpoints import (
    complete,
    edit_json,
    edit_tensors,
    greedy,
    make_checkpoint,
    make_llm,
    needs_family,
    random_prompt,
)
from fp8_checkpoints import scored
from int4_checkpoints import KINDS, dequantized, quantize_checkpoint, settings
from transformers import AutoModelForCausalLM

from nanovllm.config import Config
from nanovllm.layers.formats.int4 import Int4, round_groups

PROMPT, COMPLETION = random_prompt(40, 1), random_prompt(60, 2)
SIZES = {"hidden_size": 128, "intermediate_size": 192}
FAMILIES = {
    "phi3": {},  # One tensor of q, k and v, another one of gate and up.
    "granite": {"residual_multiplier": 0.5, "logits_scaling": 2.0, "embedding_multiplier": 3.0},  # Scales have factors.
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "mlp_only_layers": [0],
        "head_dim": 32,
    },
    "qwen3_5_text": {},  # Rows of heads are taken one by one.
}


def score(path, **options):
    with make_llm(path, **options) as llm:
        return scored(llm, PROMPT, COMPLETION)


@torch.inference_mode()
def reference(path):
    """By transformers, of a checkpoint in floats."""
    model = AutoModelForCausalLM.from_pretrained(path).float().eval()
    logits = model(torch.tensor([PROMPT + COMPLETION])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(COMPLETION)[:, None]).flatten()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantized_weights(kind, tmp_path):
    group = None if kind == "compressed with zeros" else 32
    path = make_checkpoint(tmp_path / "model", **SIZES)
    floats = quantize_checkpoint(path, kind, group)
    torch.testing.assert_close(score(path), reference(floats), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", [pytest.param(name, marks=needs_family(name)) for name in FAMILIES])
def test_families(family, tmp_path):
    path = make_checkpoint(tmp_path / "model", family=family, **SIZES | FAMILIES[family])
    floats = quantize_checkpoint(path, "awq" if family == "phi3" else "compressed with zeros", 32)
    torch.testing.assert_close(score(path), reference(floats), atol=2e-4, rtol=0)


@pytest.mark.parametrize(("kind", "group"), [("compressed with zeros", None), ("awq", 32), ("gptq", 32)])
def test_two_ranks(kind, group, tmp_path):
    path = make_checkpoint(tmp_path / "model", **SIZES)
    quantize_checkpoint(path, kind, group)
    torch.testing.assert_close(score(path, tensor_parallel_size=2), score(path), atol=1e-4, rtol=0)


def test_groups_that_ranks_would_cut_are_refused(tmp_path):
    path = make_checkpoint(tmp_path / "model", hidden_size=128, intermediate_size=256)
    quantize_checkpoint(path, "compressed", 128)
    message = (
        r"tensor_parallel_size=2: weights in int4 .* multiples of 128 .* num_attention_heads \* head_dim would be 64"
    )
    with pytest.raises(ValueError, match=message):
        make_llm(path, tensor_parallel_size=2)


@pytest.mark.parametrize("kind", ["awq", "compressed"])
def test_updates_take_the_tensors_of_a_checkpoint(kind, tmp_path):
    from safetensors.torch import load_file

    paths = [make_checkpoint(tmp_path / str(seed), seed=seed, **SIZES) for seed in range(2)]
    for path in paths:
        quantize_checkpoint(path, kind, 32)
    with make_llm(paths[0]) as llm:
        llm.update_weights(load_file(paths[1] / "model.safetensors").items())
        found = scored(llm, PROMPT, COMPLETION)
    assert torch.equal(found, score(paths[1]))


def test_weights_are_rounded_while_they_are_loaded(tmp_path):
    path = make_checkpoint(tmp_path / "model", **SIZES)
    with make_llm(path, quantization="int4") as llm:
        found = scored(llm, PROMPT, COMPLETION)
        layer = llm.model_runner.model.model.layers[0]
        for linear, group in ((layer.self_attn.qkv_proj, 128), (layer.mlp.down_proj, 64)):
            N, K = linear.matrix.shape
            assert linear.weight.shape == (N, K // 2)
            assert linear.weight_scale.shape == (N, K // group)
        assert llm.model_runner.model.lm_head.weight.dtype == torch.float32
    plain = score(path)

    def round_weights(tensors):
        for name, tensor in tensors.items():
            if name.endswith("proj.weight"):
                weight = Int4().quantize(tensor, torch.float32)
                tensors[name] = weight.format.dequantized(weight)

    edit_tensors(path, round_weights)
    expected = score(path)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (expected - plain).norm() > 0.1


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


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_random_weights_and_two_ranks(family, tmp_path):
    path = make_checkpoint(tmp_path / "model", family=family, **SIZES | FAMILIES.get(family, {}))
    plain = score(path)
    errors = [(score(path, quantization="int4", tensor_parallel_size=size) - plain).norm() for size in (1, 2)]
    assert 0.5 * errors[0] < errors[1] < 1.5 * errors[0]
    with make_llm(path, quantization="int4", load_format="dummy") as llm:
        weight = llm.model_runner.model.model.layers[1].self_attn.o_proj.matrix
        assert abs(weight.format.dequantized(weight).std() - 0.02) < 0.002
        assert len(complete(llm, [PROMPT], greedy(4))[0]) == 4


def test_sleep_and_updates_of_rounded_weights(tmp_path):
    paths = [make_checkpoint(tmp_path / str(seed), seed=seed, tie_word_embeddings=True, **SIZES) for seed in range(2)]
    tensors = AutoModelForCausalLM.from_pretrained(paths[1]).state_dict()
    with make_llm(paths[0], quantization="int4") as llm:
        llm.sleep(1)
        llm.wake_up()
        llm.update_weights(tensors.items())
        found = scored(llm, PROMPT, COMPLETION)
    assert torch.equal(found, score(paths[1], quantization="int4"))


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
def test_settings_that_are_refused(tmp_path, wrong, message):
    path = make_checkpoint(tmp_path, **SIZES)
    edit_json(path / "config.json", quantization_config=wrong)
    with pytest.raises(ValueError, match=rf"config\.json: quantization_config.*{message}"):
        Config(str(path), device="cpu", skip_tokenizer_init=True)


@pytest.mark.parametrize(
    "changes",
    [
        settings("gptq", 32) | {"dynamic": {"-:.*\\.mlp\\.gate": {}, "-:lm_head": {}}},
        settings("awq", 32) | {"modules_to_not_convert": ["lm_head", "mlp.gate"]},
        with_weights(actorder="static"),
    ],
)
def test_settings_that_are_read(tmp_path, changes):
    path = make_checkpoint(tmp_path, **SIZES)
    edit_json(path / "config.json", quantization_config=changes)
    assert isinstance(Config(str(path), device="cpu", skip_tokenizer_init=True).weight_format, Int4)


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


def test_reference_rounds_as_its_name_says():
    weight = torch.randn(3, 64)
    assert (dequantized(weight, 32, True) - weight).abs().max() < 0.5
