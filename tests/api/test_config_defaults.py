"""Config: what it takes from the model and the machine: lengths, end-of-sequence tokens, device and dtype."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from configs import NEW_STYLE, OLD_STYLE, dummy
from gpus import HOPPER, pretend_gpu

from nanovllm.config import Config
from nanovllm.engine.length_limit import LengthLimit
from nanovllm.engine.ranks.ranks import device_of_rank
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.rope_parameters import rope_parameters

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def a_gpu(monkeypatch):
    use_gpu(monkeypatch, memory_gib=24)


def use_gpu(monkeypatch, memory_gib):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    pretend_gpu(monkeypatch, total_memory=memory_gib * 2**30)


# Limits


@pytest.mark.parametrize(("asked", "expected"), [(100, 100), (512, 512), (513, 512), (4096, 512)])
def test_max_model_len_is_lowered_to_what_the_model_supports(model_dir, asked, expected):
    assert Config(model_dir(), max_model_len=asked).max_model_len == expected


@pytest.mark.parametrize("style", ["new", "old"])
def test_rope_scaling_stretches_what_the_model_supports(model_dir, style):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    if style == "new":
        directory = model_dir(rope_parameters={"rope_theta": 1e6, **yarn})
    else:
        directory = model_dir(OLD_STYLE, rope_scaling=yarn)
    assert Config(directory, max_model_len=4096).max_model_len == 2048


@pytest.mark.parametrize(("local_size", "expected"), [(100, 300), (0, 400)])
def test_a_sequence_has_one_chunk_of_dual_chunk_attention(model_dir, local_size, expected):
    """Longer ones would need attention that we do not have (Qwen2.5-7B-Instruct-1M: 262,144 - 8,192 tokens)."""
    chunks = {"chunk_size": 400, "local_size": local_size, "original_max_position_embeddings": 400}
    directory = model_dir(dual_chunk_attention_config=chunks)
    assert Config(directory).max_model_len == expected
    assert Config(directory, max_model_len=None).max_model_len == expected
    assert Config(directory, max_model_len=200).max_model_len == 200
    config = Config(directory)
    config.num_kvcache_blocks = 1000
    limit = LengthLimit(config)
    with pytest.raises(ValueError, match=f"longest sequence of {expected} tokens, .*dual_chunk_attention_config"):
        limit.check(expected)


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
    assert Config(directory, eos=given).eos == expected


def test_a_broken_generation_config_is_named(model_dir):
    directory = model_dir()
    Path(directory, "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config\.json") as error:
        Config(directory)
    assert directory in str(error.value)


@pytest.mark.parametrize("eos", [300, [2, 300], 10**12])
def test_a_given_end_of_sequence_token_outside_the_vocabulary_is_refused(model_dir, eos):
    with pytest.raises(ValueError, match=rf"eos=.*{max(eos) if isinstance(eos, list) else eos}.* 0\.\.299"):
        Config(model_dir(), eos=eos)
    assert Config(model_dir(name="other"), eos=299).eos == (299,)


@pytest.mark.parametrize(
    ("generation", "own", "expected", "file"),
    [
        ({"eos_token_id": [5, 300]}, 17, (5,), "generation_config.json"),
        ({"eos_token_id": 5000}, 17, (), "generation_config.json"),
        (None, [17, 10**12], (17,), "config.json"),
    ],
)
def test_the_files_end_of_sequence_tokens_outside_the_vocabulary_are_ignored(
    model_dir, caplog, generation, own, expected, file
):
    directory = model_dir(generation_config=generation, eos_token_id=own)
    assert Config(directory).eos == expected
    (record,) = [record for record in caplog.records if record.name == "nanovllm.config"]
    assert str(Path(directory, file)) in record.message
    assert "outside the vocabulary, 0..299" in record.message


@pytest.mark.parametrize("value", ["a", "2", [[1]], -1, [1, -2], 1.0, [1.5], True, [False], {"id": 1}], ids=repr)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_end_of_sequence_tokens_that_are_none_are_named_with_their_file(model_dir, name, value):
    if name == "config.json":
        directory = model_dir(eos_token_id=value)
    else:
        directory = model_dir(generation_config={"eos_token_id": value})
    with pytest.raises(ValueError, match=r"eos_token_id=.*must be a token id >= 0, or a list") as error:
        Config(directory)
    assert str(error.value).startswith(str(Path(directory, name)))
    assert repr(value) in str(error.value)


# Device and dtype


def test_auto_is_the_cpu_and_float32_without_a_gpu(model_dir, no_gpu):
    config = Config(model_dir())
    assert (config.device, config.dtype) == ("cpu", torch.float32)


def test_cuda_without_a_gpu_is_refused(no_gpu):
    with pytest.raises(ValueError, match=r"device='cuda'.*cpu"):
        dummy(device="cuda")


def test_the_cpu_can_be_chosen_beside_a_gpu(model_dir, a_gpu):
    config = Config(model_dir(), device="cpu")
    assert (config.device, config.dtype) == ("cpu", torch.float32)


@pytest.mark.parametrize(
    ("own", "expected"),
    [("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.bfloat16), (..., torch.bfloat16)],
)
@pytest.mark.parametrize(("style", "key"), [(NEW_STYLE, "dtype"), (OLD_STYLE, "torch_dtype")], ids=["new", "old"])
def test_auto_on_a_gpu_is_the_checkpoints_dtype(model_dir, a_gpu, style, key, own, expected):
    config = Config(model_dir(style, **{key: own}))
    assert (config.device, config.dtype) == ("cuda", expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_dtype_can_be_given_by_name_or_as_torch_has_it(model_dir, a_gpu, dtype, device):
    directory = model_dir()
    for given in (dtype, str(dtype).removeprefix("torch.")):
        assert Config(directory, dtype=given, device=device).dtype is dtype


@pytest.mark.parametrize(
    ("device", "index"),
    [("auto", 0), ("cuda", 0), ("cuda:0", 0), ("cuda:1", 1), (torch.device("cuda", 1), 1), (torch.device("cuda"), 0)],
)
def test_the_first_gpu_can_be_chosen(a_gpu, device, index):
    config = dummy(device=device)
    assert (config.device, config.device_index) == ("cuda", index)
    assert device_of_rank(config, 0) == torch.device("cuda", index)


def test_the_current_gpu_is_the_first_unless_another_is_chosen(a_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert dummy(device="cuda").device_index == 1
    assert dummy(device="cuda:0").device_index == 0


def test_the_chosen_gpus_facts_count(a_gpu, monkeypatch):
    facts = [replace(HOPPER, capability=capability) for capability in ((8, 0), (9, 0))]
    monkeypatch.setattr(GpuFacts, "of", lambda device: facts[device.index])
    assert dummy(device="cuda:1", kv_cache_dtype="fp8").kv_cache_dtype == torch.float8_e4m3fn
    with pytest.raises(ValueError, match="kv_cache_dtype"):
        dummy(device="cuda:0", kv_cache_dtype="fp8")


@pytest.mark.parametrize("device", ["cuda:2", "cuda:99999999999999999999"])
def test_a_gpu_that_is_not_there_is_refused(a_gpu, device):
    with pytest.raises(ValueError, match=rf"device='{device}': must be one of cuda:0\.\.cuda:1: 2 GPUs are visible"):
        dummy(device=device)


def test_ranks_take_the_gpus_after_the_chosen_one(a_gpu):
    assert dummy(device="cuda:0", tensor_parallel_size=2).device_index == 0
    with pytest.raises(ValueError, match=r"tensor_parallel_size=2: must be at most 1: 2 GPUs .* cuda:1"):
        dummy(device="cuda:1", tensor_parallel_size=2)


def test_the_cpu_has_no_index(a_gpu):
    for device in ("cpu", torch.device("cpu")):
        config = dummy(device=device)
        assert (config.device, config.device_index) == ("cpu", None)
        assert device_of_rank(config, 0) == torch.device("cpu")


@pytest.mark.parametrize(("name", "dtype"), [("half", torch.float16), ("float", torch.float32)])
def test_vllms_names_of_dtypes(name, dtype):
    assert dummy(dtype=name).dtype is dtype


@pytest.mark.parametrize("style", [NEW_STYLE, OLD_STYLE], ids=["new", "old"])
def test_both_styles_of_config_are_read(model_dir, style):
    hf_config = Config(model_dir(style)).hf_config
    assert rope_parameters(hf_config).base == 5_000_000.0
    assert (hf_config.head_dim, hf_config.num_key_value_heads) == (16, 2)
