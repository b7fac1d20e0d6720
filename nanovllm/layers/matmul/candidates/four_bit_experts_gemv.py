"""Our kernels for the experts of a few tokens and weights of 4 bits, which contain the norm."""

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.experts import four_bit_experts_gemv
from nanovllm.kernels.experts.experts import route
from nanovllm.kernels.experts.four_bit_experts_gemv import MAX_TOKENS, FourBitExpertsConfig
from nanovllm.kernels.matmul.four_bit import DTYPES
from nanovllm.kernels.matmul.linear_checks import MAX_NORM_SIZE
from nanovllm.layers.formats.format import Weight, value_of
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.four_bit import FORMATS, four_bit
from nanovllm.layers.matmul.problem import ExpertsProblem, is_waiting_norm
from nanovllm.layers.matmul.table import Key


class FourBitExpertsGemv(Candidate):
    """constants: two `FourBitExpertsConfig`s, for gate_up and down."""

    name = "experts-gemv-4bit"
    operations = ("experts",)
    formats: ClassVar[tuple[str, ...]] = FORMATS
    kernels: ClassVar[Any] = four_bit_experts_gemv  # the module with `gate_up` and `down`
    config: ClassVar[Any] = FourBitExpertsConfig

    def supports(self, key: Key, weight: Weight) -> bool:
        return self.is_for(key) and use_kernels(weight.values) and weight.dtype in DTYPES

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        configs = tuple(self.config(*each).fitted(weight.device) for each in constants)
        return None if None in configs else configs

    def launch(self, problem: ExpertsProblem, constants: tuple) -> Tensor | None:
        _, x, logits, weight, down, top_k, normalize, out, add, lens, bias, down_bias, activation, *_ = problem
        if len(x) > MAX_TOKENS:
            return None
        gate_up_config, down_config = (self.config(*each) for each in constants)
        norm_weight, eps = None, 0.0
        # In float16 the norm's weight could overflow before the factor of the mean square.
        if is_waiting_norm(x) and weight.dtype == torch.bfloat16 and len(x.weight) <= MAX_NORM_SIZE:
            values, norm_weight, eps = x.residual, x.weight, x.eps
        else:
            values = value_of(x)
        experts, shares = route(logits, top_k, normalize, lens, problem.scales, problem.mine)
        of_experts = experts, four_bit(weight), bias, gate_up_config
        hidden = self.kernels.gate_up(values, norm_weight, eps, *of_experts, activation)
        sums = out, add, down_config, problem.mine is not None
        return self.kernels.down(hidden, experts, shares, four_bit(down), down_bias, *sums)

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        if not cls.is_for(key) or num_tokens > MAX_TOKENS:
            return
        # With fewer stages a multiprocessor has room for more programs.
        for gate_up in ((32, 4, 4), (32, 4, 3), (64, 4, 4), (64, 4, 3)):
            for down in ((16, 4, 4), (16, 8, 4), (16, 16, 2), (32, 8, 3)):
                yield FourBitExpertsConfig(*gate_up), FourBitExpertsConfig(*down)
