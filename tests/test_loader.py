"""Weights: what loads, bit for bit, and the errors of what does not."""

import json
import shutil
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from checkpoints import Reference, complete, edit_json, edit_tensors, greedy, make_checkpoint, make_llm, random_prompt
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from nanovllm.layers.attention_backend import select_backend
from nanovllm.models import model_class
from nanovllm.utils.loader import load_model
from nanovllm.utils.parallel import TensorParallel

LAYER = "model.layers.1"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """{name: directory}; tests that change one take a copy."""
    root = tmp_path_factory.mktemp("checkpoints")
    return {
        "plain": make_checkpoint(root / "plain"),
        "tied": make_checkpoint(root / "tied", tie_word_embeddings=True),
        "bias": make_checkpoint(root / "bias", attention_bias=True),
        "qwen2": make_checkpoint(root / "qwen2", family="qwen2"),
        "sharded": make_checkpoint(root / "sharded", max_shard_size="60KB"),
    }


@pytest.fixture
def copy(checkpoints, tmp_path):
    """copy(name) -> a directory that the test may damage."""
    return lambda name="plain": Path(shutil.copytree(checkpoints[name], tmp_path / name))


def poisoned_model(path, dtype=torch.float32):
    """The model of a checkpoint's configuration, all NaN."""
    config = AutoConfig.from_pretrained(path)
    backend = select_backend("torch", "cpu", dtype, 32, 16)
    model = model_class(config)(config, 64, backend, TensorParallel()).to(dtype)
    for parameter in model.parameters():
        parameter.data.fill_(float("nan"))
    return model


def assert_nothing_loaded(path, error, match):
    """Loading fails with this message, and has not touched a parameter; LLM passes the error on."""
    model = poisoned_model(path)
    with pytest.raises(error, match=match):
        load_model(model, str(path))
    assert all(parameter.isnan().all() for parameter in model.parameters())
    with pytest.raises(error, match=match):
        make_llm(path)


@pytest.fixture
def four_threads():
    """Loading by four threads, of which none may be left, nor any trace of how many they were."""
    before, running = torch.get_num_threads(), set(threading.enumerate())
    torch.set_num_threads(4)
    yield
    assert torch.get_num_threads() == 4
    torch.set_num_threads(before)
    # One that has done its work may take a moment to end.
    deadline = time.monotonic() + 5
    while set(threading.enumerate()) != running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(threading.enumerate()) == running


def stored_tensors(path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def expected_parameter(name: str, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """The checkpoint's tensors that make up one of our parameters, in the order of q, k, v and of gate, up."""
    for fused, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        if fused in name:
            return torch.cat([stored[name.replace(fused, part)] for part in parts])
    return stored[name]


@pytest.mark.parametrize("name", ["plain", "tied", "bias", "qwen2", "sharded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_parameter_is_the_checkpoints(checkpoints, name, dtype):
    path = checkpoints[name]
    model = poisoned_model(path, dtype)
    load_model(model, str(path))
    stored = stored_tensors(path)
    parameters = dict(model.named_parameters())
    assert sum(p.numel() for p in parameters.values()) == sum(t.numel() for t in stored.values())
    for parameter_name, parameter in parameters.items():
        assert parameter.dtype == dtype
        assert torch.equal(parameter.data, expected_parameter(parameter_name, stored).to(dtype)), parameter_name


@pytest.mark.parametrize("name", ["tied", "sharded"])
def test_threads_load_what_one_does(checkpoints, four_threads, name):
    model = poisoned_model(checkpoints[name])
    load_model(model, str(checkpoints[name]))
    stored = stored_tensors(checkpoints[name])
    for parameter_name, parameter in model.named_parameters():
        assert torch.equal(parameter.data, expected_parameter(parameter_name, stored)), parameter_name


def before_each_load(model, act) -> list[int]:
    """Have act(number of loads before it) called ahead of every load. Returns a list that grows by one with each."""
    loads = []
    for parameter in model.parameters():
        original = getattr(parameter, "weight_loader", lambda p, loaded, shard_id: p.data.copy_(loaded[...]))

        def load(p, loaded, shard_id=None, original=original):
            loads.append(len(loads))
            act(loads[-1])
            original(p, loaded, shard_id)

        parameter.weight_loader = load
    return loads


def test_the_first_error_ends_all_threads(checkpoints, four_threads):
    model = poisoned_model(checkpoints["sharded"])

    def fail_early(number):
        if number == 3:
            raise OSError("the disk is gone")
        time.sleep(0.01)

    loads = before_each_load(model, fail_early)
    with pytest.raises(OSError, match="the disk is gone"):
        load_model(model, str(checkpoints["sharded"]))
    assert len(loads) < len(stored_tensors(checkpoints["sharded"])) - 4


def test_ctrl_c_ends_all_threads(checkpoints, four_threads):
    model = poisoned_model(checkpoints["sharded"])

    def interrupt_early(number):
        if number == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.01)

    loads = before_each_load(model, interrupt_early)
    with pytest.raises(KeyboardInterrupt):
        load_model(model, str(checkpoints["sharded"]))
    assert len(loads) < len(stored_tensors(checkpoints["sharded"])) - 4


def test_ctrl_c_while_threads_are_being_started(checkpoints, four_threads):
    """Whenever it comes, nobody is loading any more when it is raised."""
    model, at_work = poisoned_model(checkpoints["sharded"]), []
    for parameter in model.parameters():

        def load(p, loaded, shard_id=None):
            at_work.append(p)
            time.sleep(0.001)
            at_work.pop()

        parameter.weight_loader = load
    main_thread = threading.main_thread().ident

    def load_until(timer):
        timer.start()
        load_model(model, str(checkpoints["sharded"]))
        timer.join()

    for i in range(100):
        timer = threading.Timer(i * 4e-5, signal.pthread_kill, (main_thread, signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            load_until(timer)
        assert not at_work
        timer.join()


@pytest.mark.parametrize("name", ["tied", "bias", "sharded"])
def test_every_part_of_a_parameter_is_loaded_once(checkpoints, name):
    model = poisoned_model(checkpoints[name])
    loads = Counter()
    for parameter_name, parameter in model.named_parameters():
        original = getattr(parameter, "weight_loader", lambda p, loaded, shard_id: p.data.copy_(loaded[...]))

        def counting(p, loaded, shard_id=None, original=original, parameter_name=parameter_name):
            loads[parameter_name, shard_id] += 1
            original(p, loaded, shard_id)

        parameter.weight_loader = counting
    load_model(model, str(checkpoints[name]))
    assert set(loads.values()) == {1}
    assert len(loads) == len(stored_tensors(checkpoints[name]))


def test_sharded_checkpoint_runs_like_the_whole(checkpoints):
    assert len(list(checkpoints["sharded"].glob("*.safetensors"))) > 2
    outputs = []
    for name in ("plain", "sharded"):
        with make_llm(checkpoints[name]) as llm:
            outputs.append(complete(llm, [random_prompt(20, seed=0)], greedy(8)))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("option", ["auto", "float32"])
def test_bfloat16_checkpoint_runs_in_float32(tmp_path, option):
    path = make_checkpoint(tmp_path, dtype=torch.bfloat16)
    reference = Reference(path)
    prompts = reference.draw_prompts((20, 3), 10)
    with make_llm(path, dtype=option) as llm:
        assert llm.config.dtype == torch.float32
        assert complete(llm, prompts, greedy(10)) == reference.greedy(prompts, 10)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_checkpoint_runs_in_half_precision(checkpoints, dtype):
    reference = Reference(checkpoints["plain"])
    prompt = random_prompt(20, seed=0)
    with make_llm(checkpoints["plain"], dtype=dtype) as llm:
        assert {p.dtype for p in llm.model_runner.model.parameters()} == {getattr(torch, dtype)}
        assert llm.model_runner.kv_cache.dtype == getattr(torch, dtype)
        (tokens,) = complete(llm, [prompt], greedy(10))
    # Rounding may turn a close race, where logits spread by about 1, and no other.
    assert reference.regret(prompt, tokens) < 0.1


def test_tied_checkpoint_may_hold_its_head_twice(copy):
    path = copy("tied")
    with make_llm(path) as llm:
        expected = complete(llm, [[1, 2, 3]], greedy(8))
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    with make_llm(path) as llm:
        assert complete(llm, [[1, 2, 3]], greedy(8)) == expected


def test_frequencies_of_old_checkpoints_are_passed_over(copy):
    path = copy()
    edit_tensors(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}))
    load_model(poisoned_model(path), str(path))


def test_no_safetensors(copy):
    path = copy()
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert_nothing_loaded(path, FileNotFoundError, r"plain: holds no \*\.safetensors")


@pytest.mark.parametrize(
    ("checkpoint", "tensor"),
    [
        ("plain", f"{LAYER}.self_attn.k_proj.weight"),
        ("plain", f"{LAYER}.mlp.up_proj.weight"),
        ("plain", f"{LAYER}.self_attn.q_norm.weight"),
        ("plain", "model.norm.weight"),
        ("plain", "lm_head.weight"),
        ("tied", "model.embed_tokens.weight"),
        ("bias", f"{LAYER}.self_attn.o_proj.bias"),
        ("qwen2", f"{LAYER}.self_attn.v_proj.bias"),
    ],
)
def test_missing_tensor(copy, checkpoint, tensor):
    path = copy(checkpoint)
    edit_tensors(path, lambda t: t.pop(tensor))
    assert_nothing_loaded(path, ValueError, f"lacks '{tensor}'")


def test_extra_tensor(copy):
    path = copy()
    edit_tensors(path, lambda t: t.update({f"{LAYER}.self_attn.q_proj.bias": torch.zeros(128)}))
    assert_nothing_loaded(path, ValueError, f"'{LAYER}.self_attn.q_proj.bias'")


def test_layer_beyond_the_configurations(copy):
    path = copy()
    edit_json(path / "config.json", num_hidden_layers=1, layer_types=None)
    assert_nothing_loaded(path, ValueError, f"does not have: '{LAYER}")


@pytest.mark.parametrize(
    "tensor",
    [
        f"{LAYER}.self_attn.q_proj.weight",
        f"{LAYER}.mlp.down_proj.weight",
        "model.embed_tokens.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("cut", [lambda t: t[:-1], lambda t: t[:, 1:], lambda t: t.T, lambda t: t.flatten()])
def test_wrongly_shaped_tensor(copy, tensor, cut):
    path = copy()
    edit_tensors(path, lambda t: t.update({tensor: cut(t[tensor]).contiguous()}))
    found = list(load_file(path / "model.safetensors")[tensor].shape)
    assert_nothing_loaded(path, ValueError, rf"'{tensor}' has shape \[{str(found)[1:-1]}\]")


def test_scalar_in_place_of_a_norm(copy):
    path = copy()
    edit_tensors(path, lambda t: t.update({"model.norm.weight": torch.ones(())}))
    assert_nothing_loaded(path, ValueError, "'model.norm.weight' has shape")


@pytest.mark.parametrize("keep", [0.0, 0.00001, 0.5, 0.999])
def test_truncated_file(copy, keep):
    path = copy()
    file = path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])
    assert_nothing_loaded(path, ValueError, "model.safetensors: damaged or truncated")


def test_truncated_last_shard_is_found_before_the_first_is_loaded(copy, four_threads):
    path = copy("sharded")
    last = sorted(path.glob("*.safetensors"))[-1]
    last.write_bytes(last.read_bytes()[:-1])
    assert_nothing_loaded(path, ValueError, f"{last.name}: damaged or truncated")


def test_file_that_is_not_safetensors(copy):
    path = copy()
    (path / "model.safetensors").write_bytes(b"<!DOCTYPE html><html>not found</html>" * 40)
    assert_nothing_loaded(path, ValueError, "model.safetensors: damaged or truncated")


def test_index_names_a_file_that_is_not_there(copy):
    path = copy("sharded")
    lost = sorted(path.glob("*.safetensors"))[1]
    lost.unlink()
    assert_nothing_loaded(path, FileNotFoundError, lost.name)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"lm_head.weight": 3}}']
)
def test_index_that_is_none(copy, content):
    path = copy("sharded")
    (path / "model.safetensors.index.json").write_text(content)
    assert_nothing_loaded(path, ValueError, r"model\.safetensors\.index\.json")


def test_only_the_files_of_the_index_are_read(copy):
    path = copy("sharded")
    # Some publishers put a second copy of all weights next to the shards.
    save_file({"lm_head.weight": torch.zeros(3, 3)}, path / "consolidated.safetensors")
    load_model(poisoned_model(path), str(path))


def test_shard_that_the_index_leaves_out(copy):
    path = copy("sharded")
    index = path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    left_out = weight_map[f"{LAYER}.mlp.down_proj.weight"]
    edit_json(index, weight_map={name: file for name, file in weight_map.items() if file != left_out})
    assert_nothing_loaded(path, ValueError, f"lacks .*{LAYER}.mlp.down_proj.weight")


def test_tensor_in_two_files(copy):
    path = copy()
    save_file({"model.norm.weight": torch.ones(64)}, path / "model2.safetensors")
    assert_nothing_loaded(path, ValueError, "model2.safetensors: tensor 'model.norm.weight'")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["Qwen3MoeForCausalLM"]}, "Qwen3MoeForCausalLM"),
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM"),
        ({"architectures": None}, "architectures=None"),
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 0}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ],
    ids=["moe", "llama", "no-architecture", "unknown-type", "sliding-window", "gelu"],
)
def test_model_that_is_not_supported(copy, changes, message):
    path = copy()
    edit_json(path / "config.json", **changes)
    with pytest.raises(ValueError, match=message):
        make_llm(path)


@pytest.mark.parametrize("family", ["GPT2", "Qwen2VL", "Mamba", "T5"])
def test_config_of_another_family(tmp_path, family):
    """Whose fields have other names."""
    config = getattr(transformers, f"{family}Config")(architectures=[f"{family}Model"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"architectures=\['{family}Model'\].*supported are Qwen3ForCausalLM"):
        make_llm(tmp_path)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.0] * 16, "long_factor": [2.0] * 16, "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_rope_scaling_that_is_not_supported(copy, scaling):
    path = copy()
    edit_json(path / "config.json", rope_parameters=None, rope_theta=10000.0, rope_scaling=scaling)
    with pytest.raises(ValueError, match=f"{scaling['rope_type']}.*supported: default, linear, yarn"):
        make_llm(path)


def test_directory_without_a_configuration(copy):
    path = copy()
    (path / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"plain'.*config\.json"):
        make_llm(path)


@pytest.mark.parametrize("content", ["", "{", "{}", "[]", "null"])
def test_configuration_that_is_none(copy, content):
    path = copy()
    (path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"plain'.*config\.json"):
        make_llm(path)


@pytest.mark.parametrize("model", ["./no/such/model", "/no/such/model", "~/no-such-model"])
def test_no_such_directory(model):
    with pytest.raises(FileNotFoundError, match=model):
        make_llm(model)


def test_a_file_in_place_of_its_directory(checkpoints):
    with pytest.raises(ValueError, match=r"model\.safetensors'.*must be the directory"):
        make_llm(checkpoints["plain"] / "model.safetensors")


def test_home_directory_expands(copy, monkeypatch):
    monkeypatch.setenv("HOME", str(copy().parent))
    with make_llm("~/plain") as llm:
        assert len(complete(llm, [[1]], greedy(1))[0]) == 1
