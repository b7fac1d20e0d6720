"""Seed-OSS (https://github.com/ByteDance-Seed/seed-oss)."""

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import rope_of_layers
from nanovllm.models.spec import DecoderSpec


class SeedOssForCausalLM(DecoderForCausalLM):
    """Llama's layers, with a key of its own for the bias of attention's output projection."""

    switches = frozenset({"attention_bias", "attention_out_bias"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        return DecoderSpec(rope_of_layers(config), qkv_bias=config.attention_bias, o_bias=config.attention_out_bias)
