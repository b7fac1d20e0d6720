"""Gemma 3 (arXiv:2503.19786): the text model."""

from typing import ClassVar

import torch

from nanovllm.layers.rope_parameters import RopeParameters, rope_parameters, rope_settings
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import local_layers, windows_of_layers
from nanovllm.models.spec import DecoderSpec
from nanovllm.utils.checks import quoted


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Norms before and after attention and the MLP, their weights stored less 1. Most layers are local: they have a
    window, and a RoPE of their own."""

    packed_modules_mapping = DecoderForCausalLM.packed_modules_mapping | {
        "attention_output_norm": {"post_attention_layernorm": None},
        "post_attention_layernorm": {"pre_feedforward_layernorm": None},
        "mlp_output_norm": {"post_feedforward_layernorm": None},
    }
    # As transformers 5 and as 4 write the text part of a checkpoint with a vision tower.
    checkpoint_prefixes: ClassVar = {"model.language_model.": "model.", "language_model.": ""}
    switches = frozenset({"attention_bias", "sliding_window", "sliding_window_pattern", "query_pre_attn_scalar"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        if config.hidden_activation != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_activation={quoted(config.hidden_activation)}: supported is gelu_pytorch_tanh")
        bias = bool(config.attention_bias)
        global_rope = rope_parameters(config, "full_attention")
        if "sliding_attention" in rope_settings(config):
            local_rope = rope_parameters(config, "sliding_attention")
        else:  # in the spelling of transformers 4
            local_rope = RopeParameters(config.rope_local_base_freq)
        return DecoderSpec(
            tuple(local_rope if is_local else global_rope for is_local in local_layers(config)),
            windows_of_layers(config),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            norms="both",
            norm_offset=1.0,
            activation="gelu_tanh",
            embedding_scale=rounded_embedding_scale(config),
            attention_scale=config.query_pre_attn_scalar**-0.5,
        )


def rounded_embedding_scale(config) -> float:
    """Rounded to the model's dtype, as it was in training."""
    return torch.tensor(config.hidden_size**0.5, dtype=torch.get_default_dtype(), device="cpu").item()


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """The text part of a checkpoint that has a vision tower too."""
