"""Published shapes of Qwen3's dense models, for `load_format="dummy"`, which reads no file.

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

PRESET_NAMES = tuple(_SHAPES)


def preset_config(name: str) -> Any:
    """The published transformers configuration of one of PRESET_NAMES. Raises KeyError for another name."""
    with without_generated_docstrings():
        from transformers import Qwen3Config
    hidden_size, intermediate_size, num_layers, num_heads, tied = _SHAPES[name]
    options: dict[str, Any] = {"rope_theta": 1_000_000.0}
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        tie_word_embeddings=tied,
        eos_token_id=151645,
        architectures=["Qwen3ForCausalLM"],
        **options,
    )
    rope: Any = getattr(config, "rope_parameters", None)
    if rope:  # transformers 5
        rope.update(options)
    return config
