"""Our kernels for experts of weights in 4 bits and any number of tokens."""

from collections.abc import Iterator
from itertools import product

from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.experts import four_bit_experts as kernels
from nanovllm.kernels.experts.experts import MAX_EXPERTS, add_pairs, route, sort_by_expert
from nanovllm.kernels.experts.four_bit_experts import FourBitExpertTiles
from nanovllm.kernels.matmul.four_bit import DTYPES, UNIT
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.expert_tiles import others
from nanovllm.layers.matmul.candidates.four_bit import FORMATS, arranged, four_bit
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.table import Key


class FourBitExperts(Candidate):
    """constants: two `FourBitExpertTiles`, for gate_up and down; none for some that work."""

    name = "expert-tiles-4bit"
    operations = ("experts",)
    formats = FORMATS
    adds_more = True

    def supports(self, key: Key, weight: Weight) -> bool:
        is_there = use_kernels(weight.values) and weight.dtype in DTYPES
        return self.is_for(key) and is_there and key.experts <= MAX_EXPERTS and key.N % (2 * UNIT) == 0

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        pairs = zip((2, 1), constants, strict=True) if constants else ()
        configs = tuple(FourBitExpertTiles(*each).fitted(n, weight.device) for n, each in pairs)
        return None if None in configs else configs

    def launch(self, problem: ExpertsProblem, constants: tuple = ()) -> Tensor:
        _, x, logits, weight, down, top_k, normalize, out, add, lens, bias, down_bias, activation, *_ = problem
        experts, shares = route(logits, top_k, normalize, lens, problem.scales, problem.mine)
        order, starts = sort_by_expert(experts, len(weight))
        default = kernels.default_config(len(order), logits.shape[1])
        gate_up_config, down_config = (FourBitExpertTiles(*each) for each in constants or (default, default))
        hidden = kernels.gate_up(arranged(x), order, starts, four_bit(weight), bias, gate_up_config, activation)
        y = kernels.down(hidden, order, starts, shares, four_bit(down), down_bias, down_config)
        return add_pairs(y, out, add, lens, **others(problem, experts))

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        """The default ones. Then tiles of about as many tokens as an expert has, and of up to four times as many."""
        if not cls.is_for(key):
            return
        yield ()
        mean = num_tokens * top_k / key.experts
        for tokens in (16, 32, 64, 128):
            if min(mean, 128) <= tokens <= max(32, 4 * mean):
                gate_ups, downs = _TILES[tokens == 128]
                for gate_up, down in product(gate_ups, downs):
                    yield FourBitExpertTiles(tokens, *gate_up), FourBitExpertTiles(tokens, *down)


# Columns, input columns of a step, warps and stages of gate_up and of down: with up to 64 tokens, and with 128.
_TILES = (
    (((64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3)), ((64, 128, 4, 3), (64, 128, 4, 4), (64, 256, 4, 3))),
    (((64, 128, 4, 3), (128, 128, 8, 2)), ((128, 128, 4, 3), (128, 128, 8, 3))),
)
