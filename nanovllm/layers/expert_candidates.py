"""The candidates of `matmul` for a layer's experts."""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.layers.activation import Gated, SiluAndMul
from nanovllm.layers.expert_products import ExpertsProblem, compute_experts
from nanovllm.layers.fp8_products import quantize_input
from nanovllm.layers.matmul import Candidate
from nanovllm.layers.quantization import Fp8Weight, Quantized, values_and_scale

if HAS_TRITON:
    from nanovllm.kernels import experts_gemv
    from nanovllm.kernels.experts import MAX_EXPERTS, add_pairs, route, sort_by_expert
    from nanovllm.kernels.experts_gemv import ExpertsGemvConfig
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


class Fp8ExpertTiles(Candidate):
    """The same with inputs that are quantised first, which tensor cores multiply by weights in fp8 twice as fast."""

    name = "fp8-expert-tiles"

    def supports(self, problem: ExpertsProblem) -> bool:
        weight = problem.weight
        return isinstance(weight, Fp8Weight) and use_kernels(weight) and len(weight) <= MAX_EXPERTS

    def launch(self, problem: ExpertsProblem, constants: tuple) -> Tensor:
        """constants: two `TileConfig`s, for gate_up and down."""
        return compute_experts(problem, constants)


class GroupedMm(Candidate):
    """torch's grouped products: bfloat16 on Hopper, since torch 2.10."""

    name = "grouped-mm"

    def supports(self, problem: ExpertsProblem) -> bool:
        is_bfloat16 = problem.weight.dtype == torch.bfloat16
        return hasattr(F, "grouped_mm") and is_bfloat16 and _suits_torch(problem, unit=8)

    def launch(self, problem: ExpertsProblem, constants: tuple = ()) -> Tensor:
        pairs, ends, weights = _sorted_pairs(problem)
        tokens, weight, down = pairs // problem.top_k, problem.weight, problem.down
        hidden = F.grouped_mm(problem.input[tokens], weight.transpose(1, 2), offs=ends)
        y = F.grouped_mm(_silu_and_mul(hidden), down.transpose(1, 2), offs=ends)
        return _add_sorted(y, pairs, weights, problem)


class ScaledGroupedMm(Candidate):
    """torch's grouped products of fp8, with scales of channels: on Hopper."""

    name = "scaled-grouped-mm"

    def supports(self, problem: ExpertsProblem) -> bool:
        weight = problem.weight
        is_right = isinstance(weight, Fp8Weight) and not weight.format.is_blocked
        is_right = is_right and weight.input_dtype == torch.bfloat16
        return hasattr(torch, "_scaled_grouped_mm") and is_right and _suits_torch(problem, unit=16)

    def launch(self, problem: ExpertsProblem, constants: tuple = ()) -> Tensor:
        pairs, ends, weights = _sorted_pairs(problem)
        tokens, weight, down = pairs // problem.top_k, problem.weight, problem.down
        values, scale = quantize_input(problem.x, weight.format)
        hidden = _scaled_product(Quantized(values[tokens], scale[tokens]), weight, ends)
        y = _scaled_product(quantize_input(Gated(hidden), down.format), down, ends)
        return _add_sorted(y, pairs, weights, problem)


def _suits_torch(problem: ExpertsProblem, unit: int) -> bool:
    """Whether torch's grouped products, which need sizes that are multiples of a unit, can be launched now. They can't
    while kernels only compile: then nothing sorts the pairs, and torch would index by anything."""
    weight = problem.weight
    return (
        use_kernels(weight)
        and not is_compiling_ahead()
        and len(weight) <= MAX_EXPERTS
        and not any(size % unit for size in (*weight.shape[1:], problem.down.shape[2]))
        and _is_hopper(weight.device)
    )


def _sorted_pairs(problem: ExpertsProblem) -> tuple[Tensor, Tensor, Tensor]:
    """int64 pairs in the order of their experts, int32 `[num_experts]` where each expert's end, and the router's
    weights."""
    experts, weights = route(problem.logits, problem.top_k, problem.normalize, problem.context_lens)
    order, starts = sort_by_expert(experts, len(problem.weight))
    return order.long(), starts[1:], weights


def _scaled_product(x: Quantized, weight: Fp8Weight, ends: Tensor) -> Tensor:
    options = {"offs": ends, "out_dtype": weight.input_dtype, "use_fast_accum": True}
    scales = x.scale.flatten(), weight.scale.flatten(1)
    return torch._scaled_grouped_mm(x.values, weight.values.transpose(1, 2), *scales, **options)


def _add_sorted(y: Tensor, pairs: Tensor, weights: Tensor, problem: ExpertsProblem) -> Tensor:
    y *= weights.flatten()[pairs, None].to(y.dtype)
    y = torch.empty_like(y).index_copy_(0, pairs, y).view(*weights.shape, -1)
    return add_pairs(y, problem.out, problem.add, problem.context_lens)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9


def expert_candidates(device: torch.device) -> list[Candidate]:
    if not HAS_TRITON or device.type != "cuda":
        return []
    return [ExpertsGemv(), ExpertTiles(), Fp8ExpertTiles(), GroupedMm(), ScaledGroupedMm()]
