"""Qwen3 (arXiv:2505.09388), dense, as the fast decoder computes it. (`qwen3.py` is the plain one.)"""

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import rope_of_layers, windows_of_layers
from nanovllm.models.spec import DecoderSpec


class Qwen3ForCausalLM(DecoderForCausalLM):
    """RMSNorm on each head of q and k; `attention_bias` adds biases to q, k, v and o."""

    switches = frozenset({"attention_bias", "sliding_window", "use_sliding_window", "max_window_layers"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        bias = bool(getattr(config, "attention_bias", False))
        ropes, windows = rope_of_layers(config), windows_of_layers(config)
        return DecoderSpec(ropes, windows, qkv_bias=bias, o_bias=bias, qk_norm="head")
