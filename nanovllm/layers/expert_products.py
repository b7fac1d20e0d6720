"""The experts of a mixture as one product of `matmul`: operation "experts"."""

from typing import NamedTuple

from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.layers.experts_torch import experts_torch, route_torch
from nanovllm.layers.layernorm import Normed

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
