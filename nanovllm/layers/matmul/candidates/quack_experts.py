"""Experts by quack-kernels' grouped products."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from nanovllm.kernels.experts.experts import MAX_EXPERTS, add_pairs, route, sort_by_expert
from nanovllm.kernels.silu_and_mul import SWIGLU
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.expert_tiles import others
from nanovllm.layers.matmul.candidates.quack import Quack, Tile
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.table import Key


class QuackExperts(Candidate):
    """It has the precision and the shapes of `Quack`, no biases, and no activation but SwiGLU. constants: two `Tile`s,
    for gate_up and down."""

    name = "quack-experts"
    operations = ("experts",)
    formats = Quack.formats
    adds_more = True

    def __init__(self, quack: Quack):
        self._quack = quack

    def supports(self, key: Key, weight: Weight) -> bool:
        return self.is_for(key) and key.experts <= MAX_EXPERTS and self._quack.can_multiply(key, weight)

    def launch(self, problem: ExpertsProblem, constants: tuple) -> Tensor | None:
        if not self._quack.works or problem.bias is not None or problem.activation != SWIGLU:
            return None
        gate_up_tile, down_tile = (Tile(*each) for each in constants)
        pairs, multiply = _SortedPairs(problem), self._quack.multiply
        options = {"starts": pairs.starts, "rows": pairs.tokens}
        hidden = multiply("linear_silu", problem.x, problem.weight, gate_up_tile, **options)
        y = None if hidden is None else multiply("linear", hidden, problem.down, down_tile, starts=pairs.starts)
        return None if y is None else pairs.add(y)

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        if cls.is_for(key) and key.phase == "prefill":
            tiles = Tile(128, 256), Tile(128, 256, (2, 1)), Tile(128, 192, (2, 1), True)
            yield from product(tiles, repeat=2)


class _SortedPairs:
    """Tokens with their experts, in the order of the experts, for grouped products.

    Attributes:
        tokens: int32 `[num_tokens * top_k]`.
        starts: int32 `[num_experts + 1]`, where each expert's begin, and where the last ones end.
    """

    def __init__(self, problem: ExpertsProblem):
        self._problem = problem
        routing = problem.top_k, problem.normalize, problem.context_lens, problem.scales, problem.mine
        experts, self._weights = route(problem.logits, *routing)
        self._others = others(problem, experts)
        self._positions = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
        order, self.starts = sort_by_expert(experts, len(problem.weight), self._positions)
        self.tokens = order // problem.top_k

    def add(self, y: Tensor) -> Tensor:
        """problem.out, with the weighted sums of the experts' results y, `[num_tokens * top_k, hidden_size]`."""
        out, add, context_lens = self._problem.out, self._problem.add, self._problem.context_lens
        y = y.view(*self._weights.shape, -1)
        return add_pairs(y, out, add, context_lens, self._positions, self._weights, **self._others)
