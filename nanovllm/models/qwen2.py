"""Qwen2 and Qwen2.5 (arXiv:2407.10671)."""

from nanovllm.models.decoder import DecoderForCausalLM, DecoderSpec


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Biases on q, k and v only; no norm on their heads."""

    @staticmethod
    def spec(config) -> DecoderSpec:
        return DecoderSpec(qkv_bias=True)
