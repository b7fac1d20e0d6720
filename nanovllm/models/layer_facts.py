"""What start-up and the tuner ask about a decoder: its kinds of layers, their matrix products and their sizes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from nanovllm.layers.experts.experts import MixtureOfExperts
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.linear_attention import GatedDeltaNet
from nanovllm.layers.matmul.problem import AnyProblem, ExpertsProblem, Problem
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.mlp_with_experts import MLPWithExperts
from nanovllm.models.plain import PlainQwen3

Make = Callable[[int], AnyProblem]  # a product of a layer in the context's phase, for a number of tokens


def layer_products(layer: Any) -> list[Make]:
    """A DecoderLayer's matrix products on new tensors with arbitrary content.

    First those that every layer has: the input projection of attention or linear attention, and the output projection;
    gate and up, or the router; down, or the experts. Then further input projections of linear attention; router and
    experts beside an MLP; gate and up, and down, of a shared expert."""
    mixer, mlp, products = layer.mixer, layer.mlp, _main_products(layer)
    if isinstance(mixer, GatedDeltaNet):
        products += [_linear("linear", each, layer.input_layernorm) for each in mixer.input_projections()[1:]]
    if isinstance(mlp, MLPWithExperts):
        mixture = mlp.beside
        products += [_linear("linear", mixture.gate, mixture.router_norm), _experts(mixture, False, mlp.experts_norm)]
    if isinstance(mlp, MixtureOfExperts) and mlp.shared_expert is not None:
        norm, shared = layer.post_attention_layernorm, mlp.shared_expert
        products += [_linear("linear_silu", shared.gate_up_proj, norm), _linear("linear_add", shared.down_proj)]
    return products


def _main_products(layer: Any) -> list[Make]:
    mixer, o, mlp, mlp_norm = layer.mixer, layer.output_proj, layer.mlp, layer.post_attention_layernorm
    projection = mixer.input_projections()[0] if isinstance(mixer, GatedDeltaNet) else mixer.qkv_proj
    # Of o_proj and down_proj, which add to the residual stream unless a norm is in between.
    operation = "linear"
    if layer.attention_output_norm is None:
        operation = "linear_add" if o.tp.size == 1 else "linear_sum"
    products = [_linear("linear", projection, layer.input_layernorm), _linear(operation, o)]
    if isinstance(mlp, MixtureOfExperts):
        return [*products, _linear("linear", mlp.gate, mlp_norm), _experts(mlp, operation == "linear_add", mlp_norm)]
    gate_up = _linear("linear_silu" if mlp.gelu is None else "linear", mlp.gate_up_proj, mlp_norm)
    return [*products, gate_up, _linear(operation, mlp.down_proj)]


def _linear(operation: str, layer: LinearBase, norm: RMSNorm | None = None) -> Make:
    """norm: of its input."""

    def make(num_tokens: int) -> Problem:
        product = layer.products[operation]
        key, weight = product.row[0], product.weight
        x = weight.new_empty(num_tokens, key.K)
        out = weight.new_empty(num_tokens, key.N) if operation in ("linear_add", "linear_sum") else None
        return Problem(key, Normed(x, norm) if norm else x, weight, product.bias, out)

    return make


def _experts(mlp: MixtureOfExperts, add: bool, norm: RMSNorm | None) -> Make:
    """Every token gets its experts."""

    def make(num_tokens: int) -> ExpertsProblem:
        product = mlp.products["experts"]
        key, weight = product.row[0], product.weight
        x = weight.new_empty(num_tokens, key.K)
        lens = None
        if key.phase == "decode":
            lens = torch.ones(num_tokens, dtype=torch.int32, device=x.device)
        logits = x.new_empty(num_tokens, len(mlp.gate.weight))[:, : key.experts]
        tensors = Normed(x, norm) if norm else x, logits, weight
        down, out = mlp.experts.down_proj.matrix, torch.empty_like(x)
        return ExpertsProblem(key, *tensors, down, mlp.top_k, mlp.normalize, out, add, lens, **mlp.extras)

    return make


def gate_up_weight(model: DecoderForCausalLM) -> Weight:
    """A layer's gate and up projection, of all experts if it has some. The table's number of rows of mixed steps
    belongs to its shape."""
    mlp: Any = model.model.layers[0].mlp
    return (mlp.experts if isinstance(mlp, MixtureOfExperts) else mlp).gate_up_proj.matrix


def num_layer_params(model: DecoderForCausalLM) -> int:
    """Parameters of one layer on this rank, of experts only those that a token uses."""
    layer: Any = model.model.layers[-1]
    num_params = sum(map(_num_params, layer.parameters()))
    mixture = layer.mlp.beside if isinstance(layer.mlp, MLPWithExperts) else layer.mlp
    if isinstance(mixture, MixtureOfExperts):
        for weight in mixture.experts.parameters():
            num_params -= _num_params(weight) // len(weight) * (len(weight) - mixture.top_k)
    return num_params


def _num_params(parameter: Any) -> int:
    format = getattr(parameter, "format", None)
    if getattr(parameter, "is_scale", False):
        return 0
    return parameter.numel() if format is None else format.shape_of(parameter).numel()


def attention_layers(model: DecoderForCausalLM) -> list[int]:
    """The indices of the layers that have keys and values."""
    layers: Any = model.model.layers
    return [i for i, layer in enumerate(layers) if layer.self_attn is not None]


def one_of_each_kind(layers: Any) -> list[int]:
    """The index of the first layer of each kind. Layers of one kind launch the same kernels."""
    kinds = [(*_kind_of_mixer(layer.mixer), type(layer.mlp)) for layer in layers]
    return [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]


def _kind_of_mixer(mixer: Any) -> tuple:
    if isinstance(mixer, GatedDeltaNet):
        return (GatedDeltaNet,)
    return mixer.rotary_emb is None, mixer.attn.window, mixer.head_dim, mixer.num_kv_heads


@contextmanager
def few_layers(model: DecoderForCausalLM | PlainQwen3) -> Iterator[None]:
    """A block in which the model has its first layer, its last one, and one of each other kind: they launch every
    kernel that any layer does. A plain model keeps all of them."""
    layers: Any = model.model.layers
    if isinstance(model, PlainQwen3):
        yield
        return
    indices = {*one_of_each_kind(layers), len(layers) - 1}
    model.model.layers = nn.ModuleList(layers[i] for i in sorted(indices))
    try:
        yield
    finally:
        model.model.layers = layers
