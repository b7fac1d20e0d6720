"""Weights that change while the engine lives, and memory that it gives back meanwhile."""

import re
from functools import cache
from pathlib import Path

import pytest
import torch
from checkpoints import Reference, assert_idle, complete, greedy, make_checkpoint, make_llm, random_prompt
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

PROMPTS = [random_prompt(length, seed=length) for length in (40, 7, 33)]
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES = [("qwen3", {}), ("qwen3", {"tie_word_embeddings": True}), ("qwen3_moe", EXPERTS)]


def tensors_of(path) -> dict[str, torch.Tensor]:
    return load_file(Path(path, "model.safetensors"))


@pytest.fixture(scope="module", params=FAMILIES, ids=["untied", "tied", "experts"])
def pair(request, tmp_path_factory):
    """Two checkpoints of one shape with different weights."""
    family, fields = request.param
    return [make_checkpoint(tmp_path_factory.mktemp("w"), family=family, seed=seed, **fields) for seed in (0, 1)]


@pytest.fixture(scope="module", params=[1, 2])
def engine(pair, request):
    """With the first checkpoint's weights, on one rank and on two; each test leaves it so."""
    with make_llm(pair[0], tensor_parallel_size=request.param) as llm:
        yield llm


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return [make_checkpoint(tmp_path_factory.mktemp("w"), seed=seed) for seed in (0, 1)]


@cache
def expected(path, num_tokens: int = 12) -> list[list[int]]:
    return Reference(path).greedy(PROMPTS, num_tokens)


def test_an_engine_with_new_weights_is_an_engine_of_their_checkpoint(pair, engine):
    old, new = pair
    for path in (old, new, old):
        engine.update_weights(iter(tensors_of(path).items()))
        assert complete(engine, PROMPTS, greedy(12)) == expected(path)
        assert_idle(engine)


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


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (("model.layers.0.mlp.gate_prj.weight", torch.zeros(3)), ValueError, "did you mean .*gate_proj"),
        (("model.norm.weight", torch.zeros(3)), ValueError, r"has shape \[3\], the model needs"),
        (("model.norm.weight", torch.zeros(64, dtype=torch.int64)), ValueError, "must be a float"),
        ("model.norm.weight", TypeError, "must be pairs"),
    ],
)
def test_a_wrong_tensor_is_refused_before_anything_changes(paths, change, error, message):
    with make_llm(paths[0]) as llm:
        with pytest.raises(error, match=message):
            llm.update_weights([change, *tensors_of(paths[1]).items()])
        assert complete(llm, PROMPTS, greedy(12)) == expected(paths[0])


@pytest.mark.parametrize("fields", FAMILIES, ids=["untied", "tied", "experts"])
def test_a_model_of_transformers_gives_its_weights_by_its_own_names(fields, tmp_path):
    """transformers 5 holds a layer's experts in two tensors, and a tied head not at all."""
    family, overrides = fields
    old, new = (make_checkpoint(tmp_path / str(seed), family=family, seed=seed, **overrides) for seed in (0, 1))
    model = AutoModelForCausalLM.from_pretrained(new)
    with make_llm(old) as llm:
        llm.update_weights(model.named_parameters())
        assert complete(llm, PROMPTS, greedy(12)) == expected(new)


@pytest.mark.parametrize(("num", "message"), [(-1, "127 experts, the model has more"), (1, "did you mean")])
def test_experts_of_another_number(num, message, tmp_path):
    path = make_checkpoint(tmp_path, family="qwen3_moe")
    with make_llm(path) as llm:
        layer = "model.layers.0.mlp.experts"
        experts = 128 + num
        with pytest.raises(ValueError, match=message):
            llm.update_weights([(f"{layer}.down_proj", torch.zeros(experts, 64, 768))])


def test_a_tensor_that_comes_twice(paths):
    with make_llm(paths[0]) as llm, pytest.raises(ValueError, match="comes twice"):
        llm.update_weights(2 * list(tensors_of(paths[0]).items()))


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


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_wakes_up_as_it_was(pair, engine, level):
    for _ in range(2):
        engine.sleep(level)
        engine.wake_up()
        assert complete(engine, PROMPTS, greedy(12)) == expected(pair[0])
        assert_idle(engine)


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
