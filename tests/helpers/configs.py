"""What a model's config.json says, in both of its styles, and a Config that needs no such file."""

from nanovllm.config import Config

# The published shapes that the tables of measured choices have.
TUNED = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B")

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
    return Config(**{"model": "Qwen3-0.6B", "load_format": "dummy"} | options)


# Engine options at the smallest and the largest value that Config accepts, or that a machine has the memory for, and
# together with others that they depend on.
OPTION_LIMITS = [
    {"max_num_seqs": 1},
    {"max_num_seqs": 32768},
    {"max_num_batched_tokens": 1},
    {"max_num_batched_tokens": 2**20},
    {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    {"max_model_len": 2},
    {"max_model_len": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1},
    {"max_model_len": 2**24},
    {"max_model_len": None},
    {"kvcache_block_size": 16},
    {"kvcache_block_size": 65536, "num_kvcache_blocks": 1},
    {"num_kvcache_blocks": 1},
    {"num_kvcache_blocks": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1},
    {"num_kvcache_blocks": 2**16},
    {"num_kvcache_blocks": -1, "kvcache_gib": 1e-4},
    {"num_kvcache_blocks": -1, "kvcache_gib": 0.5},
    {"gpu_memory_utilization": 1e-9},
    {"gpu_memory_utilization": 1},
    {"mixed_step_rows": 0},
    {"mixed_step_rows": 1},
    {"mixed_step_rows": 1, "max_num_batched_tokens": 1},
    {"mixed_step_rows": 1, "max_num_seqs": 1},
    {"mixed_step_rows": 8, "max_num_batched_tokens": 8},
    {"mixed_step_rows": 1024},
    {"mixed_step_rows": 1024, "max_num_seqs": 1},
    {"mixed_step_rows": 1024, "num_kvcache_blocks": 1},
    {"mixed_step_rows": 1024, "max_model_len": 2},
    {"mixed_step_rows": 1024, "overlap_steps": False, "enforce_eager": True, "enable_prefix_caching": False},
    {"seed": 0},
    {"seed": 2**63 - 1},
    {"eos": 0},
    {"eos": 319},
]
