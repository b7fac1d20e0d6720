"""OLMo 2 (arXiv:2501.00656)."""

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import rope_of_layers
from nanovllm.models.spec import DecoderSpec


class Olmo2ForCausalLM(DecoderForCausalLM):
    """Norms after attention and the MLP, and one of all heads of q and of k."""

    packed_modules_mapping = DecoderForCausalLM.packed_modules_mapping | {
        "attention_output_norm": {"post_attention_layernorm": None},
        "mlp_output_norm": {"post_feedforward_layernorm": None},
    }
    switches = frozenset({"attention_bias"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        bias = bool(getattr(config, "attention_bias", False))
        return DecoderSpec(rope_of_layers(config), qkv_bias=bias, o_bias=bias, qk_norm="full", norms="after")
