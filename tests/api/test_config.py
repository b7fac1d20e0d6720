"""Config: every option is checked, and every refusal says what would do."""

import math

import numpy as np
import pytest
import torch
from configs import dummy

from nanovllm.config import Config

pytestmark = pytest.mark.usefixtures("no_network")

NAN, INF = math.nan, math.inf


def test_the_defaults_of_options_stay():
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
    assert config.tokenizer is None
    assert config.revision is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_num_batched_tokens", 1),
        ("max_num_batched_tokens", 2**20),
        ("max_num_seqs", 1),
        ("max_num_seqs", 32768),
        ("max_model_len", 2),
        ("gpu_memory_utilization", 1),
        ("gpu_memory_utilization", 0.01),
        ("enforce_eager", True),
        ("kvcache_block_size", 16),
        ("kvcache_block_size", 65536),
        ("num_kvcache_blocks", 1),
        ("num_kvcache_blocks", 2**31 // 256),
        ("kvcache_gib", 0.001),
        ("kvcache_gib", 3),
        ("kvcache_gib", 65536),
        ("device", "cpu"),
        ("attention_backend", "triton"),
        ("attention_backend", "torch"),
        ("enable_prefix_caching", False),
        ("mixed_step_rows", 0),
        ("mixed_step_rows", 1024),
        ("overlap_steps", False),
        ("use_tqdm", False),
        ("seed", 0),
        ("seed", 2**63 - 1),
        ("skip_tokenizer_init", True),
    ],
)
def test_right_values_are_kept(name, value):
    assert getattr(dummy(**{name: value}), name) == value


def test_none_is_all_that_the_model_supports():
    config = dummy(max_model_len=None)
    assert config.max_model_len == config.supported_model_len == 40960


NUMPY = {
    "max_num_seqs": np.int64(5),
    "max_model_len": np.int32(100),
    "max_num_batched_tokens": np.uint16(64),
    "tensor_parallel_size": np.int8(1),
    "kvcache_block_size": np.int64(32),
    "num_kvcache_blocks": np.int64(7),
    "mixed_step_rows": np.int64(8),
    "kvcache_gib": np.float32(0.5),
    "gpu_memory_utilization": np.float64(0.5),
    "seed": np.uint64(2**63 - 1),
    "enforce_eager": np.bool_(True),
    "dtype": np.str_("float16"),
    "eos": np.int64(3),
}


@pytest.mark.parametrize("name", NUMPY)
def test_numpys_numbers_are_like_pythons(name):
    value = getattr(dummy(**{name: NUMPY[name]}), name)
    plain = NUMPY[name].item()
    assert value == {"dtype": torch.float16, "eos": (3,)}.get(name, plain)
    assert not isinstance(value, np.generic) or name == "dtype"


@pytest.mark.parametrize("eos", [np.array([7, 3]), [np.int32(7), 3], (np.int64(3), np.int64(7))])
def test_end_of_sequence_tokens_by_numpy(eos):
    assert dummy(eos=eos).eos == (3, 7)
    assert {type(token) for token in dummy(eos=eos).eos} == {int}


COUNT = [0, -1, 1.0, 2.5, "8", "", None, True, False, NAN, INF, [8], 10**9, 2**63, 10**30]
SIZE = [value for value in COUNT if value is not None]
FLAG = [0, 1, None, "yes", "False", 1.0]
CHOICE = ["", "gpu", "AUTO", "auto ", None, 1, True, ["auto"], b"auto"]
WRONG = {
    "max_num_batched_tokens": ([*COUNT, 2**20 + 1], r"1\.\.1048576"),
    "max_num_seqs": ([*COUNT, 32769], r"1\.\.32768"),
    "max_model_len": ([*SIZE, 1, 2**24 + 1], r"2\.\.16777216, or None"),
    "gpu_memory_utilization": ([0, 0.0, -0.1, 1.01, 90, NAN, INF, -INF, "0.9", None, True, [0.9]], r"\(0, 1\]"),
    "watchdog_timeout": ([0, 0.5, -1, NAN, INF, "60", True, [60], 86401], r"1\.\.86400, or None"),
    "tensor_parallel_size": ([0, -1, 9, 10**9, 1.0, "2", None, True, NAN, [1]], r"1\.\.8"),
    "enforce_eager": (FLAG, "True or False"),
    "kvcache_block_size": (
        [0, -16, 1, 8, 17, 48, 255, 256.0, "256", None, True, NAN, 2**17, 2**40],
        r"power of two in 16\.\.65536",
    ),
    "num_kvcache_blocks": (
        [0, -2, 1.0, -1.0, "64", None, True, False, NAN, INF, 2**31 // 256 + 1, 10**9],
        r"1\.\.8388608 \(2147483648 tokens in blocks of 256\), or -1",
    ),
    "kvcache_gib": ([0, 0.0, -1, NAN, INF, -INF, "2", True, [2], 65537, 1e300, 10**310], r"\(0, 65536\], or None"),
    "device": ([*CHOICE, "cuda:", "cuda:-1", "cuda:a", "cuda:1 ", "cuda1", "mps", 0], "auto, cuda, cpu, or cuda:N"),
    "dtype": ([*CHOICE, "bf16", "int8", torch.int8, torch.float64], "auto, bfloat16, float16, float32, half, float"),
    "quantization": (["int3", "awq", "", 8, True, ["fp8"]], "None or one of fp8"),
    "load_format": ([*CHOICE, "safetensors"], "auto, dummy"),
    "kv_cache_dtype": ([*CHOICE, "fp8_e5m2", "int8", "bfloat16"], "auto, fp8, fp8_e4m3"),
    "state_dtype": ([*CHOICE, "float16", "bf16", torch.int8], "float32, bfloat16"),
    "kv_cache_scales": (CHOICE, "auto, checkpoint, calibrated, one"),
    "logprobs_mode": (CHOICE, "raw_logprobs, processed_logprobs"),
    "attention_backend": ([*CHOICE, "flash-attn", "xformers"], "auto, flash_attn, triton, torch"),
    "enable_prefix_caching": (FLAG, "True or False"),
    "mixed_step_rows": ([-1, 1025, 10**9, 1.0, "256", True, False, NAN, [256]], r"None.*0\.\.1024 "),
    "speculation": (["draft", True, ["suffix"]], "None or one of suffix"),
    "max_speculative_tokens": ([0, 16, 2.0, None], "an integer in 1..15"),
    "overlap_steps": (FLAG, "True or False"),
    "plain": (FLAG, "True or False"),
    "use_tqdm": (FLAG, "True or False"),
    "seed": ([-1, 2**63, 2**64, 1.0, "1", True, False, NAN, [1]], r"None.*0\.\.2\*\*63 - 1"),
    "skip_tokenizer_init": (FLAG, "True or False"),
    "eos": ([-1, 1.0, "2", None, True, [1, -1], [1, "2"], [1.0], [True], {1: 2}], "token ids >= 0"),
    "tokenizer": ([5, True, "", b"tokenizer", ["tokenizer"]], "a name, or None"),
    "revision": ([5, True, "", b"main", ["main"]], "a name, or None"),
    "features": ([5, "warmer", None, [5], ["warmer"], [{}], {"option": 1}], "list of .*Feature objects"),
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


@pytest.mark.parametrize("name", [name for name in WRONG if name not in ("eos", "hf_config")])
@pytest.mark.parametrize("value", [np.bool_(True), np.array([1, 2]), np.float64(-2.5), np.int64(-5)], ids=repr)
def test_numpys_wrong_values_are_refused_like_pythons(name, value):
    if isinstance(getattr(Config, name), bool) and isinstance(value, np.bool_):
        return
    with pytest.raises(ValueError, match=WRONG[name][1]):
        dummy(**{name: value})


def test_smaller_blocks_may_be_more():
    assert dummy(kvcache_block_size=16, num_kvcache_blocks=2**27).num_kvcache_blocks == 2**27
    with pytest.raises(ValueError, match=r"num_kvcache_blocks=134217729: .* in 1\.\.134217728 "):
        dummy(kvcache_block_size=16, num_kvcache_blocks=2**27 + 1)


def test_the_tokens_of_all_sequences_are_counted_in_32_bits(model_dir):
    directory = model_dir(max_position_embeddings=2**20)
    assert Config(directory, max_model_len=None, max_num_seqs=2047).max_model_len == 2**20
    message = r"max_num_seqs=2048: must be less than 2048 with max_model_len=1048576: .* 32 bits"
    with pytest.raises(ValueError, match=message):
        Config(directory, max_model_len=None, max_num_seqs=2048)


def test_a_model_of_absurd_length_wants_a_length(model_dir):
    directory = model_dir(max_position_embeddings=10**9)
    assert Config(directory).max_model_len == 4096
    with pytest.raises(
        ValueError, match=r"max_model_len=None: must be given for a model of 1000000000 tokens.*16777216"
    ):
        Config(directory, max_model_len=None)


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
        Config(value)
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
        ("skip_tokenizer_ini", "skip_tokenizer_init"),
        ("Seed", "seed"),
    ],
)
def test_an_unknown_keyword_is_refused_with_the_nearest_one(name, meant):
    with pytest.raises(TypeError) as error:
        dummy(**{name: 1})
    assert repr(name) in str(error.value)
    assert meant in str(error.value)


def test_an_unknown_keyword_like_no_other_is_refused_with_all_there_are():
    with pytest.raises(TypeError, match="'zzz'") as error:
        dummy(zzz=1)
    for name in Config.__dataclass_fields__:
        assert name in str(error.value)


def test_an_unknown_keyword_is_reported_before_the_model_is_looked_for():
    with pytest.raises(TypeError, match="max_num_seqs"):
        Config("/no/such/model", max_num_seq=4)
