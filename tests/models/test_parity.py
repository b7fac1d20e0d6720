"""Output of each architecture against transformers: float32 on the CPU, token for token."""

import pytest
import torch
from checkpoints import (
    Reference,
    assert_idle,
    complete,
    edit_json,
    greedy,
    make_checkpoint,
    make_llm,
    random_prompt,
    record_logits,
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SCALED = {
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "yarn": {"rope_scaling": YARN, "max_position_embeddings": 128},
    "yarn-all-fields": {
        "rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.8},
        "rope_theta": 1e6,
        "max_position_embeddings": 128,
        "head_dim": 64,
    },
    "yarn-qwen2": {"family": "qwen2", "rope_scaling": YARN, "max_position_embeddings": 128},
}
CONFIGS = {
    "mha": {"num_key_value_heads": 4},
    "gqa2-tied": {"tie_word_embeddings": True, "head_dim": 64},
    "gqa4": {"num_attention_heads": 8},
    "mqa-128": {"num_key_value_heads": 1, "head_dim": 128, "rope_theta": 1e6},
    "head-dim-80": {"head_dim": 80, "num_attention_heads": 3, "num_key_value_heads": 1},
    "head-dim-96-tied": {"head_dim": 96, "tie_word_embeddings": True},
    "odd-sizes": {"vocab_size": 307, "hidden_size": 72, "intermediate_size": 109, "num_hidden_layers": 3},
    "bias": {"attention_bias": True, "rope_theta": 500.0},
    "bias-mqa-tied": {"attention_bias": True, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "one-layer-large-eps": {"num_hidden_layers": 1, "rms_norm_eps": 0.1},
    "qwen2": {"family": "qwen2", "hidden_size": 128},
    "qwen2-tied-mha": {"family": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 4, "rope_theta": 1e6},
    **SCALED,
}
ENGINES = {
    "roomy": {},
    "cramped": {"num_kvcache_blocks": 8, "max_num_batched_tokens": 20},
}


@pytest.fixture(scope="module", params=CONFIGS)
def configured(request, tmp_path_factory):
    """(checkpoint, its Reference) of each configuration."""
    path = make_checkpoint(tmp_path_factory.mktemp(request.param), **CONFIGS[request.param])
    return path, Reference(path)


@pytest.mark.parametrize("options", ENGINES.values(), ids=ENGINES)
def test_every_configuration(configured, options):
    path, reference = configured
    # Up to 106 positions: beyond the original length where RoPE is scaled.
    prompts = reference.draw_prompts((1, 17, 90, 16, 33), 16)
    with make_llm(path, **options) as llm:
        assert complete(llm, prompts, greedy(16)) == reference.greedy(prompts, 16)
        assert bool(options) == (llm.scheduler.num_preemptions > 0)
        assert_idle(llm)


@pytest.mark.parametrize("scaled", SCALED.values(), ids=SCALED)
def test_rope_scaling_makes_a_difference_to_these_checkpoints(tmp_path, scaled):
    # Holds the test above to its purpose: an engine that ignored the scaling would fail it.
    unscaled = {name: value for name, value in scaled.items() if name != "rope_scaling"}
    models = [Reference(make_checkpoint(tmp_path / str(i), **c)) for i, c in enumerate((scaled, unscaled))]
    prompt = random_prompt(90, seed=1)
    with_scaling, without = (model.logits(prompt, [0])[0] for model in models)
    assert (with_scaling - without).abs().max() > 0.1


@pytest.mark.parametrize("new_names", [True, False], ids=["transformers-5", "transformers-4"])
def test_rope_settings_under_the_names_of_either_transformers(tmp_path, new_names):
    path = make_checkpoint(tmp_path, rope_theta=300.0, rope_scaling=YARN, max_position_embeddings=128)
    reference = Reference(path)
    if not new_names:
        edit_json(path / "config.json", rope_parameters=None, rope_theta=300.0, rope_scaling=YARN)
    elif "rope_parameters" not in (path / "config.json").read_text():
        pytest.skip("this transformers reads the old names alone")
    prompts = reference.draw_prompts((100,), 8)
    with make_llm(path) as llm:
        assert complete(llm, prompts, greedy(8)) == reference.greedy(prompts, 8)


@pytest.mark.parametrize("config", [{}, {"rms_norm_eps": 0.5}, {"family": "qwen2"}], ids=["qwen3", "eps", "qwen2"])
def test_logits_are_those_of_transformers(tmp_path, config):
    path = make_checkpoint(tmp_path, **config)
    reference = Reference(path)
    prompts = [random_prompt(length, seed=length) for length in (1, 5, 40, 70)]
    rows = []
    with make_llm(path, max_num_batched_tokens=64) as llm:
        record_logits(llm, rows)
        for prompt in prompts:
            rows.clear()
            (tokens,) = complete(llm, [prompt], greedy(6))
            # The last six: the first chunk of the longest prompt has logits too, which mean nothing.
            assert (torch.cat(rows)[-6:] - reference.logits(prompt, tokens)).abs().max() < 1e-4
