"""Config: every option is checked, every default resolved, and every refusal says what would do."""

import json
import math
import socket
from pathlib import Path

import huggingface_hub
import pytest
import torch

from nanovllm.config import Config
from nanovllm.layers.rotary_embedding import rope_parameters
from nanovllm.models.presets import PRESET_NAMES, preset_config

NAN, INF = math.nan, math.inf

# A model directory as current transformers writes it, and as transformers 4 did.
NEW_STYLE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
    "dtype": "bfloat16",
    "eos_token_id": 17,
}
OLD_STYLE = {
    **{name: value for name, value in NEW_STYLE.items() if name not in ("rope_parameters", "dtype")},
    "rope_theta": 5_000_000.0,
    "rope_scaling": None,
    "torch_dtype": "float16",
    "transformers_version": "4.51.0",
}


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Whatever reaches for the hub fails at once instead of after its retries."""

    def refuse(*args, **kwargs):
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


@pytest.fixture
def model_dir(tmp_path):
    """A function that writes a model directory and returns its path."""

    def write(config=NEW_STYLE, generation_config=None, name="model", **changes) -> str:
        directory = tmp_path / name
        directory.mkdir()
        config = {key: value for key, value in (config | changes).items() if value is not ...}
        (directory / "config.json").write_text(json.dumps(config))
        if generation_config is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation_config))
        return str(directory)

    return write


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def dummy(**options) -> Config:
    return Config.create("Qwen3-0.6B", **{"load_format": "dummy"} | options)


# Values


def test_defaults():
    config = dummy()
    assert config.max_num_batched_tokens == 16384
    assert config.max_num_seqs == 512
    assert config.max_model_len == 4096
    assert config.gpu_memory_utilization == 0.9
    assert config.tensor_parallel_size == 1
    assert config.enforce_eager is False
    assert config.kvcache_block_size == 256
    assert config.num_kvcache_blocks == -1
    assert config.kvcache_gib is None
    assert config.attention_backend == "auto"
    assert config.enable_prefix_caching is True
    assert config.overlap_steps is True
    assert config.skip_tokenizer_init is False
    assert config.seed is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_batched_tokens", 1),
        ("max_num_seqs", 1),
        ("max_model_len", 1),
        ("gpu_memory_utilization", 1),
        ("gpu_memory_utilization", 0.01),
        ("enforce_eager", True),
        ("kvcache_block_size", 16),
        ("kvcache_block_size", 1024),
        ("num_kvcache_blocks", 1),
        ("kvcache_gib", 0.001),
        ("kvcache_gib", 3),
        ("device", "cpu"),
        ("attention_backend", "triton"),
        ("attention_backend", "torch"),
        ("enable_prefix_caching", False),
        ("overlap_steps", False),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("skip_tokenizer_init", True),
    ],
)
def test_right_values_are_kept(name, value):
    assert getattr(dummy(**{name: value}), name) == value


COUNT = [0, -1, 1.0, 2.5, "8", "", None, True, False, NAN, INF, [8]]
FLAG = [0, 1, None, "yes", "False", 1.0]
CHOICE = ["", "gpu", "AUTO", "auto ", None, 1, True, ["auto"], b"auto"]
WRONG = {
    "max_num_batched_tokens": (COUNT, r">= 1"),
    "max_num_seqs": (COUNT, r">= 1"),
    "max_model_len": (COUNT, r">= 1"),
    "gpu_memory_utilization": ([0, 0.0, -0.1, 1.01, 90, NAN, INF, -INF, "0.9", None, True, [0.9]], r"\(0, 1\]"),
    "tensor_parallel_size": ([0, -1, 9, 1.0, "2", None, True, NAN, [1]], r"1\.\.8"),
    "enforce_eager": (FLAG, "True or False"),
    "kvcache_block_size": ([0, -16, 1, 8, 17, 48, 255, 256.0, "256", None, True, NAN], "power of two.*16"),
    "num_kvcache_blocks": ([0, -2, 1.0, -1.0, "64", None, True, False, NAN, INF], r">= 1.*-1"),
    "kvcache_gib": ([0, 0.0, -1, NAN, INF, -INF, "2", True, [2]], "> 0.*None"),
    "device": ([*CHOICE, "cuda:0", "mps"], "auto, cuda, cpu"),
    "dtype": ([*CHOICE, "bf16", "int8", torch.int8, torch.float64], "auto, bfloat16, float16, float32"),
    "load_format": ([*CHOICE, "safetensors"], "auto, dummy"),
    "attention_backend": ([*CHOICE, "flash-attn", "xformers"], "auto, flash_attn, triton, torch"),
    "enable_prefix_caching": (FLAG, "True or False"),
    "overlap_steps": (FLAG, "True or False"),
    "seed": ([-1, 2**63, 2**64, 1.0, "1", True, False, NAN, [1]], r"None.*0\.\.2\*\*63 - 1"),
    "skip_tokenizer_init": (FLAG, "True or False"),
    "eos": ([-1, 1.0, "2", None, True, [1, -1], [1, "2"], [1.0], [True], {1: 2}], "token ids >= 0"),
    "hf_config": ([{}, {"max_position_embeddings": 512}, "config.json", 5], "must be .*transformers"),
}


def test_the_table_of_wrong_values_covers_every_option():
    assert set(WRONG) | {"model"} == set(Config.__dataclass_fields__)


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, value, id=f"{name}-{value!r}") for name, (values, _) in WRONG.items() for value in values],
)
def test_a_wrong_value_is_refused_with_its_field_itself_and_what_is_allowed(name, value):
    with pytest.raises(ValueError, match=WRONG[name][1]) as error:
        dummy(**{name: value})
    assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize("value", ["", None, 5, True, b"model", ["model"]], ids=repr)
def test_a_model_that_is_no_name_is_refused(value):
    with pytest.raises(ValueError, match=r"directory.*hub id") as error:
        Config.create(value)
    assert f"model={value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("max_num_seq", "max_num_seqs"),
        ("max_num_sequences", "max_num_seqs"),
        ("max_model_length", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("enforce_eagre", "enforce_eager"),
        ("block_size", "kvcache_block_size"),
        ("enable_prefix_cache", "enable_prefix_caching"),
        ("skip_tokenizer", "skip_tokenizer_init"),
        ("Seed", "seed"),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest_one(name, meant):
    with pytest.raises(TypeError) as error:
        dummy(**{name: 1})
    assert repr(name) in str(error.value)
    assert repr(meant) in str(error.value)


def test_an_unknown_keyword_like_no_other_is_refused_with_all_there_are():
    with pytest.raises(TypeError, match="'zzz'") as error:
        dummy(zzz=1)
    for name in Config.__dataclass_fields__:
        assert name in str(error.value)


def test_an_unknown_keyword_is_reported_before_the_model_is_looked_for():
    with pytest.raises(TypeError, match="max_num_seqs"):
        Config.create("/no/such/model", max_num_seq=4)


# The model


@pytest.mark.parametrize("prefix", ["", "Qwen/"])
@pytest.mark.parametrize("name", PRESET_NAMES)
def test_a_published_shape_needs_no_file(name, prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = Config.create(prefix + name, load_format="dummy", max_model_len=10**6)
    assert config.hf_config.hidden_size == preset_config(name).hidden_size
    assert config.max_model_len == 40960
    assert config.eos == (151645,)
    assert list(tmp_path.iterdir()) == []


def test_the_shapes_differ():
    shapes = {(c.hidden_size, c.num_hidden_layers, c.num_attention_heads) for c in map(preset_config, PRESET_NAMES)}
    assert len(shapes) == len(PRESET_NAMES)


def test_a_directory_of_a_published_shapes_name_goes_first(model_dir, tmp_path, monkeypatch):
    model_dir(name="Qwen3-0.6B")
    monkeypatch.chdir(tmp_path)
    assert dummy().hf_config.hidden_size == 64


def test_a_published_shapes_name_alone_is_not_read_as_a_shape():
    with pytest.raises(FileNotFoundError, match=r"Qwen3-0\.6B"):
        Config.create("Qwen3-0.6B")


@pytest.mark.parametrize("as_path", [str, Path])
def test_a_directory(model_dir, as_path):
    directory = model_dir()
    config = Config.create(as_path(directory))
    assert config.model == directory
    assert config.hf_config.hidden_size == 64
    assert config.hf_config.vocab_size == 300


def test_the_tilde_is_expanded(model_dir, tmp_path, monkeypatch):
    directory = model_dir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config.create("~/model").model == directory


@pytest.mark.parametrize("model", ["/no/such/model", "./no-such-model", "~/no/such/model", "a/b/c", "~no-such-user/m"])
def test_a_missing_directory(model):
    with pytest.raises(FileNotFoundError, match="no such directory") as error:
        Config.create(model)
    assert repr(model) in str(error.value)


def test_a_file_instead_of_a_directory(model_dir):
    file = Path(model_dir(), "config.json")
    with pytest.raises(ValueError, match=r"file.*directory") as error:
        Config.create(str(file))
    assert repr(str(file)) in str(error.value)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_directory_without_a_config(tmp_path, load_format):
    with pytest.raises(FileNotFoundError, match=r"no config\.json") as error:
        Config.create(str(tmp_path), load_format=load_format)
    assert repr(str(tmp_path)) in str(error.value)


@pytest.mark.parametrize("text", ["", "{", '{"hidden_size": 64}', '{"model_type": "no-such-model"}'])
def test_a_config_that_cannot_be_read(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json") as error:
        Config.create(str(tmp_path))
    assert str(tmp_path) in str(error.value)


def test_a_hub_id_is_downloaded(model_dir, monkeypatch):
    directory = model_dir()
    asked = []

    def snapshot_download(repo_id, **options):
        asked.append(repo_id)
        return directory

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    config = Config.create("someone/some-model")
    assert asked == ["someone/some-model"]
    assert config.model == directory
    assert config.hf_config.hidden_size == 64


def test_a_hub_id_that_cannot_be_downloaded_says_why():
    with pytest.raises(FileNotFoundError, match="no network in this test") as error:
        Config.create("someone/some-model")
    assert "'someone/some-model'" in str(error.value)


def test_a_given_hf_config_is_used_as_it_is(model_dir):
    given = preset_config("Qwen3-1.7B")
    assert Config.create(model_dir(), hf_config=given).hf_config is given
    assert Config.create("my own shape", load_format="dummy", hf_config=given).hf_config is given


# Limits


@pytest.mark.parametrize(("asked", "expected"), [(100, 100), (512, 512), (513, 512), (4096, 512)])
def test_max_model_len_is_lowered_to_what_the_model_supports(model_dir, asked, expected):
    assert Config.create(model_dir(), max_model_len=asked).max_model_len == expected


@pytest.mark.parametrize("style", ["new", "old"])
def test_rope_scaling_stretches_what_the_model_supports(model_dir, style):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    if style == "new":
        directory = model_dir(rope_parameters={"rope_theta": 1e6, **yarn})
    else:
        directory = model_dir(OLD_STYLE, rope_scaling=yarn)
    assert Config.create(directory, max_model_len=4096).max_model_len == 2048


# End-of-sequence tokens


@pytest.mark.parametrize(
    ("given", "generation", "own", "expected"),
    [
        ((), {"eos_token_id": [9, 5]}, 17, (5, 9)),
        ((), {"eos_token_id": 9}, 17, (9,)),
        ((), {"eos_token_id": 0}, 17, (0,)),
        ((), {"eos_token_id": [9, 9, 5]}, 17, (5, 9)),
        ((), {"temperature": 0.6}, 17, (17,)),
        ((), {"eos_token_id": None}, 17, (17,)),
        ((), None, 17, (17,)),
        ((), None, 0, (0,)),
        ((), None, [18, 17], (17, 18)),
        ((), None, None, ()),
        ((), {}, None, ()),
        (3, {"eos_token_id": [9, 5]}, 17, (3,)),
        (0, {"eos_token_id": [9, 5]}, 17, (0,)),
        ([4, 3], {"eos_token_id": [9, 5]}, 17, (3, 4)),
        ({3}, None, 17, (3,)),
        ((3, 3), None, 17, (3,)),
    ],
)
def test_where_the_end_of_sequence_tokens_come_from(model_dir, given, generation, own, expected):
    directory = model_dir(generation_config=generation, eos_token_id=own)
    assert Config.create(directory, eos=given).eos == expected


def test_a_broken_generation_config_is_named(model_dir):
    directory = model_dir()
    Path(directory, "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json") as error:
        Config.create(directory)
    assert directory in str(error.value)


# Device and dtype


def test_auto_is_the_cpu_and_float32_without_a_gpu(model_dir, no_gpu):
    config = Config.create(model_dir())
    assert (config.device, config.dtype) == ("cpu", torch.float32)


def test_cuda_without_a_gpu_is_refused(no_gpu):
    with pytest.raises(ValueError, match=r"device='cuda'.*cpu"):
        dummy(device="cuda")


def test_the_cpu_can_be_chosen_beside_a_gpu(model_dir, a_gpu):
    config = Config.create(model_dir(), device="cpu")
    assert (config.device, config.dtype) == ("cpu", torch.float32)


@pytest.mark.parametrize(
    ("own", "expected"),
    [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.bfloat16), (..., torch.bfloat16)],
)
@pytest.mark.parametrize(("style", "key"), [(NEW_STYLE, "dtype"), (OLD_STYLE, "torch_dtype")], ids=["new", "old"])
def test_auto_on_a_gpu_is_the_checkpoints_dtype(model_dir, a_gpu, style, key, own, expected):
    config = Config.create(model_dir(style, **{key: own}))
    assert (config.device, config.dtype) == ("cuda", expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dtype_can_be_given_by_name_or_as_torch_has_it(model_dir, a_gpu, dtype, device):
    directory = model_dir()
    for given in (dtype, str(dtype).removeprefix("torch.")):
        assert Config.create(directory, dtype=given, device=device).dtype is dtype


@pytest.mark.parametrize("style", [NEW_STYLE, OLD_STYLE], ids=["new", "old"])
def test_both_styles_of_config_are_read(model_dir, style):
    hf_config = Config.create(model_dir(style)).hf_config
    assert rope_parameters(hf_config).base == 5_000_000.0
    assert (hf_config.head_dim, hf_config.num_key_value_heads) == (16, 2)
