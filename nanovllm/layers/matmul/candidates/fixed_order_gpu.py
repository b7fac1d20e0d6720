"""Products in one order of sums for any number of rows, on a GPU: of `deterministic=True`.

The kernels are those of other engines, with one row of constants each instead of the table's. So a result's number is
computed by the same operations, and a whole K is summed by one program, whatever the number of tokens, and wherever a
token is in a tile. Only stages of the load pipeline depend on the card. Plain weights have a kernel of their own
(`fixed_order.FixedOrderProducts`).
"""

import torch
from torch import Tensor

from nanovllm.kernels.experts.experts import TileConfig
from nanovllm.kernels.experts.four_bit_experts import FourBitExpertTiles
from nanovllm.kernels.matmul.four_bit import DTYPES
from nanovllm.kernels.matmul.four_bit_tiles import FourBitTileConfig
from nanovllm.kernels.matmul.split_k import SplitKConfig
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.fixed_order import FixedOrder
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.dequantized import Dequantized
from nanovllm.layers.matmul.candidates.expert_tiles import ExpertTiles
from nanovllm.layers.matmul.candidates.fixed_order import OF_LAYERS, FixedOrderProducts
from nanovllm.layers.matmul.candidates.four_bit import FORMATS
from nanovllm.layers.matmul.candidates.four_bit_experts import FourBitExperts
from nanovllm.layers.matmul.candidates.four_bit_tiles import FourBitTiles
from nanovllm.layers.matmul.candidates.split_k import SplitK
from nanovllm.layers.matmul.problem import ExpertsProblem, Problem

# Tiles of 64 tokens waste little of a decode step, which waits for weights, and read these often enough in a prefill.
_IN_FP8 = SplitKConfig(tile_rows=64, tile_k=128, splits=1, num_stages=5, prefetch=0, tile_tokens=64, num_warps=4)
_IN_FOUR_BITS = FourBitTileConfig(rows=64, tokens=64, tile_k=128, splits=1, num_warps=4, num_stages=4)
_OF_EXPERTS_IN_FOUR_BITS = FourBitExpertTiles(tokens=64, columns=64, k=128, num_warps=4, num_stages=3)
_EXPERT_TILE_BYTES = 128  # of a row of a tile of experts: 64 numbers of 16 bits


def _of_experts(itemsize: int) -> TileConfig:
    """For weights and inputs with numbers of so many bytes."""
    return TileConfig(tokens=64, columns=64, k=_EXPERT_TILE_BYTES // itemsize, num_warps=4, num_stages=4)


class FixedOrderFp8(Candidate):
    """Of weights in fp8, by `split_k` without a split."""

    name = "fixed-order-fp8"
    operations = OF_LAYERS
    formats = (Fp8.name, Fp8Blocks.name)
    is_default = True
    is_batch_invariant = True

    def __init__(self, device: torch.device):
        self._split_k = SplitK(device)
        self._constants = _fitted(_IN_FP8.fitted(1, device))

    def launch(self, problem: Problem, constants: tuple = ()) -> Tensor | None:
        return self._split_k.launch(problem, self._constants) if len(problem.x) else problem.result()


class FixedOrderFourBit(Candidate):
    """Of weights in 4 bits. Those of a model in float32 become plain ones first."""

    name = "fixed-order-4bit"
    operations = OF_LAYERS
    formats = FORMATS
    is_default = True
    is_batch_invariant = True

    def __init__(self, device: torch.device):
        self._tiles, self._plain = FourBitTiles(device), FixedOrderProducts()
        self._constants = _fitted(_IN_FOUR_BITS.fitted(device))

    def launch(self, problem: Problem, constants: tuple = ()) -> Tensor | Gated:
        weight = problem.weight
        if weight.dtype in DTYPES:
            return self._tiles.launch(problem, self._constants)
        plain = Weight(FixedOrder(), weight.format.dequantized(weight))
        return self._plain.launch(problem._replace(weight=plain))


class FixedOrderExpertTiles(Candidate):
    """Of experts in every format. A token's experts are added in the order in which it chose them. In 4 bits, those of
    a model in float32 become plain ones first."""

    name = "fixed-order-expert-tiles"
    operations = ("experts",)
    formats = (FixedOrder.name, Fp8.name, Fp8Blocks.name, *FORMATS)
    is_default = True
    is_batch_invariant = True

    def __init__(self, device: torch.device):
        self._tiles, self._four_bit, self._dequantized = ExpertTiles(), FourBitExperts(), Dequantized()
        self._constants = {
            itemsize: tuple(_fitted(_of_experts(itemsize).fitted(n, itemsize, device)) for n in (2, 1))
            for itemsize in (1, 2, 4)
        }
        self._constants_of_four_bit = tuple(_fitted(_OF_EXPERTS_IN_FOUR_BITS.fitted(n, device)) for n in (2, 1))

    def launch(self, problem: ExpertsProblem, constants: tuple = ()) -> Tensor | Gated:
        weight = problem.weight
        if weight.format.name not in FORMATS:
            return self._tiles.launch(problem, self._constants[weight.values.itemsize])
        if weight.dtype in DTYPES:
            return self._four_bit.launch(problem, self._constants_of_four_bit)
        return self._dequantized.launch(problem, self._constants[weight.dtype.itemsize])


def _fitted(constants: tuple | None) -> tuple:
    """Constants that fit every card with enough memory for two stages."""
    if constants is None:
        raise ValueError("device: has too little shared memory for the products of deterministic=True")
    return constants


def make_fixed_order_candidates_of_gpu(device: torch.device) -> list[Candidate]:
    """All that a GPU's engine with `deterministic=True` has."""
    return [FixedOrderProducts(), FixedOrderFp8(device), FixedOrderFourBit(device), FixedOrderExpertTiles(device)]
