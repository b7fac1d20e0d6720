"""The experts of a mixture as one product of `matmul`: operation "experts"."""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.layers.experts_torch import experts_torch, route_torch
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.utils.context import get_context

if HAS_TRITON:
    from nanovllm.kernels.experts import TileConfig, add_pairs, down, gate_up, route, sort_by_expert


class ExpertsProblem(NamedTuple):
    """The weighted sum of each token's experts, `down(silu(gate x) * up x)`, to compute."""

    x: Tensor | Normed  # [num_tokens, hidden_size]
    logits: Tensor  # [num_tokens, num_experts], of the router
    weight: Tensor  # [num_experts, 2 * intermediate, hidden_size]: of each expert gate, then up
    down: Tensor  # [num_experts, hidden_size, intermediate]
    top_k: int
    normalize: bool  # whether a token's weights are divided by their sum
    out: Tensor  # [num_tokens, hidden_size]
    add: bool  # whether the sum is added to `out`, or written to it
    context_lens: Tensor | None = None  # int32 [num_tokens]; 0 for padding, which gets no expert

    @property
    def operation(self) -> str:
        return "experts"

    @property
    def has_norm(self) -> bool:
        """Whether x is a norm that is not computed yet."""
        return isinstance(self.x, Normed) and not self.x.is_computed

    @property
    def input(self) -> Tensor:
        return self.x.value() if isinstance(self.x, Normed) else self.x


class ExpertsProduct(NamedTuple):
    """The experts of a layer, for any number of tokens: like `matmul.LayerProduct`."""

    weight: Tensor
    down: Tensor
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


def compute_experts(problem: ExpertsProblem, constants: tuple = ()) -> Tensor:
    """`problem.out`, by our kernels for any number of tokens, or by their twins. constants: two `TileConfig`s, for
    gate_up and down; none for some that work."""
    x, logits, weight, down_weight, top_k, normalize, out, add, context_lens = problem
    x = problem.input
    if not use_kernels(x):
        total = experts_torch(x, *route_torch(logits, top_k, normalize, context_lens), weight, down_weight)
        return out.copy_(out.float() + total if add else total)
    gate_up_config, down_config = (TileConfig(*each) for each in constants) if constants else (None, None)
    experts, weights = route(logits, top_k, normalize, context_lens, pdl=True)
    order, starts = sort_by_expert(experts, len(weight), pdl=True)
    hidden = gate_up(x, order, starts, weight, gate_up_config, pdl=True)
    y = down(hidden, order, starts, weights, down_weight, down_config, pdl=True)
    return add_pairs(y, out, add, context_lens, pdl=True)
