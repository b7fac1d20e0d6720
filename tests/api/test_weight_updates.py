"""Weights that change while the engine lives, and memory that it gives back meanwhile."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, make_llm, needs_family, random_prompt
from kernel_harness import nightly
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

PROMPTS = [random_prompt(length, seed=length) for length in (40, 7, 33)]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = {
    "untied": ("qwen3", {}),
    "tied": ("qwen3", {"tie_word_embeddings": True}),
    "experts": ("qwen3_moe", EXPERTS),
}


def tensors_of(path) -> dict[str, torch.Tensor]:
    return load_file(Path(path, "model.safetensors"))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Two checkpoints of one shape with different weights, of each family."""
    return {
        name: [make_checkpoint(tmp_path_factory.mktemp("w"), family=family, seed=seed, **fields) for seed in (0, 1)]
        for name, (family, fields) in FAMILIES.items()
    }


@pytest.fixture(scope="module")
def paths(pairs):
    return pairs["untied"]


@cache
def expected(path, num_tokens: int = 12) -> list[list[int]]:
    return Reference(path).greedy(PROMPTS, num_tokens)


@pytest.mark.parametrize(
    ("name", "num_ranks"), [("untied", 1), ("tied", 1), ("experts", 1), ("tied", 2), *nightly(("experts", 2))]
)
def test_an_engine_changes_its_weights_and_sleeps(pairs, name, num_ranks):
    """With new weights it is one of their checkpoint, and it wakes up as it was."""
    old, new = pairs[name]
    with make_llm(old, tensor_parallel_size=num_ranks) as llm:
        for path in (new, old):
            llm.update_weights(iter(tensors_of(path).items()))
            assert complete(llm, PROMPTS, greedy(12)) == expected(path)
            assert_idle(llm)
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            assert complete(llm, PROMPTS, greedy(12)) == expected(old)
            assert_idle(llm)


def test_some_of_the_weights(paths, tmp_path):
    old, new = (tensors_of(path) for path in paths)
    names = [name for name in new if ".1.mlp." in name or name.endswith("q_proj.weight")]
    mixed = make_checkpoint(tmp_path, seed=0)
    torch_tensors = old | {name: new[name] for name in names}
    save_file(torch_tensors, mixed / "model.safetensors", metadata={"format": "pt"})
    with make_llm(paths[0]) as llm:
        llm.update_weights((name, new[name].double()) for name in names)
        assert complete(llm, PROMPTS, greedy(12)) == expected(mixed)


def test_an_engine_in_fp8_quantizes_them(paths):
    with make_llm(paths[1], quantization="fp8") as llm:
        quantized = complete(llm, PROMPTS, greedy(12))
    with make_llm(paths[0], quantization="fp8") as llm:
        llm.update_weights(tensors_of(paths[1]).items())
        assert complete(llm, PROMPTS, greedy(12)) == quantized


def test_a_wrong_tensor_is_refused_before_anything_changes(paths):
    norm, whole = "model.norm.weight", [*tensors_of(paths[1]).items()]
    with make_llm(paths[0]) as llm:
        for tensors, error, message in (
            ([("model.layers.0.mlp.gate_prj.weight", torch.zeros(3)), *whole], ValueError, "did you mean .*gate_proj"),
            ([(norm, torch.zeros(3)), *whole], ValueError, r"has shape \[3\], the model needs"),
            ([(norm, torch.zeros(64, dtype=torch.int64)), *whole], ValueError, "must be a float"),
            ([norm, *whole], TypeError, "must be pairs"),
            (2 * whole, ValueError, "comes twice"),
        ):
            with pytest.raises(error, match=message):
                llm.update_weights(tensors)
            assert complete(llm, PROMPTS, greedy(12)) == expected(paths[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_transformers_gives_its_weights_by_its_own_names(pairs, name):
    """transformers 5 holds a layer's experts in two tensors, and a tied head not at all."""
    old, new = pairs[name]
    model = AutoModelForCausalLM.from_pretrained(new)
    with make_llm(old) as llm:
        llm.update_weights(model.named_parameters())
        assert complete(llm, PROMPTS, greedy(12)) == expected(new)


def test_experts_of_another_number(pairs):
    with make_llm(pairs["experts"][0]) as llm:
        for num, message in ((7, "7 experts, the model has more"), (9, "did you mean")):
            with pytest.raises(ValueError, match=message):
                llm.update_weights([("model.layers.0.mlp.experts.down_proj", torch.zeros(num, 64, 32))])


def test_cached_prefixes_of_old_weights_are_forgotten(paths):
    with make_llm(paths[0]) as llm:
        complete(llm, PROMPTS, greedy(3))
        llm.update_weights(tensors_of(paths[1]).items())
        outputs = llm.generate(PROMPTS, greedy(12), use_tqdm=False)
        assert [output["num_cached_tokens"] for output in outputs] == [0, 0, 0]
        assert [output["token_ids"] for output in outputs] == expected(paths[1])


@pytest.mark.parametrize("use", [lambda llm: llm.update_weights([]), lambda llm: llm.sleep()])
def test_not_while_requests_are_unfinished(paths, use):
    with make_llm(paths[0]) as llm:
        llm.add_request(PROMPTS[0], greedy(5))
        with pytest.raises(RuntimeError, match="while other requests are unfinished"):
            use(llm)
        while not llm.is_finished():
            llm.step()
        use(llm)


# Sleep


def test_updated_weights_stay_in_the_first_sleep_and_go_in_the_deeper_one(paths):
    with make_llm(paths[0]) as llm:
        llm.sleep(1)
        llm.update_weights(tensors_of(paths[1]).items())
        llm.wake_up()
        assert complete(llm, PROMPTS, greedy(12)) == expected(paths[1])
        llm.sleep(2)
        with pytest.raises(RuntimeError, match=r"update_weights.*wake_up\(\) first"):
            llm.update_weights(tensors_of(paths[1]).items())
        llm.wake_up()
        assert complete(llm, PROMPTS, greedy(12)) == expected(paths[0])


def test_a_sleeping_engine_refuses_requests(paths):
    with make_llm(paths[0]) as llm:
        llm.wake_up()  # It does not sleep.
        llm.sleep()
        with pytest.raises(RuntimeError, match=r"generate\(\): the engine sleeps; call wake_up\(\) first"):
            complete(llm, PROMPTS, greedy(3))
        with pytest.raises(RuntimeError, match=r"the engine sleeps already"):
            llm.sleep()
        with pytest.raises(RuntimeError, match=r"the engine sleeps; call wake_up\(\) first"):
            llm.add_request(PROMPTS[0])
        llm.wake_up()
        assert complete(llm, PROMPTS, greedy(12)) == expected(paths[0])
    with make_llm(paths[0]) as llm:
        llm.sleep(2)  # It can exit in its sleep.
    with make_llm(paths[0]) as llm, pytest.raises(ValueError, match="level=3: must be 1"):
        llm.sleep(3)


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_that_finds_no_memory_sleeps_on(paths, level, monkeypatch):
    def fail(*args) -> None:
        raise MemoryError("all taken")

    with make_llm(paths[0]) as llm:
        llm.sleep(level)
        with monkeypatch.context() as patch:
            patch.setattr(llm.model_runner.kv_store, "allocate", fail)
            with pytest.raises(MemoryError, match=r"wake_up\(\): no room .*all taken"):
                llm.wake_up()
        with pytest.raises(RuntimeError, match="the engine sleeps"):
            complete(llm, PROMPTS, greedy(3))
        llm.wake_up()
        assert complete(llm, PROMPTS, greedy(12)) == expected(paths[0])


def mapped_bytes() -> int:
    """Of this process, whether they have been touched or not."""
    return 1024 * int(re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="Linux tells what is mapped")
def test_the_kv_cache_is_given_back_and_taken_again(paths):
    with make_llm(paths[0], num_kvcache_blocks=2**16) as llm:
        cache = llm.model_runner.kv_store.tensors[0]
        num_bytes = cache.numel() * cache.element_size()
        del cache
        awake = mapped_bytes()
        assert num_bytes > 2**28
        for _ in range(3):
            llm.sleep()
            assert awake - mapped_bytes() > 0.9 * num_bytes
            llm.wake_up()
            assert abs(mapped_bytes() - awake) < 0.1 * num_bytes


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_5_text", marks=needs_family("qwen3_5_text"))])
def test_scales_of_an_fp8_cache_follow_the_weights(tmp_path, family):
    """However the weights came, an engine is the one that has started with them."""
    old, new = (make_checkpoint(tmp_path / name, family=family, seed=seed) for seed, name in enumerate(("old", "new")))
    larger = {name: tensor * 8 if "v_proj" in name else tensor for name, tensor in tensors_of(new).items()}
    save_file(larger, Path(new, "model.safetensors"), metadata={"format": "pt"})

    def scores(llm) -> list:
        return llm.score([random_prompt(20, 1)], [random_prompt(20, 2)], use_tqdm=False)[0]["logprobs"]

    def scales(llm) -> list:
        return torch.cat(llm.model_runner.kv_store.scales).tolist()

    expected = {}
    for path in (old, new):
        with make_llm(path, kv_cache_dtype="fp8") as llm:
            expected[path] = scores(llm), scales(llm)
    assert expected[old][1] != expected[new][1]
    with make_llm(old, kv_cache_dtype="fp8", load_format="dummy") as llm:
        llm.update_weights(tensors_of(new).items())
        assert (scores(llm), scales(llm)) == expected[new]
        llm.sleep(1)
        llm.update_weights(tensors_of(old).items())
        llm.wake_up()
        assert (scores(llm), scales(llm)) == expected[old]
    with make_llm(old, kv_cache_dtype="fp8") as llm:
        llm.update_weights(tensors_of(new).items())
        llm.sleep(2)
        llm.wake_up()
        assert (scores(llm), scales(llm)) == expected[old]
        llm.update_weights(tensors_of(new).items())
        assert (scores(llm), scales(llm)) == expected[new]
