"""Our own kernels as candidates of `matmul`."""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.formats.quantization import Fp8Weight, Weight, values_and_scale
from nanovllm.layers.matmul.fp8_products import quantize_input
from nanovllm.layers.matmul.matmul import Candidate, Problem

if HAS_TRITON:
    from nanovllm.kernels.dependent_launch import has_pdl
    from nanovllm.kernels.matmul import gemv as gemv_kernels
    from nanovllm.kernels.matmul import linear_silu as fused_silu_kernel
    from nanovllm.kernels.matmul import split_k as split_k_kernels
    from nanovllm.kernels.matmul.gemv import GemvConfig
    from nanovllm.kernels.matmul.split_k import MAX_ROWS, SplitKConfig, make_arrivals


class Gemv(Candidate):
    """Our kernel for 1 to 4 tokens, which contains the norm."""

    name = "gemv"
    posts_sums = True

    def supports(self, problem: Problem) -> bool:
        if not use_kernels(problem.weight) or len(problem.x) > gemv_kernels.MAX_TOKENS:
            return False
        if problem.operation == "linear_add":
            return True
        # The reducer launches it for linear_sum (`posted_constants`).
        is_small = problem.has_norm and problem.weight.shape[1] <= gemv_kernels.MAX_NORM_SIZE
        return is_small and problem.out is None and problem.operation in ("linear", "linear_silu")

    def launch(self, problem: Problem, constants: tuple) -> Tensor:
        x, y, options = problem.x, _result(problem), _options(problem)
        if problem.operation == "linear_add":
            x = problem.input
        else:
            options |= {"norm_weight": x.weight, "eps": x.eps}
            x = x.residual
        weight, options["weight_scale"] = values_and_scale(problem.weight)
        gemv_kernels.gemv(x, weight, y, problem.bias, GemvConfig(*constants), **options)
        return y


class SplitK(Candidate):
    """Our kernel that splits K: for weights in fp8, or for up to 128 tokens and weights with few rows. It requests
    weights while the kernel before it still runs."""

    name = "split-k"

    def __init__(self, device: torch.device):
        # Shared by all launches of an engine, because each waits for the one before.
        self.arrivals = make_arrivals(device)

    def supports(self, problem: Problem) -> bool:
        weight = problem.weight
        if not use_kernels(weight) or weight.shape[1] % split_k_kernels.ALIGNMENT:
            return False
        if not (has_pdl(weight.device) and GpuFacts.of(weight.device).is_hopper):
            return False
        if isinstance(weight, Fp8Weight):
            return weight.input_dtype in split_k_kernels.DTYPES
        is_small = len(weight) <= MAX_ROWS and len(problem.x) <= split_k_kernels.MAX_TOKENS
        return is_small and weight.dtype in split_k_kernels.DTYPES

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        return SplitKConfig(*constants).fitted(values_and_scale(weight)[0].itemsize, weight.device)

    def launch(self, problem: Problem, constants: tuple) -> Tensor:
        weight, y, options = problem.weight, _result(problem), _options(problem)
        if isinstance(weight, Fp8Weight):
            x, options["x_scale"] = quantize_input(problem.x, weight.format)
        else:
            x = problem.input
        values, options["weight_scale"] = values_and_scale(weight)
        config = SplitKConfig(*constants)
        split_k_kernels.split_k(x, values, y, problem.bias, config, self.arrivals, **options)
        return y


class FusedSilu(Candidate):
    """Our kernel for the linear_silu of long prefills."""

    name = "fused-silu"

    def supports(self, problem: Problem) -> bool:
        return problem.operation == "linear_silu" and fused_silu_kernel.can_fuse(problem.weight)

    def launch(self, problem: Problem, constants: tuple) -> Tensor:
        return fused_silu_kernel.linear_silu(problem.input, problem.weight)


def _result(problem: Problem) -> Tensor:
    """Where its result goes."""
    if problem.out is not None:
        return problem.out
    columns = len(problem.weight) // (2 if problem.operation == "linear_silu" else 1)
    return problem.weight.new_empty(len(problem.x), columns)


def _options(problem: Problem) -> dict[str, Any]:
    """Of both decode kernels."""
    return {"silu": problem.operation == "linear_silu", "add": problem.operation == "linear_add", "pdl": True}


def our_candidates(device: torch.device) -> list[Candidate]:
    return [Gemv(), SplitK(device), FusedSilu()] if HAS_TRITON and device.type == "cuda" else []
