"""Our kernel for 1 to 4 tokens, which contains the norm if there is one."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.matmul import gemv as kernels
from nanovllm.kernels.matmul.gemv import GemvConfig
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.problem import Problem, input_and_norm
from nanovllm.layers.matmul.table import Key


class Gemv(Candidate):
    """constants: a `GemvConfig`'s. A linear_sum it computes only as the reducer launches it
    (`rank_sums.posted_constants`)."""

    name = "gemv"
    operations = ("linear", "linear_silu", "linear_add", "linear_sum")
    formats = (Unquantized.name, Fp8.name, Fp8Blocks.name)
    posts_sums = True

    def supports(self, key: Key, weight: Weight) -> bool:
        return self.is_for(key) and use_kernels(weight.values)

    def launch(self, problem: Problem, constants: tuple) -> Tensor | None:
        key, x, weight, bias, _ = problem
        if len(x) > kernels.MAX_TOKENS or key.operation == "linear_sum":
            return None
        options: dict[str, Any] = {"silu": key.operation == "linear_silu", "add": key.operation == "linear_add"}
        x, norm = input_and_norm(problem)
        y, config = problem.result(), GemvConfig(*constants)
        kernels.gemv(x, weight.values, y, bias, config, weight_scale=weight.scale, pdl=True, **options, **norm)
        return y

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        if not cls.is_for(key) or key.phase != "decode" or num_tokens > kernels.MAX_TOKENS:
            return
        row = 1 << (key.K - 1).bit_length()
        for rows, k_tile, num_warps in product((2, 4, 8, 16), (512, 1024, 2048, 4096), (1, 2, 4, 8)):
            if k_tile <= row and 64 <= rows * k_tile // (32 * num_warps) <= 256:  # weights that a thread holds
                yield GemvConfig(rows, k_tile, num_warps)
