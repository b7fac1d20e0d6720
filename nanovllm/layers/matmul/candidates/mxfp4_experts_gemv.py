"""Our kernels for the experts of a few tokens and weights in MXFP4, on plain cores, which contain the norm."""

from collections.abc import Iterator
from itertools import product
from typing import Any, ClassVar

from nanovllm.kernels.experts import mxfp4_experts_gemv
from nanovllm.kernels.experts.mxfp4_experts_gemv import Mxfp4ExpertsConfig
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.matmul.candidates.four_bit_experts_gemv import FourBitExpertsGemv
from nanovllm.layers.matmul.table import Key

_MOST_TRIED = 8  # tokens: with more, tiles read the weights of an expert once for several


class Mxfp4ExpertsGemv(FourBitExpertsGemv):
    """Launched as the kernels on tensor cores are. constants: two `Mxfp4ExpertsConfig`s, for gate_up and down."""

    name = "mxfp4-experts-gemv"
    formats = (Mxfp4.name,)
    kernels: ClassVar[Any] = mxfp4_experts_gemv
    config: ClassVar[Any] = Mxfp4ExpertsConfig

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        return constants  # They need next to no shared memory.

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
