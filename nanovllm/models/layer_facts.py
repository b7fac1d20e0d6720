"""What start-up and the tuner ask about a decoder: its kinds of layers, their matrix products and their sizes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from nanovllm.layers.experts.expert_products import ExpertsProblem
from nanovllm.layers.experts.experts import MixtureOfExperts
from nanovllm.layers.formats.quantization import Weight
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.matmul import Problem
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.utils.context import get_context


class LayerProduct(NamedTuple):
    """A product of a layer, for any number of tokens."""

    operation: str  # as in `matmul`
    weight: Weight
    bias: Tensor | None = None
    norm: RMSNorm | None = None  # of its input

    def problem(self, num_tokens: int) -> Problem:
        """On new tensors with arbitrary content."""
        N, K = self.weight.shape
        x = self.weight.new_empty(num_tokens, K)
        out = self.weight.new_empty(num_tokens, N) if self.operation in ("linear_add", "linear_sum") else None
        return Problem(self.operation, Normed(x, self.norm) if self.norm else x, self.weight, self.bias, out)


class ExpertsProduct(NamedTuple):
    """The experts of a layer, for any number of tokens."""

    weight: Weight
    down: Weight
    top_k: int
    normalize: bool
    add: bool
    norm: RMSNorm | None = None  # of its input

    @property
    def operation(self) -> str:
        return "experts"

    def problem(self, num_tokens: int) -> ExpertsProblem:
        """On new tensors with arbitrary content, for a step like the context's. Every token gets its experts."""
        x = self.weight.new_empty(num_tokens, self.weight.shape[2])
        logits = x.new_empty(num_tokens, len(self.weight))
        context_lens = None
        if not get_context().is_prefill:
            context_lens = torch.ones(num_tokens, dtype=torch.int32, device=x.device)
        normed = Normed(x, self.norm) if self.norm else x
        return ExpertsProblem(normed, logits, *self[:4], torch.empty_like(x), self.add, context_lens)


def layer_products(layer: Any) -> list[LayerProduct | ExpertsProduct]:
    """A DecoderLayer's matrix products, in order."""
    qkv, o, mlp, mlp_norm = layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp, layer.post_attention_layernorm
    # Of o_proj and down_proj, which add to the residual stream unless a norm is in between.
    operation = "linear"
    if layer.attention_output_norm is None:
        operation = "linear_add" if o.tp.size == 1 else "linear_sum"
    products: list[LayerProduct | ExpertsProduct] = [
        LayerProduct("linear", qkv.matrix, qkv.bias, layer.input_layernorm),
        LayerProduct(operation, o.matrix, o.bias),
    ]
    if isinstance(mlp, MixtureOfExperts):
        weights = mlp.experts.gate_up_proj.matrix, mlp.experts.down_proj.matrix
        return [
            *products,
            LayerProduct("linear", mlp.gate.weight, norm=mlp_norm),
            ExpertsProduct(*weights, mlp.top_k, mlp.normalize, operation == "linear_add", mlp_norm),
        ]
    down = mlp.down_proj
    return [
        *products,
        LayerProduct("linear_silu" if mlp.gelu is None else "linear", mlp.gate_up_proj.matrix, norm=mlp_norm),
        LayerProduct(operation, down.matrix, down.bias),
    ]


def gate_up_weight(model: DecoderForCausalLM) -> Weight:
    """A layer's gate and up projection, of all experts if it has some. The table's rows for whole steps belong to its
    shape."""
    mlp: Any = model.model.layers[0].mlp
    return (mlp.experts if isinstance(mlp, MixtureOfExperts) else mlp).gate_up_proj.matrix


def num_layer_params(model: DecoderForCausalLM) -> int:
    """Parameters of one layer on this rank, of experts only those that a token uses."""
    layer: Any = model.model.layers[-1]
    num_params = sum(parameter.numel() for parameter in layer.parameters())
    if isinstance(layer.mlp, MixtureOfExperts):
        for weight in layer.mlp.experts.parameters():
            num_params -= weight.numel() // len(weight) * (len(weight) - layer.mlp.top_k)
    return num_params


def one_of_each_kind(layers: Any) -> list[int]:
    """The index of the first layer of each kind. Layers of one kind launch the same kernels."""
    kinds = [(layer.self_attn.rotary_emb is None, layer.self_attn.attn.window, type(layer.mlp)) for layer in layers]
    return [i for i, kind in enumerate(kinds) if kind not in kinds[:i]]


@contextmanager
def few_layers(model: DecoderForCausalLM) -> Iterator[None]:
    """A block in which the model has its first layer, its last one, and one of each other kind: they launch every
    kernel that any layer does."""
    layers: Any = model.model.layers
    indices = {*one_of_each_kind(layers), len(layers) - 1}
    model.model.layers = nn.ModuleList(layers[i] for i in sorted(indices))
    try:
        yield
    finally:
        model.model.layers = layers
