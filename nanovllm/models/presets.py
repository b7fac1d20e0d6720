"""Published shapes of Qwen3's models, for `load_format="dummy"`, which reads no file.

Source: the config.json files of the Qwen3 model cards (Qwen3 Technical Report, arXiv:2505.09388, table 1).
"""

from typing import Any

from nanovllm.utils.light_imports import without_generated_docstrings

# name: (hidden, intermediate, layers, query heads, tied head); 8 KV heads of 128, 151,936 tokens throughout.
_SHAPES = {
    "Qwen3-0.6B": (1024, 3072, 28, 16, True),
    "Qwen3-1.7B": (2048, 6144, 28, 16, True),
    "Qwen3-4B": (2560, 9728, 36, 32, True),
    "Qwen3-8B": (4096, 12288, 36, 32, False),
    "Qwen3-14B": (5120, 17408, 40, 40, False),
    "Qwen3-32B": (5120, 25600, 64, 64, False),
}

# name: (hidden, intermediate of an expert, layers, query heads); 128 experts, 8 of them for a token; 4 KV heads.
_SHAPES_WITH_EXPERTS = {
    "Qwen3-30B-A3B": (2048, 768, 48, 32),
}

PRESET_NAMES = (*_SHAPES, *_SHAPES_WITH_EXPERTS)


def preset_config(name: str) -> Any:
    """The published transformers configuration of one of PRESET_NAMES. Raises KeyError for another name."""
    with without_generated_docstrings():
        from transformers import Qwen3Config, Qwen3MoeConfig
    rope_options: dict[str, Any] = {"rope_theta": 1_000_000.0}
    options: dict[str, Any] = {
        "vocab_size": 151936,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "eos_token_id": 151645,
    }
    config_class: Any
    if name in _SHAPES:
        hidden_size, intermediate_size, num_layers, num_heads, tied = _SHAPES[name]
        config_class, num_kv_heads = Qwen3Config, 8
        options |= {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": tied}
    else:
        hidden_size, expert_size, num_layers, num_heads = _SHAPES_WITH_EXPERTS[name]
        config_class, num_kv_heads, intermediate_size = Qwen3MoeConfig, 4, 8 * expert_size
        options |= {"architectures": ["Qwen3MoeForCausalLM"], "tie_word_embeddings": False}
        options |= {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
        options |= {"moe_intermediate_size": expert_size}
    config = config_class(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        **options,
        **rope_options,
    )
    rope: Any = getattr(config, "rope_parameters", None)
    if rope:  # transformers 5
        rope.update(rope_options)
    return config
