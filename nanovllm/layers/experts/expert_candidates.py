"""The candidates of `matmul` for a layer's experts."""

import torch
from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.layers.experts.expert_products import ExpertsProblem, compute_experts
from nanovllm.layers.formats.quantization import Weight, values_and_scale
from nanovllm.layers.matmul.matmul import Candidate
from nanovllm.layers.matmul.quack import Quack, Tile

if HAS_TRITON:
    from nanovllm.kernels.experts import experts_gemv
    from nanovllm.kernels.experts.experts import MAX_EXPERTS, TileConfig, add_pairs, route, sort_by_expert
    from nanovllm.kernels.experts.experts_gemv import ExpertsGemvConfig


class ExpertsGemv(Candidate):
    """Our kernels for a few tokens, which contain the norm and the routing."""

    name = "experts-gemv"

    def supports(self, problem: ExpertsProblem) -> bool:
        is_few = len(problem.x) <= experts_gemv.MAX_TOKENS
        return use_kernels(problem.weight) and is_few and problem.weight.shape[2] <= experts_gemv.MAX_NORM_SIZE

    def launch(self, problem: ExpertsProblem, constants: tuple) -> Tensor:
        """constants: two `ExpertsGemvConfig`s, for gate_up and down."""
        x, logits, _, _, top_k, normalize, out, add, context_lens = problem
        gate_up_config, down_config = (ExpertsGemvConfig(*each) for each in constants)
        norm = (x.residual, x.weight, x.eps) if problem.has_norm else (problem.input, None, 0.0)
        weight, scale = values_and_scale(problem.weight)
        hidden = experts_gemv.gate_up(*norm, logits, weight, top_k, context_lens, gate_up_config, scale)
        weight, scale = values_and_scale(problem.down)
        sizes = top_k, normalize, out, add, context_lens
        return experts_gemv.down(hidden, logits, weight, *sizes, down_config, scale)


class ExpertTiles(Candidate):
    """Our kernels for any number of tokens. With weights in fp8 the inputs of both products are quantized first,
    because tensor cores multiply such numbers twice as fast."""

    name = "expert-tiles"

    def supports(self, problem: ExpertsProblem) -> bool:
        return use_kernels(problem.weight) and len(problem.weight) <= MAX_EXPERTS

    def launch(self, problem: ExpertsProblem, constants: tuple) -> Tensor:
        """constants: two `TileConfig`s, for gate_up and down."""
        return compute_experts(problem, constants)

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        """Two `TileConfig`s, each with the stages that fit the GPU; None if one fits with none."""
        itemsize = values_and_scale(weight)[0].itemsize  # of the inputs too, as they are multiplied
        configs = [
            TileConfig(*each).fitted(n, itemsize, weight.device) for n, each in zip((2, 1), constants, strict=True)
        ]
        return None if None in configs else tuple(configs)


class QuackExperts(Candidate):
    """quack-kernels' grouped products, with the precision and for the shapes that `Quack` says."""

    name = "quack-experts"

    def __init__(self, quack: Quack):
        self._quack = quack

    def supports(self, problem: ExpertsProblem) -> bool:
        weight, down = problem.weight, problem.down
        return len(weight) <= MAX_EXPERTS and all(self._quack.can_multiply(problem.x, each) for each in (weight, down))

    def launch(self, problem: ExpertsProblem, constants: tuple) -> Tensor | None:
        """constants: two `Tile`s, for gate_up and down."""
        gate_up_tile, down_tile = (Tile(*each) for each in constants)
        pairs, multiply = _SortedPairs(problem), self._quack.multiply
        options = {"starts": pairs.starts, "rows": pairs.tokens}
        hidden = multiply("linear_silu", problem.x, problem.weight, gate_up_tile, **options)
        y = None if hidden is None else multiply("linear", hidden, problem.down, down_tile, starts=pairs.starts)
        return None if y is None else pairs.add(y)


class _SortedPairs:
    """Tokens with their experts, in the order of the experts, for grouped products.

    Attributes:
        tokens: int32 `[num_tokens * top_k]`.
        starts: int32 `[num_experts + 1]`, where each expert's begin, and where the last ones end.
    """

    def __init__(self, problem: ExpertsProblem):
        self._problem = problem
        experts, self._weights = route(problem.logits, problem.top_k, problem.normalize, problem.context_lens)
        self._positions = torch.empty(experts.numel(), dtype=torch.int32, device=experts.device)
        order, self.starts = sort_by_expert(experts, len(problem.weight), self._positions)
        self.tokens = order // problem.top_k

    def add(self, y: Tensor) -> Tensor:
        """problem.out, with the weighted sums of the experts' results y, `[num_tokens * top_k, hidden_size]`."""
        out, add, context_lens = self._problem.out, self._problem.add, self._problem.context_lens
        y = y.view(*self._weights.shape, -1)
        return add_pairs(y, out, add, context_lens, self._positions, self._weights)


def expert_candidates(device: torch.device, quack: Quack | None) -> list[Candidate]:
    """quack: None without quack-kernels."""
    if not HAS_TRITON or device.type != "cuda":
        return []
    ours = [ExpertsGemv(), ExpertTiles()]
    return ours if quack is None else [*ours, QuackExperts(quack)]
