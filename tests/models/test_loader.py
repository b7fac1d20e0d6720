"""Weights: what loads, bit for bit, by however many threads, and how loading ends early."""

import signal
import threading
import time
from collections import Counter

import pytest
import torch
from checkpoints import (
    VOCAB_SIZE,
    Reference,
    complete,
    edit_json,
    edit_tensors,
    greedy,
    make_checkpoint,
    make_llm,
    poisoned_model,
    random_prompt,
)
from safetensors.torch import load_file, save_file
from thread_ranks import make_llm_of_ranks

from nanovllm.models.loader import load_model


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


def take_time(number: int) -> None:
    """The loads that begin after the fourth last until everybody has had time to hear of its end."""
    time.sleep(0.01 if number < 3 else 0.5)


def test_the_first_error_ends_all_threads(checkpoints, four_threads):
    model = poisoned_model(checkpoints["sharded"])

    def fail_early(number):
        if number == 3:
            raise OSError("the disk is gone")
        take_time(number)

    loads = before_each_load(model, fail_early)
    with pytest.raises(OSError, match="the disk is gone"):
        load_model(model, str(checkpoints["sharded"]))
    assert len(loads) < len(stored_tensors(checkpoints["sharded"])) - 4


def test_ctrl_c_ends_all_threads(checkpoints, four_threads):
    model = poisoned_model(checkpoints["sharded"])

    def interrupt_early(number):
        if number == 3:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        take_time(number)

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
        assert llm.model_runner.kv_store.tensors[0].dtype == getattr(torch, dtype)
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


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_tied_checkpoint_with_another_head_runs_with_that_head(copy, caplog, num_ranks):
    """Also if only the last row differs, as of a token that was added later."""
    path = copy("tied")
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    edit_tensors(path, lambda t: t["lm_head.weight"][-1].fill_(4.0))
    edit_json(path / "config.json", tie_word_embeddings=False)
    reference = Reference(path)
    prompts = reference.draw_prompts((20, 3), 10)
    expected = reference.greedy(prompts, 10)
    assert any(VOCAB_SIZE - 1 in tokens for tokens in expected)
    edit_json(path / "config.json", tie_word_embeddings=True)
    with make_llm_of_ranks(path, num_ranks) as llm:
        assert complete(llm, prompts, greedy(10)) == expected
    assert "lm_head.weight is another matrix" in caplog.text


def test_frequencies_of_old_checkpoints_are_passed_over(copy):
    path = copy()
    edit_tensors(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16)}))
    load_model(poisoned_model(path), str(path))


def test_only_the_files_of_the_index_are_read(copy, caplog):
    path = copy("sharded")
    # Some publishers put a second copy of all weights next to the shards.
    save_file({"lm_head.weight": torch.zeros(3, 3)}, path / "consolidated.safetensors")
    with caplog.at_level("INFO"):
        load_model(poisoned_model(path), str(path))
    assert "model.safetensors.index.json; not read: consolidated.safetensors" in caplog.text


def test_a_single_file_goes_before_the_index_as_in_transformers(copy, checkpoints, caplog):
    """As after save_pretrained into the folder of the base model. The old shards may be gone."""
    path = copy("sharded")
    tensors = {name: tensor + 1 for name, tensor in stored_tensors(path).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    next(path.glob("model-00001-of-*")).unlink()
    model = poisoned_model(path)
    with caplog.at_level("INFO"):
        load_model(model, str(path))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.data, expected_parameter(name, tensors)), name
    assert "weights: model.safetensors; not read: model.safetensors.index.json, model-00002" in caplog.text
    theirs = Reference(path).model.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("name", ["other.safetensors", "other.safetensors.index.json"])
def test_the_weights_that_config_json_names(copy, name):
    path = copy("sharded")
    tensors = stored_tensors(path)
    if name.endswith(".json"):
        (path / "model.safetensors.index.json").rename(path / name)
    else:
        save_file(tensors, path / name)
    save_file({"lm_head.weight": torch.zeros(3, 3)}, path / "model.safetensors")
    edit_json(path / "config.json", transformers_weights=name)
    load_model(model := poisoned_model(path), str(path))
    assert torch.equal(model.lm_head.weight.data, tensors["lm_head.weight"])
    edit_json(path / "config.json", transformers_weights="../other.safetensors")
    with pytest.raises(ValueError, match=r"transformers_weights='\.\./other\.safetensors': must be the name"):
        load_model(poisoned_model(path), str(path))


@pytest.mark.parametrize("checkpoint", ["plain", "sharded", "sharded, no index"])
def test_what_is_not_the_models_is_ignored_with_a_line_in_the_log(copy, caplog, checkpoint):
    path = copy(checkpoint.split(",")[0])
    if checkpoint.endswith("no index"):
        (path / "model.safetensors.index.json").unlink()
    for name in ("adapter_model", "scheduler", "optimizer"):
        save_file({"model.norm.weight": torch.zeros(3)}, path / f"{name}.safetensors")
    with caplog.at_level("INFO"):
        load_model(poisoned_model(path), str(path))
    assert "not read: adapter_model.safetensors, optimizer.safetensors, scheduler.safetensors" in caplog.text


def test_home_directory_expands(copy, monkeypatch):
    monkeypatch.setenv("HOME", str(copy().parent))
    with make_llm("~/plain") as llm:
        assert len(complete(llm, [[1]], greedy(1))[0]) == 1
