"""EXAONE 4 (arXiv:2507.11407)."""

from nanovllm.layers.rope_parameters import rope_parameters
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import windows_of_layers
from nanovllm.models.spec import DecoderSpec


class Exaone4ForCausalLM(DecoderForCausalLM):
    """Norms after attention and the MLP, and of each head of q and k. In a model with windows the layers without one
    have no RoPE (NoPE, arXiv:2501.18795)."""

    packed_modules_mapping = DecoderForCausalLM.packed_modules_mapping | {
        "attention_output_norm": {"post_attention_layernorm": None},
        "mlp_output_norm": {"post_feedforward_layernorm": None},
    }
    switches = frozenset({"sliding_window", "sliding_window_pattern"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        rope, windows = rope_parameters(config), windows_of_layers(config)
        is_hybrid = config.sliding_window is not None
        ropes = tuple(None if is_hybrid and window is None else rope for window in windows)
        return DecoderSpec(ropes, windows, qk_norm="head", norms="after")
