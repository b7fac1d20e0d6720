"""Qwen3 (arXiv:2505.09388), dense."""

from nanovllm.models.decoder import DecoderForCausalLM, DecoderSpec


class Qwen3ForCausalLM(DecoderForCausalLM):
    """RMSNorm on each head of q and k; `attention_bias` adds biases to q, k, v and o."""

    @staticmethod
    def spec(config) -> DecoderSpec:
        bias = bool(getattr(config, "attention_bias", False))
        return DecoderSpec(qkv_bias=bias, o_bias=bias, qk_norm=True)
