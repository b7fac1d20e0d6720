"""Olmo 3 (arXiv:2512.13961)."""

from nanovllm.layers.rope_parameters import RopeParameters, rope_parameters, rope_settings
from nanovllm.models.hf_config import local_layers, windows_of_layers
from nanovllm.models.olmo2 import Olmo2ForCausalLM
from nanovllm.models.spec import DecoderSpec


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """OLMo 2 whose layers have a sliding window, except every fourth. Only those are extended by YaRN."""

    switches = Olmo2ForCausalLM.switches | {"sliding_window"}

    @staticmethod
    def spec(config) -> DecoderSpec:
        bias, global_rope = bool(config.attention_bias), rope_parameters(config, "full_attention")
        if "sliding_attention" in rope_settings(config):
            local_rope = rope_parameters(config, "sliding_attention")
        else:  # in the spelling of transformers 4
            local_rope = RopeParameters(global_rope.base)
        ropes = tuple(local_rope if is_local else global_rope for is_local in local_layers(config))
        windows = windows_of_layers(config)
        return DecoderSpec(ropes, windows, qkv_bias=bias, o_bias=bias, qk_norm="full", norms="after")
