"""Phi-3, Phi-4 and Phi-4-mini (arXiv:2404.14219, arXiv:2412.08905, arXiv:2503.01743)."""

from typing import ClassVar

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import rope_of_layers, windows_of_layers
from nanovllm.models.spec import DecoderSpec


class Phi3ForCausalLM(DecoderForCausalLM):
    """Llama's layers, with q, k and v in one tensor of the checkpoint, and gate and up in one."""

    packed_modules_mapping: ClassVar = {}  # The checkpoint's names are ours.
    switches = frozenset({"partial_rotary_factor", "sliding_window"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        return DecoderSpec(rope_of_layers(config), windows_of_layers(config))
