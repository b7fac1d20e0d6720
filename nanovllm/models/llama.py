"""Llama 2 and 3.x (arXiv:2307.09288, arXiv:2407.21783)."""

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import rope_of_layers
from nanovllm.models.spec import DecoderSpec


class LlamaForCausalLM(DecoderForCausalLM):
    """The plainest decoder; `attention_bias` adds biases to q, k, v and o."""

    switches = frozenset({"attention_bias"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        bias = bool(getattr(config, "attention_bias", False))
        return DecoderSpec(rope_of_layers(config), qkv_bias=bias, o_bias=bias)
