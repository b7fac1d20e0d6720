"""SmolLM3 (https://huggingface.co/blog/smollm3)."""

from nanovllm.layers.rope_parameters import rope_parameters
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import windows_of_layers
from nanovllm.models.spec import DecoderSpec


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """Llama's layers, of which every fourth has no RoPE (NoPE, arXiv:2501.18795)."""

    switches = frozenset({"attention_bias", "no_rope_layers", "sliding_window", "use_sliding_window"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        rope, bias = rope_parameters(config), bool(getattr(config, "attention_bias", False))
        # Despite its name, the list is true for the layers with RoPE.
        ropes = tuple(rope if has_rope else None for has_rope in config.no_rope_layers[: config.num_hidden_layers])
        return DecoderSpec(ropes, windows_of_layers(config), qkv_bias=bias, o_bias=bias)
