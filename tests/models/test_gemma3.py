"""Gemma 3 against transformers, float32 on the CPU, token for token; and what its configurations may say."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import (
    Reference,
    assert_idle,
    complete,
    edit_json,
    edit_tensors,
    generate,
    greedy,
    make_checkpoint,
    make_llm,
    random_prompt,
)
from gpu_engines import REGRET, gpu_llm, needs_flash_attn
from transformers import AutoConfig, AutoModelForCausalLM

from nanovllm.models.gemma3 import Gemma3ForCausalLM

CONFIGS = {
    # Prompts are shorter and longer than the windows, and these end inside blocks, or with them.
    "window 13": {"sliding_window": 13},
    "window 32, global layers alternate": {"sliding_window": 32, "num_hidden_layers": 4, "sliding_window_pattern": 2},
    "window 2, heads of 256": {"sliding_window": 2, "head_dim": 256, "num_key_value_heads": 1},
    "window beyond all prompts": {"sliding_window": 500, "attention_bias": True, "tie_word_embeddings": False},
}
ENGINES = {
    "roomy": {},
    # Prompts in chunks, and sequences that are preempted.
    "cramped": {"num_kvcache_blocks": 8, "max_num_batched_tokens": 20},
    "mixed": {"mixed_step_rows": 16, "max_num_batched_tokens": 100},
    "one by one, no cache": {"overlap_steps": False, "enable_prefix_caching": False, "num_kvcache_blocks": 8},
}


def make_gemma3(directory: Path, **overrides) -> Path:
    """A text model. RoPE's bases are so small that one for the other shows."""
    fields = {"num_hidden_layers": 7, "query_pre_attn_scalar": 50, "rope_theta": 700.0, "rope_local_base_freq": 30.0}
    return make_checkpoint(directory, family="gemma3_text", **fields | overrides)


@pytest.fixture(scope="module", params=CONFIGS)
def configured(request, tmp_path_factory):
    """(checkpoint, its Reference) of each configuration."""
    path = make_gemma3(tmp_path_factory.mktemp("gemma3"), **CONFIGS[request.param])
    return path, Reference(path)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(checkpoint, its Reference) of one configuration."""
    scaled = {"rope_type": "linear", "factor": 8.0}
    path = make_gemma3(tmp_path_factory.mktemp("gemma3"), sliding_window=13, rope_scaling=scaled)
    return path, Reference(path)


@pytest.mark.slow
@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_every_configuration(configured, options):
    path, reference = configured
    prompts = reference.draw_prompts((1, 13, 90, 16, 40), 16)
    with make_llm(path, **options) as llm:
        assert complete(llm, prompts, greedy(16)) == reference.greedy(prompts, 16)
        assert ("num_kvcache_blocks" in options) == (llm.scheduler.num_preemptions > 0)
        assert_idle(llm)


def test_a_cached_beginning(base):
    path, reference = base
    prompts = reference.draw_prompts((49, 60, 90), 12, prefix=random_prompt(48, seed=1))
    with make_llm(path) as llm:
        for num_cached in (48, 80):
            outputs = generate(llm, prompts, greedy(12))
            assert [output["token_ids"] for output in outputs] == reference.greedy(prompts, 12)
            assert outputs[2]["num_cached_tokens"] == num_cached


def test_two_ranks_give_the_same_tokens(base):
    path, reference = base
    prompts = reference.draw_prompts((1, 45, 14, 31), 16)
    with make_llm(path, tensor_parallel_size=2, num_kvcache_blocks=9, max_num_batched_tokens=24) as llm:
        assert complete(llm, prompts, greedy(16)) == reference.greedy(prompts, 16)
        assert llm.scheduler.num_preemptions > 0


def soften_attention(tensors) -> None:
    """Bring the scores to about N(0, 1). In sharper attention bfloat16's rounding changes tokens, on a CPU too."""
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.sub_(1)
        elif name.endswith("q_proj.weight"):
            tensor.mul_(0.35)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 256])
@pytest.mark.parametrize(
    ("backend", "dtype", "most_regret"),
    [
        ("triton", "float32", 1e-3),
        ("triton", "bfloat16", REGRET["bfloat16"]),
        pytest.param("flash_attn", "float16", REGRET["float16"], marks=needs_flash_attn),
    ],
)
def test_a_gpus_tokens_are_nearly_the_references(backend, dtype, most_regret, head_dim, tmp_path):
    """With CUDA graphs, which read a plan for each window, and with mixed steps."""
    path = make_gemma3(tmp_path, sliding_window=100, head_dim=head_dim, query_pre_attn_scalar=head_dim)
    edit_tensors(path, soften_attention)
    reference = Reference(path)
    prompts = [random_prompt(length, seed=length) for length in (1, 99, 100, 101, 300, 700)]
    for options in ({"mixed_step_rows": 0}, {"mixed_step_rows": 128, "max_num_batched_tokens": 400}):
        with gpu_llm(path, attention_backend=backend, dtype=dtype, **options) as llm:
            for _ in range(2):  # and from the cache
                outputs = complete(llm, prompts, greedy(12))
                for prompt, tokens in zip(prompts, outputs, strict=True):
                    assert reference.regret(prompt, tokens) < most_regret


# What the names begin with in the text model, and in the larger one as transformers 4 and 5 write it.
OLD_NAMES = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}
NEW_NAMES = {"model.": "model.language_model."}


@pytest.mark.parametrize("names", [OLD_NAMES, NEW_NAMES], ids=["transformers 4", "transformers 5"])
def test_the_text_part_of_a_model_with_a_vision_tower(base, tmp_path, names):
    """As the larger checkpoints are: its names and its configuration are part of others'."""
    path, reference = base
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(tmp_path)

    def nest(tensors):
        for name in list(tensors):
            beginning = next((beginning for beginning in names if name.startswith(beginning)), "")
            tensors[names.get(beginning, "") + name.removeprefix(beginning)] = tensors.pop(name)
        outer = "model." if names is NEW_NAMES else ""
        tensors[f"{outer}vision_tower.vision_model.post_layernorm.bias"] = torch.zeros(8)
        tensors[f"{outer}multi_modal_projector.mm_soft_emb_norm.weight"] = torch.zeros(8)

    edit_tensors(tmp_path, nest)
    text = AutoConfig.from_pretrained(path).to_dict()
    (tmp_path / "config.json").unlink()
    vision = {"model_type": "siglip_vision_model", "hidden_size": 8}
    larger = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    edit_json(tmp_path / "config.json", **larger, eos_token_id=[1, 106], text_config=text, vision_config=vision)
    prompts = reference.draw_prompts((1, 40), 8)
    with make_llm(tmp_path) as llm:
        assert llm.config.eos == (1, 106)
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)
    edit_tensors(tmp_path, lambda tensors: tensors.pop(f"{names['model.']}norm.weight"))
    with pytest.raises(ValueError, match=r"lacks 'model\.norm\.weight'"):
        make_llm(tmp_path)


def spec_of(**changes):
    """The specification of a configuration with two layers, as transformers 4.51 has it."""
    fields = {
        "hidden_size": 3072,
        "num_hidden_layers": 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "sliding_window": 512,
        "sliding_window_pattern": 2,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "model_type": "gemma3_text",
    }
    return Gemma3ForCausalLM.checked_spec(SimpleNamespace(**fields | changes))


def test_either_transformers_spelling_means_the_same():
    old = spec_of()
    fields = {"sliding_window": 512, "query_pre_attn_scalar": 256, "hidden_size": 3072, "num_hidden_layers": 2}
    ropes = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    kinds = ["sliding_attention", "full_attention"]
    current = {"rope_parameters": ropes, "layer_types": kinds, "rope_local_base_freq": None}
    assert spec_of(**fields | current) == old
    assert old.windows == (512, None)
    assert [rope.base for rope in old.ropes] == [1e4, 1e6]
    assert [rope.factor for rope in old.ropes] == [1.0, 8.0]
    # transformers 4 adds its default to a configuration in the spelling of 5.
    ropes["sliding_attention"] = {"rope_type": "default", "rope_theta": 70.0}
    assert spec_of(**fields | current | {"rope_local_base_freq": 1e4}).ropes[0].base == 70.0


def test_a_config_of_the_hub_is_that_of_transformers_5(base, tmp_path):
    """The published files have the old spelling, and say which layers are global by a number."""
    path, reference = base
    model = AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(tmp_path)
    old = {"rope_theta": 700.0, "rope_local_base_freq": 30.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    removed = {"rope_parameters": None, "layer_types": None}
    edit_json(tmp_path / "config.json", **old, **removed, sliding_window_pattern=6)
    prompts = reference.draw_prompts((40,), 8)
    with make_llm(tmp_path) as llm:
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


def test_the_scale_of_embeddings_is_rounded_as_in_training():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert spec_of().embedding_scale == 55.5
    finally:
        torch.set_default_dtype(before)
    assert spec_of().embedding_scale == pytest.approx(3072**0.5)


@pytest.mark.parametrize(
    "change",
    [
        {"final_logit_softcapping": 30.0},
        {"attn_logit_softcapping": 50.0},
        {"use_bidirectional_attention": True},
        {"hidden_activation": "gelu"},
        {"use_sliding_window": False},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_not_implemented_is_refused_by_its_name(change):
    (name,) = change
    with pytest.raises(ValueError, match=name):
        spec_of(**change)
