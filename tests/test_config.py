"""Config: every option is checked, and every refusal says what would do."""

import math

import pytest
import torch
from configs import dummy

from nanovllm.config import Config

pytestmark = pytest.mark.usefixtures("no_network")

NAN, INF = math.nan, math.inf


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
    assert config.mixed_step_rows is None
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
        ("mixed_step_rows", 0),
        ("mixed_step_rows", 1024),
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
    "max_num_batched_tokens": ([value for value in COUNT if value is not None], r">= 1, or None"),
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
    "mixed_step_rows": ([-1, 1025, 1.0, "256", True, False, NAN, [256]], r"None.*0\.\.1024 "),
    "overlap_steps": (FLAG, "True or False"),
    "seed": ([-1, 2**63, 2**64, 1.0, "1", True, False, NAN, [1]], r"None.*0\.\.2\*\*63 - 1"),
    "skip_tokenizer_init": (FLAG, "True or False"),
    "eos": ([-1, 1.0, "2", None, True, [1, -1], [1, "2"], [1.0], [True], {1: 2}], "token ids >= 0"),
    "hf_config": ([{}, {"max_position_embeddings": 512}, "config.json", 5], "must be .*transformers"),
}


def test_mixed_steps_are_no_larger_than_prefill_steps():
    with pytest.raises(ValueError, match=r"mixed_step_rows=101: .* in 0\.\.100 "):
        dummy(mixed_step_rows=101, max_num_batched_tokens=100)
    assert dummy(mixed_step_rows=100, max_num_batched_tokens=100).mixed_step_rows == 100


def test_mixed_steps_are_one_gpus():
    with pytest.raises(ValueError, match=r"mixed_step_rows=8: .* 0 or None with tensor_parallel_size=2"):
        dummy(mixed_step_rows=8, tensor_parallel_size=2, device="cpu")
    assert dummy(mixed_step_rows=0, tensor_parallel_size=2, device="cpu").mixed_step_rows == 0


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
