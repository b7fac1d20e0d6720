"""Qwen3.5 and 3.6, dense, and how they see images."""

from typing import ClassVar

from nanovllm.layers.linear_attention import DeltaNetShape
from nanovllm.layers.rope_parameters import rope_parameters
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.qwen3_vl import QwenVision
from nanovllm.models.seeing_decoder import SeeingDecoder
from nanovllm.models.spec import DecoderSpec
from nanovllm.utils.checks import is_int, require

_LINEAR, _FULL = "linear_attention", "full_attention"


class Qwen3_5ForCausalLM(DecoderForCausalLM):
    """Most layers have linear attention, Gated DeltaNet. In the others a gate multiplies attention's output, and RoPE
    turns a part of each head. All norms but those of linear attention are stored less 1."""

    packed_modules_mapping = DecoderForCausalLM.packed_modules_mapping | {
        "in_proj": {"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"},
        "in_proj_qkvz": {"in_proj_qkv": "qkv", "in_proj_z": "z"},
        "in_proj_ba": {"in_proj_b": "b", "in_proj_a": "a"},
    }
    checkpoint_prefixes: ClassVar = {"model.language_model.": "model."}
    switches = frozenset({"attention_bias", "layer_types", "partial_rotary_factor"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        is_linear = linear_layers(config)
        rope, bias = rope_parameters(config), bool(config.attention_bias)
        return DecoderSpec(
            tuple(None if linear else rope for linear in is_linear),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            norm_offset=1.0,
            query_gate=True,
            linear_layers=is_linear,
            linear_attention=delta_net_shape(config),
        )


class Qwen3_5Vision(QwenVision):
    """Qwen3-VL's, without the deep stack. RoPE turns fewer pairs."""

    sections = (11, 11, 10)


class Qwen3_5ForConditionalGeneration(SeeingDecoder, Qwen3_5ForCausalLM):
    """The same with a vision tower."""

    vision_type = Qwen3_5Vision


def has_linear_attention(config) -> bool:
    """Whether this is a configuration of a hybrid family."""
    return hasattr(config, "linear_num_value_heads")


def linear_layers(config) -> tuple[bool, ...]:
    """Which layers have linear attention. Raises ValueError unless each has that or full attention, and one has the
    latter."""
    num_layers, kinds = config.num_hidden_layers, config.layer_types
    is_list = isinstance(kinds, list) and len(kinds) >= num_layers and set(kinds) <= {_LINEAR, _FULL}
    allowed = f"a list of {num_layers} kinds, {_LINEAR} or {_FULL}, one for each of num_hidden_layers"
    require("layer_types", kinds, is_list, allowed)
    require("layer_types", kinds, _FULL in kinds[:num_layers], f"a list with {_FULL} among its first {num_layers}")
    return tuple(kind == _LINEAR for kind in kinds[:num_layers])


def delta_net_shape(config) -> DeltaNetShape:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    sizes = {name: getattr(config, f"linear_{name}") for name in names} | {"taps": config.linear_conv_kernel_dim}
    for name, size in sizes.items():
        field = "linear_conv_kernel_dim" if name == "taps" else f"linear_{name}"
        require(field, size, is_int(size, 2 if name == "taps" else 1), "an integer > 0")
    num_key_heads, num_value_heads = sizes["num_key_heads"], sizes["num_value_heads"]
    allowed = f"a multiple of linear_num_key_heads ({num_key_heads})"
    require("linear_num_value_heads", num_value_heads, num_value_heads % num_key_heads == 0, allowed)
    return DeltaNetShape(*sizes.values())
