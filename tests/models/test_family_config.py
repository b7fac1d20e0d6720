"""What each family's configuration may ask for, and the error that names what it may not."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from checkpoints import needs_transformers, skip_unless_known
from configs import NEW_STYLE, OLD_STYLE
from families import FAMILIES
from transformers import CONFIG_MAPPING

from nanovllm.bench.floor import ModelSize
from nanovllm.config import Config
from nanovllm.layers.backends.torch_backend import TorchBackend
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models import hf_config, registry
from nanovllm.models.hf_config import windows_of_layers, with_layer_types
from nanovllm.models.loader import num_checkpoint_params
from nanovllm.models.make_model import make_model
from nanovllm.models.presets import _PRESETS, PRESET_NAMES, preset_config
from nanovllm.models.registry import model_class

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
QUERIES = {"rope_type": "default", "llama_4_scaling_beta": 0.1}
WINDOW = {"sliding_window": 64}
NO_PLE = {"hidden_size_per_layer_input": 0}


@pytest.fixture
def family_dir(model_dir):
    """family_dir(family, **changes) -> a directory with such a config.json."""

    def make(family, **changes):
        skip_unless_known(family)
        changes |= {"model_type": family, "architectures": [FAMILIES[family].architecture], "pad_token_id": None}
        # RoPE's settings differ by the kind of layer in these, and all releases read the old spelling.
        return model_dir(OLD_STYLE if family in ("gemma3_text", "olmo3") else NEW_STYLE, **changes)

    return make


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"mlp_bias": True}, "mlp_bias=True: is not supported for llama"),
        ("llama", WINDOW, "sliding_window=64: is not supported for llama"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("llama", {"attention_bias": "yes"}, "attention_bias='yes': must be true or false"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5: is not supported for llama"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types="),
        ("llama", {"is_causal": False}, "is_causal=False: is not supported for llama"),
        ("llama", {"per_layer_config": {"0": {"intermediate_size": 48}}}, "per_layer_config=.*: is not supported"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 0}}, "rope_theta=0"),
        ("llama", {"rope_parameters": LLAMA3}, "low_freq_factor"),
        (
            "llama",
            {"rope_parameters": LLAMA3 | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            r"low_freq_factor=4\.0, high_freq_factor=1\.0: the first must be less",
        ),
        ("llama", {"rope_parameters": LONGROPE | {"long_factor": [2.0] * 7}}, "long_factor must hold 8 numbers"),
        ("llama", {"rope_parameters": LONGROPE | {"long_factor": ["2"] * 8}}, r"long_factor=\['2'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 8.0}}, "rope_type='dynamic' is not supported"),
        ("mistral", {"rope_parameters": QUERIES}, "llama_4_scaling_beta=0.1: is not supported for mistral"),
        ("ministral3", {"rope_parameters": QUERIES}, "llama_4_scaling_beta=0.1 needs original_max_position_embeddings"),
        ("mistral", {"attention_bias": True}, "attention_bias=True: is not supported for mistral"),
        ("mistral", {"sliding_window": 0}, "sliding_window=0: must be an integer"),
        # transformers would give all layers the window.
        ("mistral", WINDOW | {"use_sliding_window": False}, "use_sliding_window=False: is not supported for mistral"),
        ("phi3", WINDOW | {"max_window_layers": 1}, "max_window_layers=1: is not supported for phi3"),
        ("qwen2", WINDOW | {"use_sliding_window": True, "max_window_layers": "1"}, "max_window_layers='1'"),
        ("qwen3_moe", {"norm_topk_prob": "false"}, "norm_topk_prob='false': must be true or false"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, r"mlp_only_layers=\[-1\]: must be a list of layers"),
        ("qwen3_moe", {"num_experts_per_tok": 129}, r"num_experts_per_tok=129: must be an integer in 1\.\.128"),
        ("gpt_oss", {"swiglu_limit": 0}, "swiglu_limit=0: must be a finite number > 0"),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5: must be an integer in"),
        ("llama", {"swiglu_limit": 7.0}, "swiglu_limit=7.0: is not supported for llama"),
        ("olmo2", {"clip_qkv": 8.0}, "clip_qkv=8.0: is not supported for olmo2"),
        ("olmo3", {"use_sliding_window": False, **WINDOW}, "use_sliding_window=False: is not supported for olmo3"),
        ("olmo3", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types="),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "is_causal=False|use_bidirectional_attention=True"),
        ("gemma3_text", {"hidden_activation": "gelu"}, "hidden_activation='gelu'"),
        ("gemma3_text", {"use_sliding_window": False}, "use_sliding_window=False"),
        ("gemma4_text", {}, "hidden_size_per_layer_input=256: is not supported for gemma4_text"),
        (
            "gemma4_text",
            NO_PLE | {"num_kv_shared_layers": 1},
            "num_kv_shared_layers=1: is not supported for gemma4_text",
        ),
        ("gemma4_text", NO_PLE | {"num_experts": 4}, "num_experts=4: needs enable_moe_block=true"),
        (
            "gemma4_text",
            NO_PLE | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5, "moe_intermediate_size": 8},
            r"top_k_experts=5: must be an integer in 1\.\.4",
        ),
        ("gemma4_text", NO_PLE | {"use_bidirectional_attention": "all"}, "is_causal=False"),
        ("gemma4_text", NO_PLE | {"global_head_dim": 31}, "global_head_dim=31: must be even"),
        (
            "exaone4",
            WINDOW | {"sliding_window_pattern": "LLLX"},
            "sliding_window_pattern='LLLX': must be an integer in",
        ),
        ("exaone4", WINDOW | {"sliding_window_pattern": ""}, "sliding_window_pattern='': must be an integer in"),
        ("exaone4", WINDOW | {"sliding_window_pattern": 0}, "sliding_window_pattern=0: must be an integer in"),
        ("exaone4", WINDOW | {"use_sliding_window": False}, "use_sliding_window=False: is not supported for exaone4"),
        ("seed_oss", {"mlp_bias": True}, "mlp_bias=True: is not supported for seed_oss"),
        ("seed_oss", {"attention_out_bias": 1}, "attention_out_bias=1: must be true or false"),
        ("llama", {"attention_out_bias": True}, "attention_out_bias=True: is not supported for llama"),
        ("granite", {"mlp_bias": True}, "mlp_bias=True: is not supported for granite"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0: must be a finite number > 0"),
        ("granite", {"residual_multiplier": "0.22"}, "residual_multiplier='0.22': must be a finite number > 0"),
        ("llama", {"residual_multiplier": 0.22}, "residual_multiplier=0.22: is not supported for llama"),
        ("phi3", {"partial_rotary_factor": 0.1}, "1 of 16"),
        ("phi3", {"attention_bias": True}, "attention_bias=True"),
        ("qwen3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0"),
        ("smollm3", {"mlp_bias": True}, "mlp_bias=True: is not supported for smollm3"),
        ("smollm3", {"no_rope_layers": [1]}, r"no_rope_layers=\[1\]: must be a list of 2 flags"),
    ],
    ids=str,
)
def test_what_is_not_implemented_is_refused_by_name(family_dir, family, changes, message):
    directory = family_dir(family, **changes)
    with pytest.raises(ValueError, match=message) as error:
        Config(directory)
    assert str(error.value).startswith(f"{Path(directory, 'config.json')}: ")


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": False, "pretraining_tp": 1}),
        ("mistral", {"sliding_window": None}),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 1, **WINDOW}),
        ("qwen2", {"layer_types": ["full_attention"] * 2}),
        ("qwen3_moe", {"num_experts": 0, "mlp_only_layers": None}),
        ("smollm3", {"use_sliding_window": False, "no_rope_layers": [1, 0], **WINDOW}),
        ("exaone4", {"sliding_window": None, "sliding_window_pattern": 0, "layer_types": ["full_attention"] * 2}),
        ("exaone4", {"sliding_window": None, "sliding_window_pattern": "LLLG"}),
        ("seed_oss", {"attention_out_bias": False, "mlp_bias": False, "residual_dropout": 0.1}),
    ],
    ids=str,
)
def test_what_changes_nothing_is_accepted(family_dir, family, changes):
    config = Config(family_dir(family, **changes)).hf_config
    assert not any(model_class(config).checked_spec(config).windows)


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_either_spelling_of_the_number_of_experts(family_dir, spelling):
    config = Config(family_dir("qwen3_moe", **{spelling: 5}, num_experts_per_tok=2)).hf_config
    model = make_model(config, torch.bfloat16, torch.device("meta"), 16, TorchBackend(), TensorParallel(), Matmul())
    assert len(model.model.layers[0].mlp.gate.weight) == 5


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None,) * 3),
        ({"sliding_window": None}, (None,) * 3),
        ({"sliding_window": 64}, (64,) * 3),
        ({"sliding_window": 64, "sliding_window_pattern": 2}, (64, None, 64)),
        ({"sliding_window": 64, "sliding_window_pattern": "LG"}, (64, None, None)),  # The last layer never has one.
        ({"sliding_window": 64, "sliding_window_pattern": "GL"}, (None, 64, None)),
        ({"sliding_window": None, "layer_types": ["sliding_attention"] * 3}, (None,) * 3),
        ({"sliding_window": 64, "use_sliding_window": False}, (None,) * 3),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 1}, (None, 64, 64)),
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"] * 2}, (64, None, 64)),
    ],
    ids=str,
)
def test_which_layers_have_a_window(fields, windows):
    """By the names of transformers 4 and 5."""
    config = SimpleNamespace(num_hidden_layers=3, max_position_embeddings=512, **fields)
    assert windows_of_layers(config) == windows


def test_kinds_of_layers_that_contradict_the_rest_are_refused():
    fields = {"num_hidden_layers": 3, "sliding_window": 8}
    with pytest.raises(ValueError, match="layer_types"):
        windows_of_layers(SimpleNamespace(layer_types=["full_attention"], **fields))
    fields |= {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}
    with pytest.raises(ValueError, match="use_sliding_window=False: contradicts layer_types"):
        windows_of_layers(SimpleNamespace(**fields))


def test_a_text_says_which_layers_have_a_window(family_dir):
    """Without layer_types, which transformers needs. With a window, the layers without it have no RoPE."""
    fields = {"num_hidden_layers": 8, "sliding_window_pattern": "LLLG"}
    # By default a model of this family has a window of 4096.
    for window in (64, None, ...):
        config = Config(family_dir("exaone4", name=f"{window}", sliding_window=window, **fields)).hf_config
        spec = model_class(config).checked_spec(config)
        window = 4096 if window is ... else window
        assert spec.windows == ((window,) * 3 + (None,)) * 2
        assert [rope is None for rope in spec.ropes] == [window is not None and each is None for each in spec.windows]


def test_layer_types_come_before_a_text():
    content = {"num_hidden_layers": 2, "sliding_window": 64, "sliding_window_pattern": "LG"}
    listed = content | {"layer_types": ["full_attention", "sliding_attention"]}
    assert with_layer_types(listed) == listed
    assert with_layer_types(content)["layer_types"] == ["sliding_attention", "full_attention"]


# A value of each key of `_SWITCHES` that changes something.
CHANGES = {
    "attention_bias": True,
    "attention_out_bias": True,
    "attn_output_gate": False,
    "mlp_bias": True,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 1,
    "enable_moe_block": True,
    "qkv_bias": True,
    "o_bias": True,
    "hidden_act": "gelu",
    "sliding_window": 64,
    "use_sliding_window": True,
    "use_bidirectional_attention": "all",
    "is_causal": False,
    "attention_chunk_size": 64,
    "llama_4_scaling_beta": 0.1,
    "no_rope_layers": [1, 0],
    "partial_rotary_factor": 0.5,
    "qk_layernorm": True,
    "use_qk_norm": True,
    "clip_qkv": 8.0,
    "query_pre_attn_scalar": 64,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "embedding_multiplier": 2.0,
    "attention_multiplier": 2.0,
    "residual_multiplier": 2.0,
    "logits_scaling": 2.0,
    "logit_scale": 2.0,
    "num_experts": 4,
    "num_local_experts": 4,
    "swiglu_alpha": 1.5,
    "swiglu_limit": 7.0,
}


def test_every_key_that_changes_something_is_refused_by_name():
    assert CHANGES.keys() == hf_config._SWITCHES.keys()
    for name, value in CHANGES.items():
        config = SimpleNamespace(model_type="llama", **{name: value})
        with pytest.raises(ValueError, match=re.escape(f"{name}={value!r}: is not supported for llama")):
            hf_config.check_switches(config, frozenset())
        hf_config.check_switches(config, frozenset({name}))


# Keys of the families' configurations that `spec`, or what it calls, reads without a place in `_SWITCHES`.
READ = {
    *("bos_token_id", "pad_token_id"),  # by the tokenizer
    *("rope_parameters", "original_max_position_embeddings", "layer_types", "hidden_activation", "per_layer_config"),
    *("moe_intermediate_size", "num_experts_per_tok", "top_k_experts", "shared_expert_intermediate_size"),
    "decoder_sparse_step",
    *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim"),
    *("linear_num_key_heads", "linear_num_value_heads"),
}
# Keys that change no token: of training, of transformers' own work, and what another key repeats or switches on.
IGNORED = {
    *("initializer_range", "attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop"),
    *("output_router_logits", "router_aux_loss_coef", "use_cache", "pretraining_tp"),
    *("no_rope_layer_interval", "_sliding_window_pattern"),  # no_rope_layers and layer_types follow from them.
    *("vocab_size_per_layer_input", "use_double_wide_mlp"),  # with hidden_size_per_layer_input, num_kv_shared_layers
}


@needs_transformers("5")  # Earlier releases have names of their own for some keys.
def test_every_key_of_every_family_is_known():
    """A key that a family's configuration has in transformers changes the model, or somebody has seen that it does
    not."""
    from transformers import PreTrainedConfig  # by another name in earlier releases

    known = {*hf_config._SWITCHES, *hf_config._REQUIRED, *hf_config._OPTIONAL, *READ, *IGNORED}
    for family in FAMILIES.keys() & CONFIG_MAPPING.keys():
        keys = CONFIG_MAPPING[family]().to_dict().keys() - PreTrainedConfig().to_dict().keys()
        assert keys <= known, f"{family}: {sorted(keys - known)}: see section 3 of docs/adding-a-model.md"


# Billions of parameters, from the model cards. Those of Qwen3.5 count a vision tower too, which is not here.
PUBLISHED = {
    "Qwen3-0.6B": 0.6,
    "Qwen3-1.7B": 1.72,
    "Qwen3-4B": 4.0,
    "Qwen3-8B": 8.2,
    "Qwen3-14B": 14.8,
    "Qwen3-32B": 32.8,
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235.1,
    "Qwen3.5-0.8B": 0.752,
    "Qwen3.5-4B": 4.2,
    "Qwen3.5-9B": 8.95,
    "Qwen3.5-27B": 26.9,
    "Qwen3.6-27B": 26.9,
    "Qwen3.5-35B-A3B": 34.7,
    "Qwen3.6-35B-A3B": 34.7,
    "Qwen3-VL-2B": 1.72,
    "Qwen3-VL-4B": 4.02,
    "Qwen3-VL-8B": 8.19,
    "Qwen3-VL-32B": 32.76,
    "Qwen3-VL-30B-A3B": 30.53,
    "Qwen3-VL-235B-A22B": 235.1,
    "Qwen2.5-0.5B": 0.49,
    "Qwen2.5-1.5B": 1.54,
    "Qwen2.5-3B": 3.09,
    "Qwen2.5-7B": 7.61,
    "Qwen2.5-14B": 14.7,
    "Qwen2.5-32B": 32.5,
    "Llama-3.2-1B": 1.23,
    "Llama-3.2-3B": 3.21,
    "Llama-3.1-8B": 8.03,
    "Llama-3.1-70B": 70.6,
    "Mistral-7B-v0.3": 7.25,
    "Mistral-Nemo-Base-2407": 12.2,
    "Ministral-3-3B-Base-2512": 3.4,
    "Ministral-3-8B-Base-2512": 8.4,
    "Ministral-3-14B-Base-2512": 13.5,
    "granite-3.3-2b-instruct": 2.53,
    "granite-3.3-8b-instruct": 8.17,
    "SmolLM3-3B": 3.08,
    "phi-4": 14.7,
    "Phi-4-mini-instruct": 3.84,
    "OLMo-2-1124-7B": 7.3,
    "OLMo-2-1124-13B": 13.7,
    "Olmo-3-1025-7B": 7.3,
    "Olmo-3-1125-32B": 32.2,
    "EXAONE-4.0-1.2B": 1.28,
    "EXAONE-4.0-32B": 32.0,
    "Seed-OSS-36B-Instruct": 36.15,
    "gemma-3-1b": 1.0,
    "gemma-3-4b": 3.88,
    "gemma-3-12b": 11.77,
    "gemma-3-27b": 27.0,
    "gemma-4-12B": 11.95,
    "gemma-4-26B-A4B": 25.23,
    "gemma-4-31B": 30.7,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
}
# Of their vision towers.
TOWERS = {
    "Qwen3.5-0.8B": 0.1,
    "Qwen3.5-4B": 0.334,
    "Qwen3.5-9B": 0.456,
    "Qwen3.5-27B": 0.461,
    "Qwen3.6-27B": 0.461,
    "Qwen3.5-35B-A3B": 0.447,
    "Qwen3.6-35B-A3B": 0.447,
    "Qwen3-VL-2B": 0.407,
    "Qwen3-VL-4B": 0.415,
    "Qwen3-VL-8B": 0.576,
    "Qwen3-VL-32B": 0.595,
    "Qwen3-VL-30B-A3B": 0.539,
    "Qwen3-VL-235B-A22B": 0.576,
    "gemma-3-4b": 0.42,
    "gemma-3-12b": 0.421,
    "gemma-3-27b": 0.423,
    "gemma-4-12B": 0.05,
    "gemma-4-26B-A4B": 0.573,
    "gemma-4-31B": 0.576,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if "235B" in name else ()) for name in PUBLISHED]
)
def test_a_published_shape_has_its_parameters(name):
    family = _PRESETS[name][1]["model_type"]
    if family not in CONFIG_MAPPING:
        with pytest.raises(ValueError, match=rf"{name}: transformers .* does not know {family}: upgrade it"):
            preset_config(name)
        return
    config = Config(name, load_format="dummy", device="cpu").hf_config
    model = make_model(config, torch.bfloat16, torch.device("meta"), 16, TorchBackend(), TensorParallel(), Matmul())
    of_tower = 0
    if not transformers.__version__.startswith("4."):
        of_tower = sum(each.numel() for name, each in model.named_parameters() if name.startswith("vision."))
        assert of_tower / 1e9 == pytest.approx(TOWERS.get(name, 0), rel=0.012)
    num_params = num_checkpoint_params(model) - of_tower
    assert num_params / 1e9 == pytest.approx(PUBLISHED[name], rel=0.012)
    # The floor of bench.py counts all but norms and biases, and the embedding where it is not the head. gpt-oss's
    # experts have biases too.
    size, embedding = ModelSize.of(config, torch.bfloat16), config.vocab_size * config.hidden_size
    counted = size.params_read(10**9) + (0 if config.tie_word_embeddings else embedding)
    assert counted == pytest.approx(num_params, rel=4e-4 if "gpt-oss" in name else 2e-4)


def test_every_published_shape_is_checked():
    assert set(PUBLISHED) == set(PRESET_NAMES)


@pytest.mark.parametrize("model", ["Llama-3.1-8B", "meta-llama/Llama-3.1-8B"])
def test_a_published_shape_of_another_family_needs_no_file(model, no_network):
    config = Config(model, load_format="dummy", max_model_len=None)
    assert (config.hf_config.hidden_size, config.max_model_len) == (4096, 131072)
    assert config.eos == (128001, 128008, 128009)


def test_a_published_shape_of_someone_else_is_another_model(no_network):
    with pytest.raises(
        FileNotFoundError, match=r"someone/Llama-3\.1-8B.*; published shapes are called as Qwen3-0\.6B: "
    ):
        Config("someone/Llama-3.1-8B", load_format="dummy")


def test_the_guide_names_files_and_functions_that_there_are():
    root = Path(__file__).parents[2]
    code = "\n".join(file.read_text() for file in [*root.glob("nanovllm/**/*.py"), *root.glob("tests/**/*.py")])
    names = re.findall(r"`([\w/]+\.(?:py|json)|\w*_\w+)`", (root / "docs" / "adding-a-model.md").read_text())
    for name in names:
        is_file = "." in name
        assert any(root.rglob(Path(name).name)) if is_file else name in code, name


def test_the_guide_names_every_family():
    lines = (Path(__file__).parents[2] / "docs" / "adding-a-model.md").read_text().splitlines()
    for architecture, module in registry.ARCHITECTURES.items():
        file = f"`{module.rpartition('.')[2]}.py`"
        assert any(file in line and f"`{architecture}`" in line for line in lines), architecture
