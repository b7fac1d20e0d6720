"""Our kernel for weights of 4 bits and any number of tokens, which decodes them in the tensor cores' registers."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.matmul import four_bit_tiles as kernels
from nanovllm.kernels.matmul.four_bit import DTYPES
from nanovllm.kernels.matmul.four_bit_tiles import FourBitTileConfig
from nanovllm.kernels.matmul.split_k import make_arrivals
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.four_bit import FORMATS, arranged, four_bit
from nanovllm.layers.matmul.problem import Problem
from nanovllm.layers.matmul.table import Key

_SHARED_BYTES = 225 * 1024  # of the challengers' programs on a multiprocessor


class FourBitTiles(Candidate):
    """One launch computes the input's norm or activation and arranges it, another multiplies. The activation of a
    linear_silu is left to the next product. constants: a `FourBitTileConfig`'s."""

    name = "tiles-4bit"
    operations = ("linear", "linear_silu", "linear_add", "linear_sum")
    formats = FORMATS

    def __init__(self, device: torch.device):
        # Shared by all launches of an engine, because each waits for the one before.
        self._arrivals = make_arrivals(device)

    def supports(self, key: Key, weight: Weight) -> bool:
        return self.is_for(key) and use_kernels(weight.values) and weight.dtype in DTYPES

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        return FourBitTileConfig(*constants).fitted(weight.device)

    def launch(self, problem: Problem, constants: tuple) -> Tensor | Gated:
        key, x, weight, bias, out = problem
        y = weight.new_empty(len(x), key.N) if out is None else out
        add = key.operation == "linear_add"
        config = FourBitTileConfig(*constants)
        kernels.four_bit_tiles(arranged(x), four_bit(weight), y, bias, config, self._arrivals, add=add, pdl=True)
        return Gated(y) if key.operation == "linear_silu" else y

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        """As few splits as give most multiprocessors a program, and twice as many. The stages fill a multiprocessor's
        shared memory, or half of it, where another program finds room too. Few tokens wait for weights: their steps are
        long, and their programs ask for weights early."""
        if not cls.is_for(key):
            return
        padded = max(16, 1 << (num_tokens - 1).bit_length())
        is_few = padded == 16
        for rows, tokens, tile_k in product((64, 128), (16, 32, 64, 128, 256), (256, 512) if is_few else (128, 256)):
            if tokens > padded or tokens < min(padded, 128) // 2 or tokens * tile_k > 256 * 128:
                continue
            tiles = -(-key.N // rows) * -(-num_tokens // tokens)
            stage = rows * tile_k // 2 + tokens * tile_k * 2
            shared = _SHARED_BYTES // (1 if stage * 3 > _SHARED_BYTES // 2 else 2)
            for splits in (1, 2, 4, 8):
                is_much = splits * tiles > (3 if is_few else 2.2) * num_multiprocessors or 512 * splits > key.K
                is_little = splits < 8 and 2 * splits * tiles <= num_multiprocessors and 1024 * splits <= key.K
                if (is_much and splits > 1) or is_little or 2 * stage > shared:
                    continue
                num_stages, prefetch = min(5, shared // stage), 1024 if is_few else 0
                # With 4 warps a step of 128 x 512 columns does not fit into the registers.
                if rows * tokens <= 128 * 128 and rows * tile_k <= 128 * 256:
                    yield FourBitTileConfig(rows, tokens, tile_k, splits, 4, num_stages, prefetch)
                if rows == 128 and (tokens >= 64 or is_few):
                    yield FourBitTileConfig(rows, tokens, tile_k, splits, 8, num_stages, prefetch)
