"""The experts of a mixture as one product of `matmul`: operation "experts"."""

from typing import Any, NamedTuple

from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.layers.experts.experts_torch import experts_torch, route_torch
from nanovllm.layers.formats.quantization import Weight
from nanovllm.layers.layernorm import Normed
from nanovllm.layers.matmul.fp8_products import quantize_input

if HAS_TRITON:
    from nanovllm.kernels.experts.experts import TileConfig, add_pairs, down, gate_up, route, sort_by_expert


class ExpertsProblem(NamedTuple):
    """The weighted sum of each token's experts, `down(silu(gate x) * up x)`, to compute."""

    x: Tensor | Normed  # [num_tokens, hidden_size]
    logits: Tensor  # [num_tokens, num_experts], of the router
    weight: Any  # a `Weight` [num_experts, 2 * intermediate, hidden_size]: of each expert gate, then up
    down: Any  # a `Weight` [num_experts, hidden_size, intermediate]
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
    """`problem.out`, by our kernels for any number of tokens, or by their twins. The inputs of products with weights in
    fp8 are quantized. constants: two `TileConfig`s, for gate_up and down; none for some that work."""
    x, logits, weight, down_weight, top_k, normalize, out, add, context_lens = problem
    if not use_kernels(logits):
        total = experts_torch(problem.input, *route_torch(logits, top_k, normalize, context_lens), weight, down_weight)
        return out.copy_(out.float() + total if add else total)
    gate_up_config, down_config = (TileConfig(*each) for each in constants) if constants else (None, None)
    experts, weights = route(logits, top_k, normalize, context_lens)
    order, starts = sort_by_expert(experts, len(weight))
    x, values, options = _operands(x, weight)
    hidden = gate_up(x, order, starts, values, gate_up_config, **options)
    hidden, values, options = _operands(hidden, down_weight)
    y = down(hidden, order, starts, weights, values, down_config, **options)
    return add_pairs(y, out, add, context_lens)


def _operands(x: Tensor | Normed, weight: Weight) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """A product's input, its weight and further arguments, as the kernels take them."""
    if isinstance(weight, Tensor):
        return x.value() if isinstance(x, Normed) else x, weight, {}
    values, scale = quantize_input(x, weight.format)
    return values, weight.values, {"x_scale": scale, "weight_scale": weight.scale, "dtype": weight.input_dtype}
