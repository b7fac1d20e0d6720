"""Weights and problems of single products."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.experts.experts import experts_torch
from nanovllm.kernels.matmul.fp8 import dequantize_torch, quantize
from nanovllm.layers.formats.all_formats import format_of_table
from nanovllm.layers.formats.format import Input, Weight
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates import make_candidates
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.matmul.problem import ExpertsProblem, Problem
from nanovllm.layers.matmul.table import Key, Table
from nanovllm.utils.context import get_context

FP8 = {False: Fp8(), True: Fp8Blocks()}  # by whether in blocks


def plain(weight: Tensor) -> Weight:
    return Unquantized().quantize(weight, weight.dtype)


def problem(
    operation: str, x: Input, weight: Tensor | Weight, bias: Tensor | None = None, out: Tensor | None = None
) -> Problem:
    """Of a step like the context's."""
    weight = plain(weight) if isinstance(weight, Tensor) else weight
    return Problem(Key.of(operation, get_context().is_prefill, weight), x, weight, bias, out)


def run(matmul: Matmul, *args: Any, **options: Any) -> Any:
    """`problem`, computed."""
    return matmul.run(problem(*args, **options))


def default_result(asked: Any) -> Any:
    """Of a problem, without a table and other candidates."""
    return Matmul().run(asked)


def matmul_with(table: Table, candidates: Iterable[Candidate]) -> Matmul:
    """With these candidates beside the defaults; one of the same name replaces a default."""
    return Matmul(table, [*make_candidates(), *candidates])


def experts_sum(x: Tensor, routed: tuple[Tensor, Tensor], gate_up: Tensor | Weight, down: Tensor | Weight) -> Tensor:
    """The weighted sum of each token's experts, by the twin. routed: from `route_torch`."""
    first, second = (plain(each) if isinstance(each, Tensor) else each for each in (gate_up, down))

    def product(weight: Weight) -> Callable[[Tensor, int], Tensor]:
        return lambda rows, expert: weight.of_expert(expert).linear(rows)

    return experts_torch(x, *routed, len(first), product(first), product(second))


def dequantized(weight: Weight) -> Tensor:
    """Of a weight in fp8: float32."""
    return dequantize_torch(weight.values, weight.scale)


def quantized(x: Tensor, weight: Weight) -> tuple[Tensor, Tensor]:
    """A product's input as the twin quantizes it for a weight in fp8."""
    return quantize.twin(x, weight.format == FP8[True])


def experts_problem(num_experts: int, N: int, K: int, top_k: int, dtype: torch.dtype, format: str) -> ExpertsProblem:
    """Of one token, whose tensors mean nothing. N: rows of each expert's gate and up projection."""
    shapes = (N, K), (K, N // 2)
    weights = (torch.zeros(num_experts, *shape, dtype=dtype) for shape in shapes)
    gate_up, down = (format_of_table(format).quantize(weight, dtype) for weight in weights)
    x, logits = torch.empty(1, K, dtype=dtype), torch.empty(1, num_experts, dtype=dtype)
    key = Key.of("experts", get_context().is_prefill, gate_up)
    return ExpertsProblem(key, Normed(x, RMSNorm(K)), logits, gate_up, down, top_k, True, torch.empty_like(x), True)
