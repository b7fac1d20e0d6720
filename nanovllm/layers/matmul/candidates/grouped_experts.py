"""Our kernels for the experts of long prefills on Hopper."""

from collections.abc import Iterator
from itertools import product

from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.experts.experts import MAX_EXPERTS, add_pairs, route
from nanovllm.kernels.experts.grouped import GroupedTile, group_rows, grouped_product, plan_tiles
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.matmul.linear_checks import BLOCK
from nanovllm.layers.formats.all_formats import format_of_table
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.dequantized import dequantized
from nanovllm.layers.matmul.candidates.expert_tiles import others
from nanovllm.layers.matmul.problem import ExpertsProblem
from nanovllm.layers.matmul.table import Key

_FOUR_BIT = (Int4.name, Mxfp4.name)
_MANY_TOKENS = 64  # of an expert, from which on copying their rows is worth a trial


class GroupedExperts(Candidate):
    """Of at least one token. Weights of 4 bits become tensors of the model's dtype first. constants: two
    `GroupedTile`s, for gate_up and down, with equal numbers of tokens."""

    name = "grouped-experts"
    operations = ("experts",)
    formats = (Unquantized.name, Fp8.name, Fp8Blocks.name, *_FOUR_BIT)
    adds_more = True

    def supports(self, key: Key, weight: Weight) -> bool:
        if not self.is_for(key) or not use_kernels(weight.values) or not GpuFacts.of(weight.device).is_hopper:
            return False
        sizes, unit = (key.K, key.N // 2), 16 // _itemsize(weight)
        return weight.dtype.itemsize == 2 and key.experts <= MAX_EXPERTS and all(size % unit == 0 for size in sizes)

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        tiles = [GroupedTile(*each) for each in constants]
        pairs = zip((2, 1), tiles, strict=True)
        return constants if all(t.is_fitting(n, _itemsize(weight), weight.device) for n, t in pairs) else None

    def launch(self, problem: ExpertsProblem, constants: tuple) -> Tensor:
        _, x, logits, weight, down, top_k, normalize, out, add, lens, bias, down_bias, *_ = problem
        gate_up_tile, down_tile = (GroupedTile(*each) for each in constants)
        experts, shares = route(logits, top_k, normalize, lens, problem.scales, problem.mine)
        plan = plan_tiles(experts, len(weight), gate_up_tile.tokens)
        if weight.format.name in _FOUR_BIT:
            weight, down = dequantized(weight), dequantized(down)
        values, scale = weight.format.quantize_input(x)
        rows, scale, positions = group_rows(values, scale, experts, plan)
        rows = grouped_product(
            rows, weight.values, plan, gate_up_tile, x_scale=scale, weight_scale=weight.scale, dtype=out.dtype,
            bias=bias, activation=problem.activation,
        )  # fmt: skip
        rows, scale = down.format.quantize_input(rows)
        y = grouped_product(
            rows, down.values, plan, down_tile, x_scale=scale, weight_scale=down.scale, dtype=out.dtype, bias=down_bias
        )
        return add_pairs(y.view(*shares.shape, -1), out, add, lens, positions, shares, **others(problem, experts))

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        if not cls.is_for(key) or key.phase != "prefill" or num_tokens * top_k < _MANY_TOKENS * key.experts:
            return
        format = format_of_table(key.format)
        k = BLOCK if isinstance(format, Fp8) else BLOCK // 2
        for tokens, gate_ups, downs in _TILES_IN_BLOCKS if isinstance(format, Fp8Blocks) else _TILES:
            for gate_up, down in product(gate_ups, downs):
                yield tuple(GroupedTile(tokens, columns, k, *rest) for columns, *rest in (gate_up, down))


# Tokens of a tile; columns, warps, stages, and programs of a multiprocessor, of gate_up and of down.
_TILES: tuple = ((128, ((128, 8, 3), (128, 8, 4)), ((256, 8, 3), (128, 4, 3, 2))),)
_TILES_IN_BLOCKS: tuple = ((128, ((64, 8, 4),), ((128, 8, 4),)), (64, ((128, 8, 3),), ((128, 4, 4),)))


def _itemsize(weight: Weight) -> int:
    """Bytes of a number as it is multiplied."""
    return weight.dtype.itemsize if weight.format.name in _FOUR_BIT else weight.values.itemsize
