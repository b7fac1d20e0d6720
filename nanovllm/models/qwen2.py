"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115)."""

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import rope_of_layers, windows_of_layers
from nanovllm.models.spec import DecoderSpec


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Biases on q, k and v only; no norm on their heads."""

    switches = frozenset({"sliding_window", "use_sliding_window", "max_window_layers"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        return DecoderSpec(rope_of_layers(config), windows_of_layers(config), qkv_bias=True)
