"""What start-up and the tuner ask about a decoder: its kinds of layers, their matrix products and their sizes."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.layers.experts.experts import MixtureOfExperts
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.parameters import stored
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.linear import LinearBase
from nanovllm.layers.linear_attention import GatedDeltaNet
from nanovllm.layers.matmul.problem import AnyProblem, ExpertsProblem, Problem
from nanovllm.models.decoder import DecoderForCausalLM, DecoderLayer
from nanovllm.models.mlp_with_experts import MLPWithExperts
from nanovllm.models.plain import PlainQwen3


class LayerProduct(NamedTuple):
    """A matrix product of a layer.

    Attributes:
        make: it in the context's phase, for a number of tokens.
        reads_stream: whether it reads the residual stream, perhaps normalized; otherwise the result of the one before.
        has_attention: whether attention lies between its result and the next product.
    """

    make: Callable[[int], AnyProblem]
    reads_stream: bool
    has_attention: bool = False

    def __call__(self, num_tokens: int) -> AnyProblem:
        return self.make(num_tokens)


def layer_products(layer: DecoderLayer) -> list[LayerProduct]:
    """A DecoderLayer's matrix products on new tensors with arbitrary content.

    First those that every layer has: the input projection of attention or linear attention, and the output projection;
    gate and up, or the router; down, or the experts. Then further input projections of linear attention; router and
    experts beside an MLP; gate and up, and down, of a shared expert."""
    mixer, mlp, products = layer.mixer, layer.mlp, _main_products(layer)
    if isinstance(mixer, GatedDeltaNet):
        products += [_from_stream("linear", each, layer.input_layernorm) for each in mixer.input_projections()[1:]]
    if isinstance(mlp, MLPWithExperts):
        mixture = mlp.beside
        products += [_from_stream("linear", mixture.gate, mixture.router_norm)]
        products += [_experts(mixture, False, mlp.experts_norm)]
    if isinstance(mlp, MixtureOfExperts) and mlp.shared_expert is not None:
        norm, shared = layer.post_attention_layernorm, mlp.shared_expert
        products += [_from_stream("linear_silu", shared.gate_up_proj, norm), _linear("linear_add", shared.down_proj)]
    return products


def _main_products(layer: DecoderLayer) -> list[LayerProduct]:
    mixer, o, mlp, mlp_norm = layer.mixer, layer.output_proj, layer.mlp, layer.post_attention_layernorm
    projection = mixer.input_projections()[0] if isinstance(mixer, GatedDeltaNet) else mixer.qkv_proj
    # Of o_proj and down_proj, which add to the residual stream unless a norm is in between.
    operation = "linear"
    if layer.attention_output_norm is None:
        operation = "linear_add" if o.tp.size == 1 else "linear_sum"
    has_attention = not isinstance(mixer, GatedDeltaNet)
    first = _from_stream("linear", projection, layer.input_layernorm)._replace(has_attention=has_attention)
    products = [first, _linear(operation, o)]
    if isinstance(mlp, MixtureOfExperts):
        experts = _experts(mlp, operation == "linear_add", mlp_norm)
        return [*products, _from_stream("linear", mlp.gate, mlp_norm), experts]
    gate_up = _from_stream("linear_silu" if mlp.gelu is None else "linear", mlp.gate_up_proj, mlp_norm)
    return [*products, gate_up, _linear(operation, mlp.down_proj)]


def _from_stream(operation: str, layer: LinearBase, norm: RMSNorm | None) -> LayerProduct:
    return _linear(operation, layer, norm)._replace(reads_stream=True)


def _linear(operation: str, layer: LinearBase, norm: RMSNorm | None = None) -> LayerProduct:
    """norm: of its input."""

    def make(num_tokens: int) -> Problem:
        product = layer.products[operation]
        key, weight = product.row[0], product.weight
        x = weight.new_empty(num_tokens, key.K)
        out = weight.new_empty(num_tokens, key.N) if operation in ("linear_add", "linear_sum") else None
        return Problem(key, Normed(x, norm) if norm else x, weight, product.bias, out)

    return LayerProduct(make, False)


def _experts(mlp: MixtureOfExperts, add: bool, norm: RMSNorm | None) -> LayerProduct:
    """Every token gets its experts. They read the stream, and the router's result before them."""

    def make(num_tokens: int) -> ExpertsProblem:
        product = mlp.products["experts"]
        key, weight = product.row[0], product.weight
        x = weight.new_empty(num_tokens, key.K)
        lens = None
        if key.phase == "decode":
            lens = torch.ones(num_tokens, dtype=torch.int32, device=x.device)
        logits = x.new_empty(num_tokens, len(mlp.gate.weight))[:, : mlp.gate.num_experts]
        tensors = Normed(x, norm) if norm else x, logits, weight
        down, out = mlp.experts.down_proj.matrix, torch.empty_like(x)
        return ExpertsProblem(key, *tensors, down, mlp.top_k, mlp.normalize, out, add, lens, **mlp.extras)

    return LayerProduct(make, True)


def gate_up_weight(model: DecoderForCausalLM) -> Weight:
    """A layer's gate and up projection, of all experts if it has some. The table's number of rows of mixed steps
    belongs to its shape."""
    mlp: Any = model.model.layers[0].mlp
    return (mlp.experts if isinstance(mlp, MixtureOfExperts) else mlp).gate_up_proj.matrix


def num_layer_params(model: DecoderForCausalLM) -> int:
    """Parameters of one layer on this rank, of experts only those that a token uses on average."""
    layer: Any = model.model.layers[-1]
    num_params = sum(map(_num_params, layer.parameters()))
    mixture = layer.mlp.beside if isinstance(layer.mlp, MLPWithExperts) else layer.mlp
    if isinstance(mixture, MixtureOfExperts):
        num_experts = mixture.experts.shards.num_experts
        for weight in mixture.experts.parameters():
            num_params -= _num_params(weight) * (num_experts - mixture.top_k) // num_experts
    return num_params


def _num_params(parameter: nn.Parameter) -> int:
    format = stored(parameter).format
    if stored(parameter).is_scale:
        return 0
    return parameter.numel() if format is None else format.shape_of(parameter).numel()


def attention_layers(model: DecoderForCausalLM) -> list[int]:
    """The indices of the layers that have keys and values."""
    layers: Any = model.model.layers
    return [i for i, layer in enumerate(layers) if layer.self_attn is not None]


def one_of_each_kind(layers: Iterable[DecoderLayer]) -> list[int]:
    """The index of the first layer of each kind. Layers of one kind launch the same kernels."""
    kinds = [_kind_of(layer) for layer in layers]
    return [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]


def _kind_of(layer: DecoderLayer) -> tuple:
    """What chooses a layer's kernels: which parts it has, of which shapes, and what no parameter shows."""
    attention, top_ks = layer.self_attn, [each.top_k for each in layer.modules() if isinstance(each, MixtureOfExperts)]
    window = () if attention is None else (attention.rotary_emb is None, attention.attn.window, attention.head_dim)
    return *window, *top_ks, *((name, weight.shape) for name, weight in layer.named_parameters())


@contextmanager
def few_layers(model: DecoderForCausalLM | PlainQwen3) -> Iterator[None]:
    """A block in which the model has its first layer, its last one, one of each other kind, and one of the first one's
    kind behind another layer: they launch every kernel that any layer does. In fp8 a layer may leave its result to be
    added by the next one, which is another kernel; and the last layer computes fewer rows. A plain model keeps all of
    them."""
    layers: Any = model.model.layers
    if isinstance(model, PlainQwen3):
        yield
        return
    indices = {*one_of_each_kind(layers), len(layers) - 1}
    first, *others = (_kind_of(layer) for layer in layers)
    if first in others and first != others[-1]:
        indices.add(1 + others.index(first))
    model.model.layers = nn.ModuleList(layers[i] for i in sorted(indices))
    try:
        yield
    finally:
        model.model.layers = layers
