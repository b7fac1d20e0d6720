"""What is Gemma 4's own: two kinds of heads, in the cache and in the configuration, and numbers of a layer. The table
in tests/helpers/families.py has the rest."""

import json

import pytest
import torch
from checkpoints import complete, edit_json, greedy, make_llm, needs_family
from families import NUM_TOKENS, Case
from safetensors.torch import load_file, save_file

from nanovllm import SamplingParams

pytestmark = needs_family("gemma4_text")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return Case("gemma4_text", tmp_path_factory.mktemp("gemma4"))


def test_the_cache_holds_layers_of_both_kinds(base):
    path = base.path
    with make_llm(path, num_kvcache_blocks=10) as llm:
        caches = llm.model_runner.stores
        shapes = [list(tensor.shape) for cache in caches for tensor in cache.tensors]
        assert shapes == [[2, 1, 10, 16, 1, 32], [2, 1, 5, 16, 2, 16]], "a window gives back: it has fewer blocks"
        assert [cache.bytes_per_block for cache in caches] == [2 * 16 * 32 * 4, 2 * 16 * 2 * 16 * 4]
        llm.sleep()
        assert [cache.tensors for cache in caches] == [[], []]
        llm.wake_up()
        assert [len(cache.tensors) for cache in caches] == [1, 1]


@pytest.mark.parametrize("spelling", ["published", "of transformers 5.24"])
def test_both_spellings_of_the_wider_heads(base, tmp_path, spelling):
    path = base.path
    config = json.loads((path / "config.json").read_text())
    assert config["per_layer_config"] == {"1": {"head_dim": 32, "num_key_value_heads": 1}}
    if spelling == "published":
        del config["per_layer_config"]
        config |= {"global_head_dim": 32, "num_global_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    with make_llm(tmp_path) as llm:
        base.assert_greedy(complete(llm, base.prompts, greedy(NUM_TOKENS)))


@pytest.mark.parametrize(
    "of_layers",
    [
        {"0": {"head_dim": 32}},
        {"1": {"head_dim": 32, "intermediate_size": 32}},
        {"0": {"head_dim": 8}, "1": {"head_dim": 32}},
    ],
    ids=str,
)
def test_other_differences_between_layers_are_refused(base, tmp_path, of_layers):
    config = json.loads((base.path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"per_layer_config": of_layers}))
    with pytest.raises(ValueError, match=r"per_layer_config=.*: must be head_dim and num_key_value_heads alone"):
        make_llm(tmp_path, load_format="dummy")


def test_scales_of_a_cache_in_fp8(base, tmp_path):
    """A checkpoint's: a number for each head, of which layers have different numbers."""
    path = base.path
    edit_json(tmp_path / "config.json", **json.loads((path / "config.json").read_text()))
    tensors = load_file(path / "model.safetensors")
    wanted = {0: torch.tensor([0.25, 0.5]), 1: torch.tensor([2.0])}
    names = {f"model.layers.{i}.self_attn.{part}_scale": wanted[i].clone() for i in wanted for part in "kv"}
    save_file(tensors | names, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with make_llm(tmp_path, kv_cache_dtype="fp8") as llm:
        full, windowed = llm.model_runner.stores
        found = [*windowed.scales, *full.scales]
        assert [scales.tolist() for scales in found] == [[scale.tolist()] * 2 for scale in wanted.values()]


def test_random_weights(base):
    path = base.path
    with make_llm(path, load_format="dummy") as llm:
        layer = llm.model_runner.model.model.layers[0]
        assert layer.layer_scalar.item() == 1
        assert layer.mlp_output_norm.sum_scale is layer.layer_scalar
        assert (layer.mlp.beside.expert_scales == 1).all()
        params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True, seed=1)
        assert len(complete(llm, [[1, 2, 3]], params)[0]) == 4
