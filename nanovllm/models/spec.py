"""What differs between families of decoders."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from nanovllm.layers.linear_attention import DeltaNetShape
from nanovllm.layers.rope_parameters import RopeParameters


class LayerHeads(NamedTuple):
    """The heads of one layer's keys and values."""

    num_kv_heads: int  # on all ranks
    head_dim: int  # of the queries too
    keys_are_values: bool = False  # before their norms and RoPE: the checkpoint has no projection of values
    names: tuple[str, str] = "num_key_value_heads", "head_dim"  # of the two numbers in config.json, for messages


@dataclass(frozen=True)
class DecoderSpec:
    """What one family's configuration asks for; `DecoderForCausalLM` builds the model from it.

    Attributes:
        ropes: each layer's RoPE; None for a layer without one.
        windows: how many keys a token of each layer sees, its own included; None for all. Empty if no layer has one.
        heads: of each layer. Empty if all have the configuration's num_key_value_heads and head_dim.
        qkv_bias: whether the q, k and v projections have biases.
        o_bias: whether the output projection of attention has one.
        sinks: whether each head has a sink in the softmax's sum (`kernels.attention.paged_cache`).
        qk_norm: what is normalized before RoPE: each head of q and k, or all heads of q and all of k.
        value_norm: whether each head of v is normalized, without a weight.
        norms: where a layer has norms: before attention and the MLP, after them, or both.
        norm_offset: what the norms' weights in the checkpoint lack, those of linear attention excepted.
        query_gate: whether the q projection also gives a gate for each number of q. Attention's output is multiplied by
            its sigmoid.
        linear_layers: which layers have linear attention instead of attention. Empty if none has.
        linear_attention: the shape of those.
        activation: of the gate of the MLP.
        embedding_scale: what embeddings are multiplied by.
        attention_scale: what the products of q and k are multiplied by; None for head_dim ** -0.5.
        residual_scale: what the outputs of attention and of the MLP are multiplied by. Their last projections are
            multiplied by it while they are loaded, so it costs nothing. With norms "before" only, because a norm
            between would undo it.
        layer_scalars: whether each layer has a number that the residual stream behind it is multiplied by. With norms
            "both" only: the last one adds to the stream.
        logit_softcap: the bound c of logits, which become c * tanh(logits / c); None for none.
        logit_scale: what logits are multiplied by, and in their place the final norm's weight while it is loaded.
    """

    ropes: tuple[RopeParameters | None, ...]
    windows: tuple[int | None, ...] = ()
    heads: tuple[LayerHeads, ...] = ()
    qkv_bias: bool = False
    o_bias: bool = False
    sinks: bool = False
    qk_norm: Literal["head", "full"] | None = None
    value_norm: bool = False
    norms: Literal["before", "after", "both"] = "before"
    norm_offset: float = 0.0
    query_gate: bool = False
    linear_layers: tuple[bool, ...] = ()
    linear_attention: DeltaNetShape | None = None
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    residual_scale: float = 1.0
    layer_scalars: bool = False
    logit_softcap: float | None = None
    logit_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.residual_scale != 1 and self.norms != "before":
            raise ValueError(f"residual_scale={self.residual_scale}: needs norms='before'")
        if self.logit_scale != 1 and self.norm_offset:
            raise ValueError(f"logit_scale={self.logit_scale}: needs norm_offset=0")

        if self.layer_scalars and self.norms != "both":
            raise ValueError("layer_scalars: needs norms='both'")

    def is_linear(self, layer: int) -> bool:
        return bool(self.linear_layers) and self.linear_layers[layer]

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None
