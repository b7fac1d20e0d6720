"""Engines with weights in fp8, against a model that rounds in the same places and is none of ours; and what is
refused."""

import pytest
import torch
from checkpoints import edit_json, edit_tensors, make_checkpoint, make_llm, random_prompt
from configs import dummy
from fp8_checkpoints import BLOCK_SIZES, BLOCKS, CHANNELS, make_fp8_checkpoint, quantise_checkpoint, reference_model

from nanovllm import SamplingParams
from nanovllm.config import Config

PROMPT, COMPLETION = random_prompt(40, 1), random_prompt(60, 2)


@pytest.fixture(scope="module", params=["while loading", "channels", "blocks"])
def case(request, tmp_path_factory):
    """(checkpoint, whether it is in blocks, the same one unquantised, options of the engine)."""
    in_blocks = request.param == "blocks"
    plain = make_checkpoint(tmp_path_factory.mktemp("plain"), **BLOCK_SIZES if in_blocks else {})
    if request.param == "while loading":
        return plain, False, plain, {"quantization": "fp8"}
    path = make_fp8_checkpoint(tmp_path_factory.mktemp("quantised"), in_blocks)
    return path, in_blocks, plain, {}


@torch.inference_mode()
def logprobs_of(model):
    logits = model(torch.tensor([PROMPT + COMPLETION])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(COMPLETION)[:, None]).flatten()


def scored(path, **options):
    with make_llm(path, **options) as llm:
        (score,) = llm.score([PROMPT], [COMPLETION], use_tqdm=False)
    return torch.tensor(score["logprobs"])


def test_weights_and_inputs_are_rounded_and_nothing_else(case):
    path, in_blocks, plain, options = case
    found, expected = scored(path, **options), logprobs_of(reference_model(plain, in_blocks))
    unrounded = logprobs_of(reference_model(plain, in_blocks, with_inputs=False))
    # Sums in another order may move an input over the edge between two e4m3 numbers, a few times in a prompt.
    assert (found - expected).norm() < 0.2 * (unrounded - expected).norm()


def test_decode_steps_compute_what_prefills_do(case):
    path, *_, options = case
    params = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "logprobs": 1}
    with make_llm(path, **options) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(**params), use_tqdm=False)
        tokens = output["token_ids"]
        (score,) = llm.score([PROMPT], [tokens], use_tqdm=False)
    decoded = [logprobs[token] for token, logprobs in zip(tokens, output["logprobs"], strict=True)]
    torch.testing.assert_close(torch.tensor(decoded), torch.tensor(score["logprobs"]), atol=0.03, rtol=0)


def test_a_checkpoint_in_fp8_takes_the_option_too(tmp_path):
    path = make_fp8_checkpoint(tmp_path, in_blocks=False)
    assert torch.equal(scored(path, quantization="fp8"), scored(path))


def test_two_ranks(tmp_path):
    path = make_checkpoint(tmp_path)
    plain = scored(path)
    errors = [(scored(path, quantization="fp8", tensor_parallel_size=size) - plain).norm() for size in (1, 2)]
    # Each rank has scales for its own columns, so the ranks round in other places, but no more.
    assert 0.5 * errors[0] < errors[1] < 1.5 * errors[0]


def test_two_ranks_with_whole_blocks(tmp_path):
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 128}
    path = make_fp8_checkpoint(tmp_path, in_blocks=True, **sizes)
    torch.testing.assert_close(scored(path, tensor_parallel_size=2), scored(path), atol=0.05, rtol=0)


def test_blocks_that_ranks_would_cut_are_refused(tmp_path):
    path = make_fp8_checkpoint(tmp_path, in_blocks=True)
    message = "tensor_parallel_size=2: weights in blocks of 128 x 128 .* multiples of 128 .*key rows would be 64"
    with pytest.raises(ValueError, match=message):
        make_llm(path, tensor_parallel_size=2)


@pytest.mark.parametrize("model", ["Qwen3-8B", "Qwen3-0.6B"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_published_shapes_divide_into_whole_blocks(model, num_ranks):
    config = dummy(model=model, device="cpu")
    config.hf_config.quantization_config = BLOCKS
    options = {"model": model, "hf_config": config.hf_config, "device": "cpu", "skip_tokenizer_init": True}
    assert dummy(**options, tensor_parallel_size=num_ranks).weight_format.is_blocked


def test_dummy_weights_are_quantised(tmp_path):
    path = make_checkpoint(tmp_path)
    with make_llm(path, quantization="fp8", load_format="dummy") as llm:
        layer = llm.executor.model_runner.model.model.layers[1]
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            values = linear.matrix.dequantized()
            assert linear.weight.dtype == torch.float8_e4m3fn
            assert abs(values.std() - 0.02) < 0.002
        assert llm.executor.model_runner.model.lm_head.weight.dtype == torch.float32


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
        with_group(weights=WEIGHTS | {"strategy": "tensor"}),
        with_group(input_activations=None),
        edited(CHANNELS, kv_cache_scheme={"num_bits": 8}),
    ],
)
def test_other_settings_are_refused(tmp_path, settings):
    path = make_checkpoint(tmp_path)
    edit_json(path / "config.json", quantization_config=settings)
    with pytest.raises(ValueError, match=r"config\.json: quantization_config .*not supported.*FP8_DYNAMIC"):
        make_llm(path)


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        (edited(BLOCKS, modules_to_not_convert=["lm_head", "model.layers.0.input_layernorm"]), None),
        (edited(CHANNELS, ignore=["lm_head", "re:.*mlp.gate$"]), None),
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
    quantise_checkpoint(path, in_blocks=False)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    edit_tensors(path, lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=f"lacks '{name}'"):
        make_llm(path)


def test_weights_that_are_not_what_the_configuration_says(tmp_path):
    path = make_checkpoint(tmp_path)
    edit_json(path / "config.json", quantization_config=CHANNELS)
    with pytest.raises(ValueError, match=r"dtype F32: config.json's quantization_config says F8_E4M3"):
        make_llm(path)
    quantise_checkpoint(path, in_blocks=False)
    edit_json(path / "config.json", quantization_config=None)
    with pytest.raises(ValueError, match="dtype F8_E4M3: quantised checkpoints do not load unless"):
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
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: torch.Size())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    options = {"hf_config": config, "max_num_batched_tokens": 1024, "quantization": None if settings else "fp8"}
    if allowed:
        assert dummy(**options).weight_format.is_blocked == bool(settings)
        with pytest.raises(ValueError, match="dtype='float16': must be bfloat16 or auto"):
            dummy(**options, dtype="float16")
        return
    with pytest.raises(ValueError, match=rf"compute capability .* this one has {capability[0]}\.{capability[1]}"):
        dummy(**options)
