"""Our kernels for the experts of a few tokens and weights in MXFP4, on plain cores, which contain the norm."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.experts import mxfp4_experts_gemv as kernels
from nanovllm.kernels.experts.experts import route
from nanovllm.kernels.experts.four_bit_experts_gemv import MAX_TOKENS
from nanovllm.kernels.experts.mxfp4_experts_gemv import Mxfp4ExpertsConfig
from nanovllm.kernels.matmul.four_bit import DTYPES
from nanovllm.kernels.matmul.linear_checks import MAX_NORM_SIZE
from nanovllm.layers.formats.format import Weight, value_of
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.four_bit import four_bit
from nanovllm.layers.matmul.problem import ExpertsProblem, is_waiting_norm
from nanovllm.layers.matmul.table import Key

_MOST_TRIED = 8  # tokens: with more, tiles read the weights of an expert once for several


class Mxfp4ExpertsGemv(Candidate):
    """constants: two `Mxfp4ExpertsConfig`s, for gate_up and down."""

    name = "mxfp4-experts-gemv"
    operations = ("experts",)
    formats = (Mxfp4.name,)

    def supports(self, key: Key, weight: Weight) -> bool:
        return self.is_for(key) and use_kernels(weight.values) and weight.dtype in DTYPES

    def launch(self, problem: ExpertsProblem, constants: tuple) -> Tensor | None:
        _, x, logits, weight, down, top_k, normalize, out, add, lens, bias, down_bias, activation, *_ = problem
        if len(x) > MAX_TOKENS:
            return None
        gate_up_config, down_config = (Mxfp4ExpertsConfig(*each) for each in constants)
        norm_weight, eps = None, 0.0
        # As for the kernels on tensor cores, whose checks these share.
        if is_waiting_norm(x) and weight.dtype == torch.bfloat16 and len(x.weight) <= MAX_NORM_SIZE:
            values, norm_weight, eps = x.residual, x.weight, x.eps
        else:
            values = value_of(x)
        experts, shares = route(logits, top_k, normalize, lens, problem.scales, problem.mine)
        hidden = kernels.gate_up(values, norm_weight, eps, experts, four_bit(weight), bias, gate_up_config, activation)
        sums = out, add, down_config, problem.mine is not None
        return kernels.down(hidden, experts, shares, four_bit(down), down_bias, *sums)

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        if not cls.is_for(key) or num_tokens > _MOST_TRIED:
            return
        # A thread has sixteen columns of a tile, or x would have to change threads. In `down` a tile has as many
        # columns of each expert.
        gate_ups = ((8, 1024, 2), (4, 1024, 2), (4, 512, 1))
        downs = ((4, 512, 4), (8, 512, 4), (4, 256, 2))
        for gate_up, down in product(gate_ups, downs):
            yield Mxfp4ExpertsConfig(*gate_up), Mxfp4ExpertsConfig(*down)
