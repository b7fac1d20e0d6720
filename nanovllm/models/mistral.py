"""Mistral 7B and Nemo (arXiv:2310.06825)."""

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import rope_of_layers, windows_of_layers
from nanovllm.models.spec import DecoderSpec


class MistralForCausalLM(DecoderForCausalLM):
    """Llama's layers, in version 0.1 with a sliding window in all of them."""

    switches = frozenset({"sliding_window"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        return DecoderSpec(rope_of_layers(config), windows_of_layers(config))
