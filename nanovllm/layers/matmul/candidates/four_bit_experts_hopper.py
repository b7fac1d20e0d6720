"""Our kernels for experts in MXFP4 on Hopper, whose warps load and multiply side by side."""

from collections.abc import Iterator

from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.experts import four_bit_experts_hopper as kernels
from nanovllm.kernels.experts.experts import MAX_EXPERTS, add_pairs, route, sort_by_expert
from nanovllm.kernels.experts.four_bit_experts_hopper import FourBitExpertsHopperConfig
from nanovllm.kernels.matmul.four_bit import UNIT
from nanovllm.kernels.matmul.four_bit_tiles import arrange_pairs
from nanovllm.layers.formats.format import Weight, value_of
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.expert_tiles import others
from nanovllm.layers.matmul.candidates.four_bit import four_bit
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.table import Key


class FourBitExpertsHopper(Candidate):
    """constants: two `FourBitExpertsHopperConfig`s, for gate_up and down."""

    name = "hopper-experts-4bit"
    operations = ("experts",)
    formats = (Mxfp4.name,)
    adds_more = True

    def supports(self, key: Key, weight: Weight) -> bool:
        # Half of N is the number of columns of `down`'s weight.
        is_right = self.is_for(key) and key.experts <= MAX_EXPERTS and key.N % (4 * UNIT) == 0
        is_there = is_right and use_kernels(weight.values)
        return is_there and kernels.can_multiply(four_bit(weight), weight.dtype)

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        configs = tuple(FourBitExpertsHopperConfig(*each).fitted(weight.device) for each in constants)
        return None if None in configs else configs

    def launch(self, problem: ExpertsProblem, constants: tuple) -> Tensor:
        _, x, logits, weight, down, top_k, normalize, out, add, lens, bias, down_bias, activation, *_ = problem
        gate_up_config, down_config = (FourBitExpertsHopperConfig(*each) for each in constants)
        experts, shares = route(logits, top_k, normalize, lens, problem.scales, problem.mine)
        order, starts = sort_by_expert(experts, len(weight))
        values = arrange_pairs(value_of(x), order, top_k)
        hidden = kernels.gate_up(values, starts, four_bit(weight), bias, gate_up_config, activation)
        y = kernels.down(hidden, order, starts, shares, four_bit(down), down_bias, down_config)
        return add_pairs(y, out, add, lens, **others(problem, experts))

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        """Tiles of at least as many tokens as an expert has on average, up to four times as many."""
        if not cls.is_for(key):
            return
        mean = num_tokens * top_k / key.experts
        for gate_up, down in _PAIRS:
            if min(mean, 64) <= gate_up.tokens <= max(32, 4 * mean):
                yield gate_up, down


_CONFIGS = tuple(
    FourBitExpertsHopperConfig(*each)
    for each in (
        (16, 16, 128, 10),
        (32, 16, 128, 8),
        (64, 16, 128, 6),
        (64, 32, 128, 6),
        (128, 64, 64, 5),
        (128, 64, 128, 4),
    )
)
# The activation takes registers, so a wide tile may have fewer rows in gate_up than in down.
_PAIRS = (*((each, each) for each in _CONFIGS), _CONFIGS[-2:])
