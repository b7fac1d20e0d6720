"""The candidates of `matmul` for a layer's experts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.activation import Gated, SiluAndMul
from nanovllm.layers.experts.expert_products import ExpertsProblem, compute_experts
from nanovllm.layers.formats.quantization import E4M3, Fp8Weight, Quantized, Weight, values_and_scale
from nanovllm.layers.matmul.fp8_products import quantize_input
from nanovllm.layers.matmul.matmul import Candidate
from nanovllm.layers.matmul.quack import Quack, Tile

if HAS_TRITON:
    from nanovllm.kernels.experts import experts_gemv
    from nanovllm.kernels.experts.experts import MAX_EXPERTS, TileConfig, add_pairs, route, sort_by_expert
    from nanovllm.kernels.experts.experts_gemv import ExpertsGemvConfig
    from nanovllm.kernels.launch import is_compiling_ahead

_silu_and_mul = SiluAndMul()


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
    """Our kernels for any number of tokens. Weights in fp8 become numbers of the inputs' dtype."""

    name = "expert-tiles"

    def supports(self, problem: ExpertsProblem) -> bool:
        return use_kernels(problem.weight) and len(problem.weight) <= MAX_EXPERTS

    def launch(self, problem: ExpertsProblem, constants: tuple) -> Tensor:
        """constants: two `TileConfig`s, for gate_up and down."""
        return compute_experts(problem, constants, rounds_inputs=False)

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        return _fitted(weight, constants, weight.input_dtype if isinstance(weight, Fp8Weight) else weight.dtype)


class Fp8ExpertTiles(Candidate):
    """The same with inputs that are quantised first, which tensor cores multiply by weights in fp8 twice as fast."""

    name = "fp8-expert-tiles"

    def supports(self, problem: ExpertsProblem) -> bool:
        weight = problem.weight
        return isinstance(weight, Fp8Weight) and use_kernels(weight) and len(weight) <= MAX_EXPERTS

    def launch(self, problem: ExpertsProblem, constants: tuple) -> Tensor:
        """constants: two `TileConfig`s, for gate_up and down."""
        return compute_experts(problem, constants)

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        return _fitted(weight, constants, E4M3)


class GroupedMm(Candidate):
    """torch's grouped products: bfloat16 on Hopper, since torch 2.10."""

    name = "grouped-mm"

    def supports(self, problem: ExpertsProblem) -> bool:
        is_bfloat16 = problem.weight.dtype == torch.bfloat16
        return hasattr(F, "grouped_mm") and is_bfloat16 and _suits_torch(problem, unit=8)

    def launch(self, problem: ExpertsProblem, constants: tuple = ()) -> Tensor:
        pairs = _SortedPairs(problem)
        hidden = F.grouped_mm(problem.input[pairs.tokens], problem.weight.mT, offs=pairs.starts[1:])
        return pairs.add(F.grouped_mm(_silu_and_mul(hidden), problem.down.mT, offs=pairs.starts[1:]))


class ScaledGroupedMm(Candidate):
    """torch's grouped products of fp8, with scales of channels: on Hopper."""

    name = "scaled-grouped-mm"

    def supports(self, problem: ExpertsProblem) -> bool:
        weight = problem.weight
        is_right = isinstance(weight, Fp8Weight) and not weight.format.is_blocked
        is_right = is_right and weight.input_dtype == torch.bfloat16
        return hasattr(torch, "_scaled_grouped_mm") and is_right and _suits_torch(problem, unit=16)

    def launch(self, problem: ExpertsProblem, constants: tuple = ()) -> Tensor:
        pairs, weight, down = _SortedPairs(problem), problem.weight, problem.down
        values, scale = quantize_input(problem.x, weight.format)
        hidden = _scaled_product(Quantized(values[pairs.tokens], scale[pairs.tokens]), weight, pairs.starts[1:])
        return pairs.add(_scaled_product(quantize_input(Gated(hidden), down.format), down, pairs.starts[1:]))


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


def _fitted(weight: Weight, constants: tuple, input_dtype: torch.dtype) -> tuple | None:
    """Two `TileConfig`s, each with the stages that fit the GPU; None if one fits with none. input_dtype: of the
    products' input as it is multiplied."""
    sizes = input_dtype.itemsize, values_and_scale(weight)[0].itemsize, weight.device
    configs = [TileConfig(*each).fitted(n, *sizes) for n, each in zip((2, 1), constants, strict=True)]
    return None if None in configs else tuple(configs)


def _suits_torch(problem: ExpertsProblem, unit: int) -> bool:
    """Whether torch's grouped products, which need sizes that are multiples of a unit, can be launched now. They can't
    while kernels only compile: then nothing sorts the pairs, and torch would index by anything."""
    weight = problem.weight
    return (
        use_kernels(weight)
        and not is_compiling_ahead()
        and len(weight) <= MAX_EXPERTS
        and not any(size % unit for size in (*weight.shape[1:], problem.down.shape[2]))
        and GpuFacts.of(weight.device).is_hopper
    )


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


def _scaled_product(x: Quantized, weight: Fp8Weight, ends: Tensor) -> Tensor:
    options = {"offs": ends, "out_dtype": weight.input_dtype, "use_fast_accum": True}
    scales = x.scale.flatten(), weight.scale.flatten(1)
    return torch._scaled_grouped_mm(x.values, weight.values.transpose(1, 2), *scales, **options)


def expert_candidates(device: torch.device, quack: Quack | None) -> list[Candidate]:
    """quack: None without quack-kernels."""
    if not HAS_TRITON or device.type != "cuda":
        return []
    ours = [ExpertsGemv(), ExpertTiles(), Fp8ExpertTiles(), GroupedMm(), ScaledGroupedMm()]
    return ours if quack is None else [*ours, QuackExperts(quack)]
