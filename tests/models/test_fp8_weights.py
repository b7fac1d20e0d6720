"""Engines with weights in fp8, against a model that rounds in the same places and is none of ours; and what is
refused."""

import logging

import pytest
import torch
from checkpoints import edit_json, edit_tensors, make_checkpoint, make_llm, needs_family, random_prompt
from configs import dummy
from families import fields_of
from fp8_checkpoints import (
    BLOCK_SIZES,
    BLOCKS,
    CHANNELS,
    TOLERANCE,
    make_fp8_checkpoint,
    quantize_checkpoint,
    recorded_inputs,
    reference_logprobs,
    scored,
    short_scores,
)
from gpus import pretend_gpu
from products import dequantized
from thread_ranks import make_llm_of_ranks

from nanovllm import SamplingParams
from nanovllm.config import FP8_CAPABILITY, Config
from nanovllm.layers.formats.fp8 import Fp8

PROMPT, COMPLETION = random_prompt(40, 1), random_prompt(60, 2)


def in_blocks(family="qwen3", **fields):
    """A row of STORED: the fields of a checkpoint whose layers are whole blocks of 128 x 128."""
    return family, BLOCK_SIZES | fields, True


HYBRID = fields_of("qwen3_next") | {"hidden_size": 128, "head_dim": 128}
HYBRID |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "intermediate_size": 128}
HYBRID |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "mlp_only_layers": [0]}
FACTORS = {"residual_multiplier": 0.22, "logits_scaling": 3.0, "embedding_multiplier": 8.0, "attention_bias": True}
# As published, the gates of linear attention, of experts and of the shared expert are not quantized.
UNQUANTIZED = ["lm_head", "model.visual", "mtp.fc", "model.layers.1.input_layernorm", "model.layers.1.mlp.gate"]
UNQUANTIZED += [f"model.layers.0.linear_attn.{gate}" for gate in ("in_proj_a", "in_proj_b", "in_proj_ba", "conv1d")]
UNQUANTIZED += ["model.layers.1.mlp.shared_expert_gate"]
# Family, fields, whether in blocks; test_families.py has all families whose weights are rounded while they are loaded.
STORED = {
    "channels": ("qwen3", {}, False),
    "blocks": in_blocks(),
    # Their scales have the factors, since e4m3 numbers cannot. The bias has it as ever.
    "factors of channels": ("granite", FACTORS, False),
    "factors of blocks": in_blocks("granite", **FACTORS),
    "blocks of experts": in_blocks("qwen3_moe", **EXPERTS),
    "blocks of a hybrid": ("qwen3_next", HYBRID, True),
}


@pytest.mark.parametrize(
    ("family", "fields", "is_blocked"),
    [pytest.param(*row, marks=needs_family(row[0]), id=name) for name, row in STORED.items()],
)
def test_weights_and_inputs_are_rounded_and_nothing_else(family, fields, is_blocked, tmp_path):
    """In a prefill and in decode steps; the reference computes all tokens at once."""
    plain, path = (make_checkpoint(tmp_path / name, family, **fields) for name in ("plain", "quantized"))
    quantize_checkpoint(path, is_blocked)
    if is_blocked and family != "granite":
        settings = BLOCKS | {"modules_to_not_convert": UNQUANTIZED}
        edit_json(path / "config.json", quantization_config=settings)
    # With log-probabilities of the prompt, or the last layer skips most of its tokens.
    params = SamplingParams(0, 12, ignore_eos=True, logprobs=1, prompt_logprobs=0)
    with make_llm(path) as llm, recorded_inputs() as inputs:
        (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    if family == "qwen3_next":
        # Chunks and single steps add up a state in other orders, and the norm of each head divides by what is left.
        inputs.is_hybrid = True
    tokens = output["token_ids"]
    steps = zip(PROMPT[1:] + tokens, output["prompt_logprobs"][1:] + output["logprobs"], strict=True)
    found = torch.tensor([of_step[token] for token, of_step in steps])
    expected = reference_logprobs(plain, PROMPT[:1], PROMPT[1:] + tokens, inputs, is_blocked)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def score(path, **options):
    with make_llm(path, **options) as llm:
        return scored(llm, PROMPT, COMPLETION)


def test_a_checkpoint_in_fp8_takes_the_option_too(tmp_path):
    path = make_fp8_checkpoint(tmp_path, in_blocks=False)
    assert torch.equal(score(path, quantization="fp8"), score(path))


@pytest.mark.parametrize("family", ["qwen3", "phi3"])  # In Phi-3's checkpoints q, k and v are one tensor.
def test_two_ranks_with_whole_blocks(family, tmp_path):
    sizes = {"hidden_size": 512 if family == "phi3" else 128, "intermediate_size": 256, "head_dim": 128}
    path = make_fp8_checkpoint(tmp_path, in_blocks=True, family=family, **sizes)
    found = []
    for num_ranks in (1, 2):
        with make_llm_of_ranks(path, num_ranks) as llm:
            found.append(short_scores(llm))
    assert (found[1] - found[0]).abs().amax(1).median() < TOLERANCE


def test_ranks_with_whole_experts_where_columns_would_cut_a_block(tmp_path):
    fields = EXPERTS | {"hidden_size": 128, "head_dim": 128, "intermediate_size": 512, "moe_intermediate_size": 128}
    path = make_fp8_checkpoint(tmp_path, in_blocks=True, family="qwen3_moe", **fields, num_key_value_heads=4)
    found = []
    for num_ranks in (1, 2, 4):
        with make_llm_of_ranks(path, num_ranks) as llm:
            found.append(short_scores(llm))
            experts = llm.model_runner.model.model.layers[1].mlp.experts
            assert experts.down_proj.weight.shape == (4 // num_ranks, 128, 128)
    for scores in found[1:]:
        assert (scores - found[0]).abs().amax(1).median() < TOLERANCE


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("qwen3", {"intermediate_size": 512}, r"num_key_value_heads \* head_dim .* 64"),
        (
            "qwen3_moe",
            EXPERTS | {"num_experts": 3, "head_dim": 128, "moe_intermediate_size": 128},
            r"moe_intermediate_size would be 64; .* that divides the number of experts \(3\)",
        ),
    ],
)
def test_blocks_that_ranks_would_cut_are_refused(family, fields, message, tmp_path):
    fields = BLOCK_SIZES | {"intermediate_size": 256} | fields
    path = make_fp8_checkpoint(tmp_path, in_blocks=True, family=family, **fields)
    with pytest.raises(ValueError, match=f"tensor_parallel_size=2: .*multiples of 128 on each rank, .*{message}"):
        make_llm(path, tensor_parallel_size=2)


def test_experts_are_quantized_one_by_one(tmp_path, monkeypatch):
    """A second copy of all experts would not fit beside the first."""
    path = make_checkpoint(tmp_path, family="qwen3_moe", **EXPERTS)
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


NOT_SUPPORTED = r".*not supported.*FP8_DYNAMIC"
NOT_USABLE = ": cannot be used: .*unquantized checkpoint"
KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
TRANSFORMS = {"config_groups": {"u": {"type": "hadamard", "apply": []}}}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (edited(BLOCKS, weight_block_size=[64, 64]), NOT_SUPPORTED),
        (edited(BLOCKS, weight_block_size=None), NOT_SUPPORTED),
        (edited(BLOCKS, activation_scheme="static"), NOT_SUPPORTED),
        (edited(BLOCKS, fmt="e5m2"), NOT_SUPPORTED),
        (with_group(weights=WEIGHTS | {"num_bits": 4}), NOT_SUPPORTED),
        (with_group(weights=WEIGHTS | {"strategy": "tensor_group"}), NOT_SUPPORTED),
        (with_group(input_activations=None), NOT_SUPPORTED),
        (with_group(output_activations=CHANNELS["config_groups"]["group_0"]["input_activations"]), NOT_SUPPORTED),
        (edited(CHANNELS, config_groups={}), NOT_SUPPORTED),
        ("fp8", NOT_USABLE),
        (edited(BLOCKS, weight_block_size=128), NOT_USABLE),
        (edited(BLOCKS, modules_to_not_convert=5), NOT_USABLE),
        (edited(CHANNELS, ignore="lm_head"), NOT_USABLE),
        (edited(CHANNELS, config_groups={"group_0": None}), NOT_USABLE),
        (with_group(weights="fp8"), NOT_USABLE),
        (edited(CHANNELS, transform_config=TRANSFORMS), ": transform_config is not supported"),
        (
            CHANNELS | {"config_groups": {}, "kv_cache_scheme": KV_SCHEME | {"type": "int"}},
            ": kv_cache_scheme=.* type 'float'",
        ),
        (edited(CHANNELS, ignore=["re:.*gate_proj$"]), ".*ignore names 're:"),
        (edited(CHANNELS, ignore=["lm_head", "model.layers.1.mlp.down_proj"]), ".*ignore names 'model.layers.1.mlp"),
        (edited(BLOCKS, modules_to_not_convert=["self_attn"]), ".*modules_to_not_convert names 'self_attn'"),
    ],
)
def test_settings_that_are_refused(model_dir, settings, message):
    with pytest.raises(ValueError, match=rf"config\.json: quantization_config{message}"):
        Config(model_dir(quantization_config=settings, **BLOCK_SIZES), device="cpu")


@pytest.mark.parametrize(
    "settings",
    [
        edited(CHANNELS, transform_config={}),  # as many have it
        edited(BLOCKS, modules_to_not_convert=["lm_head", "model.layers.0.input_layernorm"]),
        edited(CHANNELS, ignore=["lm_head", "re:.*mlp.gate$"]),
        edited(CHANNELS, ignore=["re:lm_head", "re:.*lm_head.*", "re:^model.norm$"]),
        edited(CHANNELS, ignore=["vision_tower.layers.0.mlp.fc1", "re:.*vision_tower.*", "multi_modal_projector"]),
    ],
)
def test_settings_that_are_read(model_dir, settings):
    assert Config(model_dir(quantization_config=settings, **BLOCK_SIZES), device="cpu").weight_format


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


@pytest.mark.parametrize("value", ["int3", "awq", 8, True])
def test_other_quantizations_are_refused(value):
    with pytest.raises(ValueError, match=f"quantization={value!r}: must be None or one of fp8"):
        dummy(quantization=value)


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
