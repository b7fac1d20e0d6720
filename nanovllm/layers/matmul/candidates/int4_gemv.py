"""Our kernel on plain cores for weights in int4 and 1 to 4 tokens, which contains the norm."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.matmul import int4_gemv as kernels
from nanovllm.kernels.matmul.four_bit import DTYPES
from nanovllm.kernels.matmul.int4_gemv import Int4GemvConfig
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.four_bit import four_bit
from nanovllm.layers.matmul.problem import Problem, input_and_norm
from nanovllm.layers.matmul.table import Key


class Int4Gemv(Candidate):
    """constants: an `Int4GemvConfig`'s."""

    name = "gemv-int4"
    operations = ("linear", "linear_silu", "linear_add", "linear_sum")
    formats = (Int4.name,)

    def supports(self, key: Key, weight: Weight) -> bool:
        return self.is_for(key) and use_kernels(weight.values) and weight.dtype in DTYPES

    def launch(self, problem: Problem, constants: tuple) -> Tensor | None:
        key, x, weight, bias, _ = problem
        if len(x) > kernels.MAX_TOKENS:
            return None
        options: dict[str, Any] = {"silu": key.operation == "linear_silu", "add": key.operation == "linear_add"}
        x, norm = input_and_norm(problem)
        y = problem.result()
        kernels.int4_gemv(x, four_bit(weight), y, bias, Int4GemvConfig(*constants), pdl=True, **options, **norm)
        return y

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        """With a pair of words of each row for a thread, or two, or threads would share them."""
        if not cls.is_for(key) or key.phase != "decode" or num_tokens > kernels.MAX_TOKENS:
            return
        row = 1 << (key.K - 1).bit_length()
        for rows, num_warps, pairs in product((2, 4, 8, 16), (1, 2, 4, 8), (1, 2)):
            k_tile = 512 * num_warps * pairs
            if k_tile <= row and 64 <= rows * pairs * 16 <= 256:  # weights that a thread holds
                yield Int4GemvConfig(rows, k_tile, num_warps)
