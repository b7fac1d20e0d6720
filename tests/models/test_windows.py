"""Sliding windows of families that have them as an option, against transformers; and which layers have one."""

from types import SimpleNamespace

import pytest
from checkpoints import Reference, complete, greedy, make_checkpoint, make_llm
from configs import needs_transformers_5

from nanovllm.models.hf_config import windows_of_layers

WINDOW = {"sliding_window": 13, "num_hidden_layers": 3}
FAMILIES = {
    "qwen2": WINDOW | {"use_sliding_window": True, "max_window_layers": 1},
    "qwen3": WINDOW | {"use_sliding_window": True, "max_window_layers": 2},
    "mistral": WINDOW,
    "phi3": WINDOW,
    "smollm3": WINDOW | {"use_sliding_window": True, "no_rope_layers": [1, 0, 1]},
}


# Without flash-attn, transformers 4.51 gives the window to all layers of a Qwen. SmolLM3 is in it from 4.53 on.
@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in ("mistral", "phi3") else needs_transformers_5) for f in FAMILIES]
)
def test_windows_of_every_family(family, tmp_path):
    path = make_checkpoint(tmp_path, family=family, **FAMILIES[family])
    reference = Reference(path)
    prompts = reference.draw_prompts((1, 13, 90, 30), 12)
    expected = reference.greedy(prompts, 12)
    with make_llm(path) as llm:
        assert 13 in [layer.window for layer in llm.model_runner.kv_store.layers]
        assert complete(llm, prompts, greedy(12)) == expected
    with make_llm(path, num_kvcache_blocks=8, max_num_batched_tokens=20, mixed_step_rows=8) as llm:
        assert complete(llm, prompts, greedy(12)) == expected
        assert llm.scheduler.num_preemptions > 0
    with make_llm(path, max_model_len=13) as llm:  # No sequence can be longer than the window.
        assert {layer.window for layer in llm.model_runner.kv_store.layers} == {None}


def test_layer_types_that_name_too_few_layers_are_refused():
    fields = {"num_hidden_layers": 3, "sliding_window": 8, "layer_types": ["full_attention"]}
    with pytest.raises(ValueError, match="layer_types"):
        windows_of_layers(SimpleNamespace(**fields))


def test_a_window_that_is_both_used_and_not_used_is_refused():
    kinds = {"num_hidden_layers": 1, "layer_types": ["sliding_attention"], "sliding_window": 8}
    assert windows_of_layers(SimpleNamespace(**kinds, use_sliding_window=True)) == (8,)
    with pytest.raises(ValueError, match="use_sliding_window=False: contradicts layer_types"):
        windows_of_layers(SimpleNamespace(**kinds, use_sliding_window=False))
