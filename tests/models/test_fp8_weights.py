"""Engines with weights in fp8, against a model that rounds in the same places and is none of ours; and what is
refused."""

import logging

import pytest
import torch
from checkpoints import edit_json, edit_tensors, make_checkpoint, make_llm, random_prompt
from configs import dummy
from fp8_checkpoints import (
    BLOCK_SIZES,
    BLOCKS,
    CHANNELS,
    TOLERANCE,
    assert_scores_like_the_reference,
    make_fp8_checkpoint,
    many_scores,
    quantize_checkpoint,
    recorded_inputs,
    reference_logprobs,
    scored,
    short_scores,
)
from gpus import pretend_gpu
from products import dequantized

from nanovllm import SamplingParams
from nanovllm.config import FP8_CAPABILITY, Config

PROMPT, COMPLETION = random_prompt(40, 1), random_prompt(60, 2)


@pytest.fixture(scope="module", params=["while loading", "channels", "blocks"])
def case(request, tmp_path_factory):
    """(checkpoint, whether it is in blocks, the same one unquantized, options of the engine)."""
    in_blocks = request.param == "blocks"
    plain = make_checkpoint(tmp_path_factory.mktemp("plain"), **BLOCK_SIZES if in_blocks else {})
    if request.param == "while loading":
        return plain, False, plain, {"quantization": "fp8"}
    path = make_fp8_checkpoint(tmp_path_factory.mktemp("quantized"), in_blocks)
    return path, in_blocks, plain, {}


def score(path, **options):
    with make_llm(path, **options) as llm:
        return scored(llm, PROMPT, COMPLETION)


def test_weights_and_inputs_are_rounded_and_nothing_else(case):
    path, in_blocks, plain, options = case
    assert_scores_like_the_reference(path, plain, PROMPT, COMPLETION, in_blocks, **options)


def test_decode_steps_compute_what_prefills_do(case):
    path, in_blocks, plain, options = case
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
    params["prompt_logprobs"] = 1  # Otherwise the last layer skips most of a prompt's tokens.
    with make_llm(path, **options) as llm, recorded_inputs() as inputs:
        (output,) = llm.generate([PROMPT], SamplingParams(**params), use_tqdm=False)
    tokens = output["token_ids"]
    decoded = [logprobs[token] for token, logprobs in zip(tokens, output["logprobs"], strict=True)]
    # The reference computes all tokens at once.
    expected = reference_logprobs(plain, PROMPT, tokens, inputs, in_blocks)
    torch.testing.assert_close(torch.tensor(decoded), expected, atol=TOLERANCE, rtol=0)


def test_a_checkpoint_in_fp8_takes_the_option_too(tmp_path):
    path = make_fp8_checkpoint(tmp_path, in_blocks=False)
    assert torch.equal(score(path, quantization="fp8"), score(path))


def test_weights_of_two_ranks_are_rounded_no_worse(tmp_path):
    path = make_checkpoint(tmp_path)
    results = []
    for options in ({}, {"quantization": "fp8"}, {"quantization": "fp8", "tensor_parallel_size": 2}):
        with make_llm(path, **options) as llm:
            results.append(many_scores(llm))
    errors = [(result - results[0]).norm() for result in results[1:]]
    # Each rank has scales for its own columns, so the ranks round in other places, but no more.
    assert 0.75 * errors[0] < errors[1] < 1.25 * errors[0]


def test_two_ranks_with_whole_blocks(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128}
    path = make_fp8_checkpoint(tmp_path, in_blocks=True, **sizes)
    found = []
    for num_ranks in (1, 2):
        with make_llm(path, tensor_parallel_size=num_ranks) as llm:
            found.append(short_scores(llm))
    assert (found[1] - found[0]).abs().amax(1).median() < TOLERANCE


def test_blocks_that_ranks_would_cut_are_refused(tmp_path):
    path = make_fp8_checkpoint(tmp_path, in_blocks=True, intermediate_size=512)
    message = r"tensor_parallel_size=2: .* blocks of 128 x 128 .* of 128 .* num_key_value_heads \* head_dim .* 64"
    with pytest.raises(ValueError, match=message):
        make_llm(path, tensor_parallel_size=2)


@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-0.6B"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_published_shapes_divide_into_whole_blocks(model, num_ranks):
    config = dummy(model=model, device="cpu")
    config.hf_config.quantization_config = BLOCKS
    options = {"model": model, "hf_config": config.hf_config, "device": "cpu", "skip_tokenizer_init": True}
    assert dummy(**options, tensor_parallel_size=num_ranks).weight_format.is_blocked


def test_dummy_weights_are_quantized(tmp_path):
    path = make_checkpoint(tmp_path)
    with make_llm(path, quantization="fp8", load_format="dummy") as llm:
        layer = llm.model_runner.model.model.layers[1]
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            values = dequantized(linear.matrix)
            assert linear.weight.dtype == torch.float8_e4m3fn
            assert abs(values.std() - 0.02) < 0.002
        assert llm.model_runner.model.lm_head.weight.dtype == torch.float32


def edited(settings, **changes):
    return {key: value for key, value in (settings | changes).items() if value is not None}


def with_group(**changes):
    group = CHANNELS["config_groups"]["group_0"]
    return edited(CHANNELS, config_groups={"group_0": group | changes})


WEIGHTS = CHANNELS["config_groups"]["group_0"]["weights"]


@pytest.mark.parametrize(
    "settings",
    [
        edited(BLOCKS, weight_block_size=[64, 64]),
        edited(BLOCKS, weight_block_size=None),
        edited(BLOCKS, activation_scheme="static"),
        edited(BLOCKS, fmt="e5m2"),
        with_group(weights=WEIGHTS | {"num_bits": 4}),
        with_group(weights=WEIGHTS | {"strategy": "tensor_group"}),
        with_group(input_activations=None),
        with_group(output_activations=CHANNELS["config_groups"]["group_0"]["input_activations"]),
        edited(CHANNELS, config_groups={}),
    ],
)
def test_other_settings_are_refused(tmp_path, settings):
    path = make_checkpoint(tmp_path)
    edit_json(path / "config.json", quantization_config=settings)
    with pytest.raises(ValueError, match=r"config\.json: quantization_config .*not supported.*FP8_DYNAMIC"):
        make_llm(path)


@pytest.mark.parametrize(
    "settings",
    [
        "fp8",
        edited(BLOCKS, weight_block_size=128),
        edited(BLOCKS, modules_to_not_convert=5),
        edited(CHANNELS, ignore="lm_head"),
        edited(CHANNELS, config_groups={"group_0": None}),
        with_group(weights="fp8"),
    ],
)
def test_settings_of_another_type_are_refused(tmp_path, settings):
    path = make_checkpoint(tmp_path)
    edit_json(path / "config.json", quantization_config=settings)
    with pytest.raises(
        ValueError, match=r"config\.json: quantization_config: cannot be used: .*unquantized checkpoint"
    ):
        make_llm(path)


def test_rotated_weights_are_refused(tmp_path):
    path = make_checkpoint(tmp_path)
    transforms = {"config_groups": {"u": {"type": "hadamard", "apply": []}}}
    edit_json(path / "config.json", quantization_config=edited(CHANNELS, transform_config=transforms))
    with pytest.raises(ValueError, match=r"config\.json: quantization_config: transform_config is not supported"):
        make_llm(path)
    edit_json(path / "config.json", quantization_config=edited(CHANNELS, transform_config={}))  # as many have it
    assert Config(str(path), device="cpu", skip_tokenizer_init=True).weight_format


KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}


@pytest.mark.parametrize("quantizes_weights", [False, True])
def test_a_checkpoint_for_an_fp8_cache(tmp_path, caplog, quantizes_weights):
    """As llm-compressor writes them: weights in the model's dtype, or with a scale for each channel."""
    path = make_checkpoint(tmp_path)
    if quantizes_weights:
        quantize_checkpoint(path, in_blocks=False)
    groups = CHANNELS["config_groups"] if quantizes_weights else {}
    settings = CHANNELS | {"config_groups": groups, "kv_cache_scheme": KV_SCHEME}
    edit_json(path / "config.json", quantization_config=settings)
    names = [f"model.layers.{layer}.self_attn.{part}_scale" for layer in range(2) for part in "kv"]
    edit_tensors(path, lambda tensors: tensors.update({name: torch.tensor([0.25]) for name in names}))
    with caplog.at_level(logging.INFO), make_llm(path) as llm:
        assert llm.config.kv_cache_dtype == torch.float32
        assert (llm.config.weight_format is not None) == quantizes_weights
        plain = scored(llm, PROMPT, COMPLETION)
    assert "has a kv_cache_scheme, which kv_cache_dtype='fp8' uses" in caplog.text
    with make_llm(path, kv_cache_dtype="fp8") as llm:
        assert all((scales == 0.25).all() for scales in llm.model_runner.kv_store.scales)
        assert 0 < (scored(llm, PROMPT, COMPLETION) - plain).abs().mean() < 0.3


def test_a_cache_of_integers_is_refused(tmp_path):
    path = make_checkpoint(tmp_path)
    settings = CHANNELS | {"config_groups": {}, "kv_cache_scheme": KV_SCHEME | {"type": "int"}}
    edit_json(path / "config.json", quantization_config=settings)
    with pytest.raises(ValueError, match=r"config\.json: quantization_config: kv_cache_scheme=.* type 'float'"):
        make_llm(path)


@pytest.mark.parametrize("value", ["int3", "awq", 8, True])
def test_other_quantizations_are_refused(value):
    with pytest.raises(ValueError, match=f"quantization={value!r}: must be None or one of fp8"):
        dummy(quantization=value)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (edited(BLOCKS, modules_to_not_convert=["lm_head", "model.layers.0.input_layernorm"]), None),
        (edited(CHANNELS, ignore=["lm_head", "re:.*mlp.gate$"]), None),
        (edited(CHANNELS, ignore=["re:lm_head", "re:.*lm_head.*", "re:^model.norm$"]), None),
        (
            edited(CHANNELS, ignore=["vision_tower.layers.0.mlp.fc1", "re:.*vision_tower.*", "multi_modal_projector"]),
            None,
        ),
        (edited(CHANNELS, ignore=["re:.*gate_proj$"]), "ignore names 're:"),
        (edited(CHANNELS, ignore=["lm_head", "model.layers.1.mlp.down_proj"]), "ignore names 'model.layers.1.mlp.down"),
        (edited(BLOCKS, modules_to_not_convert=["self_attn"]), "modules_to_not_convert names 'self_attn'"),
    ],
)
def test_layers_that_are_left_out(tmp_path, settings, names):
    path = make_checkpoint(tmp_path, **BLOCK_SIZES)
    edit_json(path / "config.json", quantization_config=settings)
    if names is None:
        assert Config(str(path), device="cpu", skip_tokenizer_init=True).weight_format
        return
    with pytest.raises(ValueError, match=names):
        make_llm(path)


def test_a_checkpoint_without_its_scales(tmp_path):
    path = make_checkpoint(tmp_path)
    quantize_checkpoint(path, in_blocks=False)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    edit_tensors(path, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"lacks '{name}'"):
        make_llm(path)


@pytest.mark.parametrize("in_blocks", [False, True])
@pytest.mark.parametrize("value", [-0.01, float("nan"), float("inf")])
def test_wrong_scales(tmp_path, in_blocks, value):
    path = make_fp8_checkpoint(tmp_path, in_blocks)
    name = "model.layers.1.mlp.up_proj.weight_scale" + "_inv" * in_blocks
    edit_tensors(path, lambda tensors: tensors[name][-1].fill_(value))
    with pytest.raises(ValueError, match=rf"model\.safetensors: tensor '{name}' must hold finite scales >= 0"):
        make_llm(path)


def test_rows_of_zeros_and_of_numbers_next_to_it(tmp_path):
    """Like the dead neurons of a model that was trained with weight decay."""
    path = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    name = "model.layers.1.mlp.up_proj.weight"
    expected = []
    for row in (torch.zeros(64), torch.linspace(-1e-38, 1e-38, 64), torch.arange(64) % 2 * 1e-40):
        edit_tensors(path, lambda tensors, row=row: tensors[name][5].copy_(row))
        expected.append(score(path, quantization="fp8", dtype="bfloat16"))
    assert all(torch.equal(scores, expected[0]) for scores in expected)


@pytest.mark.parametrize(
    ("num_ranks", "message"),
    [
        (1, "quantization: .* hidden_size would be 72; use the unquantized checkpoint without quantization"),
        (2, "tensor_parallel_size=2: .* hidden_size would be 72; use fewer ranks, or the unquantized"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path, num_ranks, message):
    path = make_checkpoint(tmp_path, hidden_size=72)
    with pytest.raises(ValueError, match=message):
        make_llm(path, quantization="fp8", tensor_parallel_size=num_ranks)


def test_a_head_in_fp8(tmp_path):
    path = make_fp8_checkpoint(tmp_path, in_blocks=False)
    name = "lm_head.weight"
    edit_tensors(path, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(
        ValueError, match=rf"'{name}' has dtype F8_E4M3: .* only linear layers .* all else must be BF16"
    ):
        make_llm(path)


def test_weights_that_are_not_what_the_configuration_says(tmp_path):
    path = make_checkpoint(tmp_path)
    edit_json(path / "config.json", quantization_config=CHANNELS)
    with pytest.raises(ValueError, match=r"dtype F32: config.json's quantization_config says F8_E4M3"):
        make_llm(path)
    quantize_checkpoint(path, in_blocks=False)
    edit_json(path / "config.json", quantization_config=None)
    with pytest.raises(ValueError, match="dtype F8_E4M3: quantized checkpoints do not load unless"):
        make_llm(path)


@pytest.mark.parametrize(
    ("settings", "capability", "allowed"),
    [
        (None, (8, 9), True),
        (None, (9, 0), True),
        (None, (10, 0), True),
        (None, (8, 0), False),
        (BLOCKS, (9, 0), True),
        (BLOCKS, (8, 9), False),
        (BLOCKS, (10, 0), False),
    ],
)
def test_gpus_without_the_products_are_refused(monkeypatch, settings, capability, allowed):
    config = dummy(device="cpu").hf_config
    config.quantization_config = settings
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    pretend_gpu(monkeypatch, capability=capability)
    options = {"hf_config": config, "max_num_batched_tokens": 1024, "quantization": None if settings else "fp8"}
    if allowed:
        assert dummy(**options).weight_format.is_blocked == bool(settings)
        config.dtype = "float16"  # The model's own, which "auto" takes, is none either.
        for dtype in ("float16", "auto"):
            with pytest.raises(ValueError, match="dtype='float16': must be bfloat16 with weights in fp8"):
                dummy(**options, dtype=dtype)
        return
    # What the kernels of an fp8 KV cache need is less.
    offer = ", perhaps with kv_cache_dtype='fp8', which works here" if capability >= FP8_CAPABILITY else ""
    found = rf"this one has {capability[0]}\.{capability[1]}"
    with pytest.raises(ValueError, match=f"{found}; use the unquantized checkpoint without quantization{offer}$"):
        dummy(**options)
