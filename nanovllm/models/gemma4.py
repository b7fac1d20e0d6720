"""Gemma 4 (https://ai.google.dev/gemma/docs/core): the text model of the sizes without per-layer embeddings."""

from typing import ClassVar

from torch import nn

from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.rope_parameters import rope_parameters
from nanovllm.models.decoder import DecoderMLP
from nanovllm.models.gemma3 import Gemma3ForCausalLM, rounded_embedding_scale
from nanovllm.models.hf_config import local_layers, windows_of_layers
from nanovllm.models.mlp_with_experts import MLPWithExperts
from nanovllm.models.qwen3_moe import check_experts, count_experts
from nanovllm.models.spec import DecoderSpec, LayerHeads
from nanovllm.utils.checks import quoted, require


class Gemma4ForCausalLM(Gemma3ForCausalLM):
    """Most layers are local, as in Gemma 3. The others have wider heads, fewer of keys, and these may serve as values.
    Values are normalized, and a number of each layer multiplies the residual stream behind it. With `enable_moe_block`
    every layer has experts beside its MLP."""

    packed_modules_mapping = Gemma3ForCausalLM.packed_modules_mapping | {
        "mlp_norm": {"post_feedforward_layernorm_1": None},
        "experts_norm": {"pre_feedforward_layernorm_2": None},
        "experts_output_norm": {"post_feedforward_layernorm_2": None},
        "gate": {"router.proj": None},
        "router_norm": {"router": None},
    }
    # The checkpoint has experts, router and their norms beside the MLP.
    checkpoint_places: ClassVar = {".mlp.beside.": ".", ".mlp.mlp_norm.": ".mlp_norm.", ".mlp.experts_": ".experts_"}
    switches = frozenset({"attention_bias", "sliding_window", "attention_k_eq_v", "use_bidirectional_attention"})
    switches |= {"final_logit_softcapping", "enable_moe_block", "num_experts"}

    @staticmethod
    def spec(config) -> DecoderSpec:
        if config.hidden_activation != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_activation={quoted(config.hidden_activation)}: supported is gelu_pytorch_tanh")
        # "vision" changes nothing for texts.
        direction = config.use_bidirectional_attention
        require("use_bidirectional_attention", direction, direction in (None, "vision"), "null or 'vision'")
        if has_experts(config):
            check_experts(config, "top_k_experts")
        elif num_experts := count_experts(config):
            raise ValueError(f"num_experts={quoted(num_experts)}: needs enable_moe_block=true")
        is_local, bias = local_layers(config), bool(config.attention_bias)
        ropes = {local: rope_parameters(config, _kind(local)) for local in set(is_local)}
        heads = {True: LayerHeads(config.num_key_value_heads, config.head_dim)}
        sizes = config.num_global_key_value_heads, config.global_head_dim
        names = "num_global_key_value_heads", "global_head_dim"
        heads[False] = LayerHeads(*sizes, config.attention_k_eq_v, names)
        return DecoderSpec(
            tuple(ropes[local] for local in is_local),
            windows_of_layers(config),
            heads=tuple(heads[local] for local in is_local),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            value_norm=True,
            norms="both",
            activation="gelu_tanh",
            embedding_scale=rounded_embedding_scale(config),
            attention_scale=1.0,
            layer_scalars=True,
            logit_softcap=config.final_logit_softcapping,
        )

    @staticmethod
    def mlp(config, spec: DecoderSpec, layer: int, tp: TensorParallel, matmul: Matmul) -> nn.Module:
        return (MLPWithExperts if has_experts(config) else DecoderMLP)(config, spec, tp, matmul)


def has_experts(config) -> bool:
    """Whether layers have experts beside their MLP. The unified sizes lack the key, and have none."""
    return bool(getattr(config, "enable_moe_block", False))


def _kind(is_local: bool) -> str:
    return "sliding_attention" if is_local else "full_attention"


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """The text part of a checkpoint that has a vision tower too."""


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """The 12B model, whose text model is no other."""


class Gemma4UnifiedForConditionalGeneration(Gemma4ForCausalLM):
    """The text part of a checkpoint that reads images and sound without towers."""
