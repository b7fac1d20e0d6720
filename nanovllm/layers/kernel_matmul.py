"""Our own kernels as candidates of `matmul`."""

from functools import cache

import torch
from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.layers.matmul import Candidate, Problem

if HAS_TRITON:
    from nanovllm.kernels import gemv as gemv_kernels
    from nanovllm.kernels import linear_silu as fused_silu_kernel
    from nanovllm.kernels import split_k as split_k_kernels
    from nanovllm.kernels.dependent_launch import has_pdl
    from nanovllm.kernels.gemv import GemvConfig
    from nanovllm.kernels.split_k import MAX_ROWS, SplitKConfig, make_arrivals


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
        operation, x, weight, bias, out = problem
        config = GemvConfig(*constants)
        if operation == "linear_add":
            return gemv_kernels.linear_add(problem.input, weight, out, bias, config, pdl=True)
        norm = x.residual, x.weight, x.eps
        if operation == "linear_silu":
            return gemv_kernels.norm_linear_silu(*norm, weight, config, pdl=True)
        return gemv_kernels.norm_linear(*norm, weight, bias, config, pdl=True)


class SplitK(Candidate):
    """Our kernel for up to 128 tokens and weights with few rows, which splits K. It loads weights while the kernel
    before it still runs."""

    name = "split-k"

    def __init__(self, device: torch.device):
        # Shared by all launches of an engine, because each waits for the one before.
        self.arrivals = make_arrivals(device)

    def supports(self, problem: Problem) -> bool:
        weight = problem.weight
        return (
            use_kernels(weight)
            and weight.dtype in split_k_kernels.DTYPES
            and weight.shape[1] % split_k_kernels.ALIGNMENT == 0
            and len(weight) <= MAX_ROWS
            and len(problem.x) <= split_k_kernels.MAX_TOKENS
            and _is_hopper(weight.device)
        )

    def launch(self, problem: Problem, constants: tuple) -> Tensor:
        x, weight, bias, out = problem.input, problem.weight, problem.bias, problem.out
        options = {"config": SplitKConfig(*constants), "arrivals": self.arrivals, "pdl": True}
        if problem.operation == "linear_silu":
            return split_k_kernels.linear_silu(x, weight, **options)
        if problem.operation == "linear_add":
            return split_k_kernels.linear_add(x, weight, out, bias, **options)
        return split_k_kernels.linear(x, weight, bias, out, **options)


class FusedSilu(Candidate):
    """Our kernel for the linear_silu of long prefills."""

    name = "fused-silu"

    def supports(self, problem: Problem) -> bool:
        return problem.operation == "linear_silu" and fused_silu_kernel.can_fuse(problem.weight)

    def launch(self, problem: Problem, constants: tuple) -> Tensor:
        return fused_silu_kernel.linear_silu(problem.input, problem.weight)


@cache
def _is_hopper(device: torch.device) -> bool:
    return has_pdl(device) and torch.cuda.get_device_capability(device)[0] == 9


def our_candidates(device: torch.device) -> list[Candidate]:
    return [Gemv(), SplitK(device), FusedSilu()] if HAS_TRITON and device.type == "cuda" else []
