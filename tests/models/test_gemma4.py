"""Gemma 4 against transformers, float32 on the CPU; and what its configurations and checkpoints may say.

`test_family_parity.py` draws its switches.
"""

import json

import pytest
import torch
from checkpoints import (
    Reference,
    complete,
    edit_json,
    edit_tensors,
    generate,
    greedy,
    make_checkpoint,
    make_llm,
    needs_family,
    random_prompt,
)
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from nanovllm import SamplingParams

pytestmark = needs_family("gemma4_text")

SIZES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 32}
SOFTCAP = {"final_logit_softcapping": 2.0}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("gemma4"), family="gemma4_text", **SIZES | EXPERTS | SOFTCAP)
    return path, Reference(path)


def test_logits_are_bounded(base):
    """A bound does not change which token is the most likely, but how likely it is."""
    path, reference = base
    prompt, completion = random_prompt(30, 1), random_prompt(20, 2)
    with make_llm(path) as llm:
        (score,) = llm.score([prompt], [completion], use_tqdm=False)
    logits = reference.logits(prompt, completion)
    assert logits.abs().max() < 2
    expected = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).flatten()
    torch.testing.assert_close(torch.tensor(score["logprobs"]), expected, atol=2e-4, rtol=0)


def test_the_cache_holds_layers_of_both_kinds(base):
    path, _ = base
    with make_llm(path, num_kvcache_blocks=10) as llm:
        cache = llm.model_runner.kv_store
        assert [list(tensor.shape) for tensor in cache.tensors] == [[2, 1, 10, 16, 2, 32], [2, 1, 10, 16, 1, 64]]
        assert cache.bytes_per_block == sum(tensor.nbytes for tensor in cache.tensors) // 10
        llm.sleep()
        assert cache.tensors == []
        llm.wake_up()
        assert len(cache.tensors) == 2


def test_a_cached_beginning_and_samples(base):
    path, reference = base
    prompts = reference.draw_prompts((40, 50), 8, prefix=random_prompt(33, 3))
    with make_llm(path) as llm:
        for _ in range(2):
            assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)
        assert llm.scheduler.num_prefix_hits > 0
        (output,) = generate(llm, prompts[:1], greedy(8, n=2))
        assert [sample["token_ids"] for sample in output["samples"]] == reference.greedy(prompts[:1], 8) * 2


@pytest.mark.slow
def test_two_ranks_share_the_one_head_of_keys_and_each_expert(base):
    path, reference = base
    prompts = reference.draw_prompts((17, 60), 8)
    with make_llm(path, tensor_parallel_size=2) as llm:
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


@pytest.mark.parametrize("spelling", ["published", "of transformers 5.24"])
def test_both_spellings_of_the_wider_heads(base, tmp_path, spelling):
    path, reference = base
    config = json.loads((path / "config.json").read_text())
    assert config["per_layer_config"] == {"1": {"head_dim": 64, "num_key_value_heads": 1}}
    if spelling == "published":
        del config["per_layer_config"]
        config |= {"global_head_dim": 64, "num_global_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    prompts = reference.draw_prompts((20,), 6)
    with make_llm(tmp_path) as llm:
        assert complete(llm, prompts, greedy(6)) == reference.greedy(prompts, 6)


@pytest.mark.parametrize(
    "of_layers",
    [
        {"0": {"head_dim": 64}},
        {"1": {"head_dim": 64, "intermediate_size": 32}},
        {"0": {"head_dim": 16}, "1": {"head_dim": 64}},
    ],
    ids=str,
)
def test_other_differences_between_layers_are_refused(base, tmp_path, of_layers):
    config = json.loads((base[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"per_layer_config": of_layers}))
    with pytest.raises(ValueError, match=r"per_layer_config=.*: must be head_dim and num_key_value_heads alone"):
        make_llm(tmp_path, load_format="dummy")


def test_scales_of_a_cache_in_fp8(base, tmp_path):
    """A checkpoint's: a number for each head, of which layers have different numbers."""
    path, _ = base
    edit_json(tmp_path / "config.json", **json.loads((path / "config.json").read_text()))
    tensors = load_file(path / "model.safetensors")
    wanted = {0: torch.tensor([0.25, 0.5]), 1: torch.tensor([2.0])}
    names = {f"model.layers.{i}.self_attn.{part}_scale": wanted[i].clone() for i in wanted for part in "kv"}
    save_file(tensors | names, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with make_llm(tmp_path, kv_cache_dtype="fp8") as llm:
        found = llm.model_runner.kv_store.scales
        assert [scales.tolist() for scales in found] == [[scale.tolist()] * 2 for scale in wanted.values()]


def test_random_weights(base):
    path, _ = base
    with make_llm(path, load_format="dummy") as llm:
        layer = llm.model_runner.model.model.layers[0]
        assert layer.layer_scalar.item() == 1
        assert layer.mlp_output_norm.sum_scale is layer.layer_scalar
        assert (layer.mlp.beside.expert_scales == 1).all()
        params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, seed=1)
        assert len(complete(llm, [[1, 2, 3]], params)[0]) == 4


@pytest.mark.parametrize("unified", [False, True], ids=["towers", "unified"])
def test_the_text_part_of_a_larger_model(tmp_path, unified):
    kind, name = ("gemma4_unified", "Gemma4Unified") if unified else ("gemma4", "Gemma4")
    path = make_checkpoint(tmp_path, family=f"{kind}_text", **SIZES | ({} if unified else EXPERTS))
    reference = Reference(path)

    def nest(tensors):
        for name in list(tensors):
            tensors["model.language_model." + name.removeprefix("model.")] = tensors.pop(name)
        tensors["model.embed_vision.embedding_projection.weight"] = torch.zeros(8)

    edit_tensors(path, nest)
    text = AutoConfig.from_pretrained(path).to_dict()
    (path / "config.json").unlink()
    larger = {"model_type": kind, "architectures": [f"{name}ForConditionalGeneration"], "eos_token_id": [1, 106]}
    edit_json(path / "config.json", **larger, text_config=text)
    prompts = reference.draw_prompts((1, 40), 8)
    with make_llm(path) as llm:
        assert llm.config.eos == (1, 106)
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)
