"""What a model's config.json says, in both of its styles, and a Config that needs no such file."""

from nanovllm.config import Config

# A model directory as current transformers writes it, and as transformers 4 did.
NEW_STYLE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5_000_000.0},
    "dtype": "bfloat16",
    "eos_token_id": 17,
}
OLD_STYLE = {
    **{name: value for name, value in NEW_STYLE.items() if name not in ("rope_parameters", "dtype")},
    "rope_theta": 5_000_000.0,
    "rope_scaling": None,
    "torch_dtype": "float16",
    "transformers_version": "4.51.0",
}


def dummy(**options) -> Config:
    return Config.create(**{"model": "Qwen3-0.6B", "load_format": "dummy"} | options)
