"""Our kernel for weights of 4 bits and up to 32 tokens, which contains the norm."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.matmul import four_bit_gemv as kernels
from nanovllm.kernels.matmul.four_bit import CHUNK, DTYPES
from nanovllm.kernels.matmul.four_bit_gemv import FourBitGemvConfig
from nanovllm.kernels.matmul.split_k import make_arrivals
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.four_bit import FORMATS, four_bit
from nanovllm.layers.matmul.problem import Problem, input_and_norm
from nanovllm.layers.matmul.table import Key

_MAX_CHALLENGING_TOKENS = 8  # With 16, tiles are twice as fast.


class FourBitGemv(Candidate):
    """constants: a `FourBitGemvConfig`'s."""

    name = "gemv-4bit"
    operations = ("linear", "linear_silu", "linear_add", "linear_sum")
    formats = FORMATS

    def __init__(self, device: torch.device):
        # Shared by all launches of an engine, because each waits for the one before.
        self._arrivals = make_arrivals(device)

    def supports(self, key: Key, weight: Weight) -> bool:
        return self.is_for(key) and use_kernels(weight.values) and weight.dtype in DTYPES

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        return FourBitGemvConfig(*constants).fitted(weight.device)

    def launch(self, problem: Problem, constants: tuple) -> Tensor | None:
        key, x, weight, bias, _ = problem
        config, values = FourBitGemvConfig(*constants), four_bit(weight)
        if len(x) > config.max_tokens(values):
            return None
        options: dict[str, Any] = {"silu": key.operation == "linear_silu", "add": key.operation == "linear_add"}
        # In float16 the norm's weight could overflow before the factor of the mean square.
        x, norm = input_and_norm(problem, computes_norm=weight.dtype == torch.bfloat16)
        y = problem.result()
        kernels.four_bit_gemv(x, values, y, bias, config, self._arrivals, pdl=True, **options, **norm)
        return y

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        """Programs for most multiprocessors, of fewer rows than 64 only where they would be too few, and two steps of
        each warp at least, unless K is short. With fewer stages a multiprocessor has room for more programs. After
        attention a program may have the time to ask for all of its weights."""
        if not cls.is_for(key) or key.phase != "decode" or num_tokens > _MAX_CHALLENGING_TOKENS:
            return
        for rows, num_warps, splits in product((16, 32, 64), (4, 8), (1, 2, 4)):
            programs, chunks = -(-key.N // rows) * splits, -(-key.K // CHUNK)
            if 2 * splits * num_warps > chunks and (splits > 1 or num_warps > 4):
                continue
            is_enough = programs >= 0.7 * num_multiprocessors and programs * num_warps >= 3 * num_multiprocessors
            if not is_enough or (splits > 1 and programs * num_warps > 20 * num_multiprocessors):
                continue
            if rows < 64 and programs >= 1.5 * num_multiprocessors:
                continue
            for num_stages, prefetch in ((4, 1024), (3, 1024), (2, 1024), (3, 16384)):
                config = FourBitGemvConfig(rows, splits, num_warps, num_stages, prefetch)
                if num_tokens <= config.columns:
                    yield config
