"""An engine with a KV cache in 8 bits: equal tokens however a request is computed, twice the tokens, and its scales."""

import logging
import re

import pytest
import torch
from checkpoints import (
    assert_idle,
    complete,
    edit_tensors,
    greedy,
    make_checkpoint,
    make_llm,
    random_prompt,
)
from gpus import pretend_gpu
from safetensors.torch import load_file

from nanovllm.config import Config
from nanovllm.engine.start.kv_scales import powers_of_two
from nanovllm.kernels.attention.kv_quantization import E4M3_MAX
from nanovllm.layers.backends import flash_attn_backend, gpu_backend
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.choice import select_backend

NUM_TOKENS = 24
# A prefix of several blocks for the last three.
HEAD = random_prompt(40, seed=7)
PROMPTS = [random_prompt(n, seed=n) for n in (3, 50, 17)] + [HEAD + random_prompt(n, seed=n) for n in (1, 24, 60)]
# How far the best token's log-probability lies above the second's, at least: rounding of float32 sums in another order
# changes a few values of the cache to their neighbours, of which the tokens must not depend.
MARGIN = 0.02


def make_fp8(path, **options):
    return make_llm(path, **{"kv_cache_dtype": "fp8"} | options)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), num_attention_heads=4, num_key_value_heads=2)


def decided(llm, prompts: list[list[int]], num_tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts like these of which no token is a near tie, and their completions, one request at a time."""
    params = greedy(num_tokens, logprobs=2)
    found, completions = [], []
    for prompt in prompts:
        while True:
            (output,) = llm.generate([prompt], params, use_tqdm=False)
            pairs = [sorted(entry.values(), reverse=True)[:2] for entry in output["logprobs"]]
            if all(first - second > MARGIN for first, second in pairs):
                break
            prompt = [*prompt[:-1], (prompt[-1] + 1) % 300]
        found.append(prompt)
        completions.append(output["token_ids"])
    return found, completions


@pytest.fixture(scope="module")
def alone(path):
    """`decided` in a fresh engine."""
    with make_fp8(path, enable_prefix_caching=False) as llm:
        return decided(llm, PROMPTS, NUM_TOKENS)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 24},
        {"max_num_batched_tokens": 24, "enable_prefix_caching": False, "overlap_steps": False},
        {"mixed_step_rows": 16, "max_num_batched_tokens": 70},
        {"num_kvcache_blocks": 13, "max_num_batched_tokens": 24},
        {"kvcache_block_size": 256, "max_num_seqs": 2},
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "max_num_batched_tokens": 24, "num_kvcache_blocks": 13},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()) or "one batch",
)
def test_the_same_tokens_however_they_are_computed(path, alone, options):
    prompts, completions = alone
    with make_fp8(path, **options) as llm:
        for _ in range(2):  # The second time from the prefix cache, where there is one.
            assert complete(llm, prompts, greedy(NUM_TOKENS)) == completions
        order = [4, 0, 5, 2, 1, 3]
        assert complete(llm, [prompts[i] for i in order], greedy(NUM_TOKENS)) == [completions[i] for i in order]
        assert (llm.scheduler.num_preemptions > 0) == ("num_kvcache_blocks" in options)
        assert_idle(llm)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"enforce_eager": True, "max_num_batched_tokens": 24},
        {"mixed_step_rows": 16, "max_num_batched_tokens": 70},
        {"attention_backend": "torch"},
    ],
)
def test_a_gpu_gives_the_same_tokens(path, alone, options):
    prompts, completions = alone
    with make_fp8(path, device="cuda", dtype="float32", **options) as llm:
        for _ in range(2):
            assert complete(llm, prompts, greedy(NUM_TOKENS)) == completions
        assert_idle(llm)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_a_gpu(path, alone, dtype):
    """Log-probabilities of the same tokens, from prefills and from the cache."""
    prompts, completions = alone
    with make_fp8(path, dtype=dtype) as llm:
        expected = [score["total"] / NUM_TOKENS for score in llm.score(prompts, completions, use_tqdm=False)]
    with make_fp8(path, device="cuda", dtype=dtype) as llm:
        for _ in range(2):
            found = [score["total"] / NUM_TOKENS for score in llm.score(prompts, completions, use_tqdm=False)]
            assert found == pytest.approx(expected, abs=0.1)


def test_layers_with_a_window(tmp_path):
    fields = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    path = make_checkpoint(tmp_path, **fields)
    with make_fp8(path) as llm:
        layers = [layer for store in llm.model_runner.stores for layer in store.layers]
        assert {layer.window for layer in layers} == {None, 20}
        prompts, completions = decided(llm, PROMPTS, 4)
        assert complete(llm, prompts, greedy(4)) == completions
    with make_fp8(path, max_num_batched_tokens=16, enable_prefix_caching=False) as llm:
        assert complete(llm, prompts, greedy(4)) == completions


def test_twice_the_tokens_in_the_same_memory(path):
    capacity = []
    for dtype, cache in (("bfloat16", "auto"), ("bfloat16", "fp8"), ("float32", "fp8")):
        with make_llm(path, dtype=dtype, kv_cache_dtype=cache, num_kvcache_blocks=-1, kvcache_gib=0.01) as llm:
            capacity.append(llm.config.num_kvcache_blocks)
            kv_cache = llm.model_runner.kv_store.tensors[0]
            assert kv_cache.dtype == (torch.bfloat16 if cache == "auto" else torch.float8_e4m3fn)
            assert kv_cache.numel() * kv_cache.itemsize <= 0.01 * 2**30
    assert capacity[0] * 2 <= capacity[1] <= capacity[0] * 2 + 1
    assert capacity[1] == capacity[2]


def scales_of(llm) -> torch.Tensor:
    """[layers, 2, kv_heads]."""
    return torch.stack(llm.model_runner.kv_store.scales)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_cache_holds_what_was_computed(path, dtype):
    """All keys and values of a prompt, up to the rounding of e4m3; none is clamped."""
    held = []
    for cache in ("auto", "fp8"):
        with make_llm(path, dtype=dtype, kv_cache_dtype=cache) as llm:
            complete(llm, [random_prompt(100, seed=1)], greedy(1))
            runner = llm.model_runner
            full = [block.block_id for block in llm.scheduler.block_manager.blocks if block.hash != -1]
            kv = runner.kv_store.tensors[0][:, :, full].double()  # [2, layers, blocks, block_size, kv_heads, head_dim]
            if cache == "fp8":
                assert E4M3_MAX / 16 < kv.abs().max() < E4M3_MAX / 2
                kv *= scales_of(llm).transpose(0, 1)[:, :, None, None, :, None]
            held.append(kv)
    # The first layer's are computed of equal numbers; of later layers the attention before them was rounded.
    error = (held[0][:, 0] - held[1][:, 0]).abs()
    assert (error <= held[0][:, 0].abs() / 16 + 2.0**-9).all()
    assert (held[0] - held[1]).abs().mean() < held[0].abs().mean() / 16


# -- scales ------------------------------------------------------------------------------------------------------------


def test_powers_of_two():
    scales = torch.tensor([1.0, 1.1, 0.5, 0.4999, 3.0, 4.0, 1e-30, 448.0])
    assert powers_of_two(scales).tolist() == [1, 2, 0.5, 0.5, 4, 4, 2.0**-14, 512]


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("self_attn.{}_scale", ()),
        ("self_attn.{}_scale", (2, 1, 1)),
        ("self_attn.attn.{}_scale", (1,)),
        ("self_attn.{}_proj.{}_scale", (1,)),
        ("self_attn.{}_proj.output_scale", (1,)),
    ],
)
def test_scales_of_the_checkpoint(tmp_path, caplog, name, shape):
    path = make_checkpoint(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    num_layers = len({key.split(".")[2] for key in load_file(path / "model.safetensors") if ".layers." in key})

    def add(tensors):
        for layer in range(num_layers):
            for i, part in enumerate("kv"):
                scale = torch.arange(1, 3).view(shape) if shape == (2, 1, 1) else torch.ones(shape)
                tensors[f"model.layers.{layer}." + name.format(part, part)] = scale * 0.03 * (1 + layer + 2 * i)

    edit_tensors(path, add)
    per_head = torch.tensor([1.0, 2.0]) if shape == (2, 1, 1) else torch.ones(2)
    expected = powers_of_two(
        torch.stack(
            [torch.stack([per_head * 0.03 * (1 + layer + 2 * i) for i in range(2)]) for layer in range(num_layers)]
        )
    )
    with caplog.at_level(logging.INFO), make_fp8(path) as llm:
        assert torch.equal(scales_of(llm), expected)
        prompts, completions = decided(llm, PROMPTS[:2], 4)
    assert "KV cache scales: the checkpoint" in caplog.text
    if shape == (2, 1, 1):
        with make_fp8(path, tensor_parallel_size=2, kv_cache_scales="checkpoint") as llm:
            assert torch.equal(scales_of(llm), expected[:, :, :1])
            assert complete(llm, prompts, greedy(4)) == completions
    with make_fp8(path, kv_cache_scales="one") as llm:
        assert (scales_of(llm) == 1).all()
    with make_llm(path) as llm:  # A cache of the model's dtype has no use for them.
        assert llm.model_runner.kv_store.scales is None
        complete(llm, PROMPTS[:1], greedy(2))


@pytest.mark.parametrize("value", [torch.tensor(0.0), torch.tensor(float("nan")), torch.ones(3), torch.tensor(-1.0)])
def test_scales_that_are_none(tmp_path, value):
    path = make_checkpoint(tmp_path, num_attention_heads=4, num_key_value_heads=2)
    name = "model.layers.0.self_attn.k_scale"
    edit_tensors(path, lambda tensors: tensors.update({name: value}))
    with pytest.raises(ValueError, match=rf"'{name}' must hold one number above 0, or one for each of 2 KV heads"):
        make_fp8(path)


def test_scales_of_some_layers_only(tmp_path):
    path = make_checkpoint(tmp_path)
    edit_tensors(path, lambda tensors: tensors.update({"model.layers.0.self_attn.k_scale": torch.ones(1)}))
    with pytest.raises(
        ValueError, match=r"'model.layers.0.self_attn.v_scale' is missing.*kv_cache_scales='calibrated'"
    ):
        make_fp8(path)
    make_fp8(path, kv_cache_scales="calibrated").exit()


def test_a_checkpoint_without_scales(path):
    for load_format in ("auto", "dummy"):
        with pytest.raises(ValueError, match=r"kv_cache_scales='checkpoint': .* has no scales.*use 'calibrated'"):
            make_fp8(path, kv_cache_scales="checkpoint", load_format=load_format)


def test_calibration_does_not_depend_on_what_the_engine_is_for(path):
    found = []
    for options in ({}, {"max_num_seqs": 1, "max_num_batched_tokens": 8}, {"seed": 3, "kvcache_block_size": 32}):
        with make_fp8(path, **options) as llm:
            found.append(scales_of(llm))
            assert not any(layer._forward_pre_hooks for layer in llm.model_runner.kv_store.layers)
    assert all(torch.equal(scales, found[0]) for scales in found)
    assert torch.equal(powers_of_two(found[0]), found[0])


def test_random_weights_are_calibrated_too(path):
    with make_fp8(path, load_format="dummy") as llm:
        assert (scales_of(llm) < 1).any()
        complete(llm, PROMPTS[:1], greedy(2))


def test_weights_of_zeros_and_of_nan(tmp_path):
    for name, value in (("zeros", 0.0), ("nan", float("nan"))):
        path = make_checkpoint(tmp_path / name)
        edit_tensors(path, lambda tensors, value=value: [t.fill_(value) for t in tensors.values()])
        with make_fp8(path) as llm:
            assert (scales_of(llm) == 1).all()


def test_values_that_overflow_are_reported(tmp_path, caplog):
    """They are clamped where they are stored, so the logits look healthy."""
    path = make_checkpoint(tmp_path, family="qwen2")
    edit_tensors(path, lambda tensors: tensors["model.layers.1.self_attn.v_proj.weight"].mul_(1e5))
    for dtype, message in (("bfloat16", None), ("float16", "keys or values that are NaN or infinite.*dtype float16")):
        caplog.clear()
        make_fp8(path, dtype=dtype).exit()
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(warnings) == (message is not None)
        assert all(re.search(message, warning) for warning in warnings)


# -- options -----------------------------------------------------------------------------------------------------------


def test_what_the_options_become(path):
    assert Config(path, device="cpu").kv_cache_dtype == torch.float32
    assert Config(path, device="cpu", dtype="bfloat16").kv_cache_dtype == torch.bfloat16
    for value in ("fp8", "fp8_e4m3", torch.float8_e4m3fn):
        assert Config(path, device="cpu", kv_cache_dtype=value).kv_cache_dtype == torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype='fp8_e5m2': must be one of auto, fp8, fp8_e4m3"),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype=8"),
        ({"kv_cache_dtype": "fp8", "kv_cache_scales": "two"}, "kv_cache_scales='two': must be one of auto, checkpoint"),
        ({"kv_cache_scales": "one"}, "kv_cache_scales='one': must be 'auto' without kv_cache_dtype='fp8'"),
    ],
)
def test_wrong_options(path, options, message):
    with pytest.raises(ValueError, match=message):
        Config(path, device="cpu", **options)


@pytest.mark.parametrize(("capability", "is_taken"), [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_gpus_without_fp8(path, monkeypatch, capability, is_taken):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    pretend_gpu(monkeypatch, capability=capability)
    options = {"device": "cuda", "max_num_batched_tokens": 64}
    if is_taken:
        assert Config(path, kv_cache_dtype="fp8", **options).kv_cache_dtype == torch.float8_e4m3fn
    else:
        with pytest.raises(
            ValueError, match=r"kv_cache_dtype='fp8': must be 'auto' on a GPU of compute capability 8\."
        ):
            Config(path, kv_cache_dtype="fp8", **options)
    assert Config(path, **options).kv_cache_dtype != torch.float8_e4m3fn


def test_flash_attn_reads_no_fp8_cache(monkeypatch):
    monkeypatch.setattr(flash_attn_backend, "find_spec", lambda name: True)
    monkeypatch.setattr(gpu_backend, "HAS_TRITON", True)
    gpu = torch.device("cuda", 0)
    shape = AttentionShape(8, 8, 128, 256, torch.bfloat16, gpu, torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="attention_backend='flash_attn': reads no fp8 KV cache; use triton"):
        select_backend("flash_attn", shape)
    assert select_backend("triton", shape).name == "triton"
