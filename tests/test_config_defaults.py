"""Config: what it takes from the model and the machine: lengths, end-of-sequence tokens, device and dtype."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from configs import NEW_STYLE, OLD_STYLE, dummy

from nanovllm.config import Config
from nanovllm.layers.rotary_embedding import rope_parameters

pytestmark = pytest.mark.usefixtures("no_network")


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def a_gpu(monkeypatch):
    use_gpu(monkeypatch, memory_gib=24)


def use_gpu(monkeypatch, memory_gib):
    properties = SimpleNamespace(total_memory=memory_gib * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


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


@pytest.mark.parametrize(
    ("model", "memory_gib", "options", "expected"),
    [
        ("Qwen3-0.6B", 141, {}, 32768),
        ("Qwen3-0.6B", 79, {}, 32768),
        ("Qwen3-0.6B", 24, {}, 16384),
        ("Qwen3-8B", 141, {}, 32768),
        ("Qwen3-8B", 79, {}, 16384),
        ("Qwen3-32B", 141, {}, 16384),
        ("Qwen3-0.6B", 141, {"device": "cpu"}, 16384),
        ("Qwen3-0.6B", 141, {"tensor_parallel_size": 2}, 16384),
        ("Qwen3-0.6B", 141, {"max_num_batched_tokens": 100}, 100),
        ("Qwen3-0.6B", 24, {"max_num_batched_tokens": 40000}, 40000),
    ],
)
def test_prefill_steps_are_longer_where_there_is_much_memory(monkeypatch, model, memory_gib, options, expected):
    use_gpu(monkeypatch, memory_gib)
    assert dummy(model=model, **options).max_num_batched_tokens == expected


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
