"""Our kernel for integers of 4 bits and 16 tokens or more on Hopper, whose warps load and multiply side by side."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.matmul import four_bit_hopper as kernels
from nanovllm.kernels.matmul.four_bit_hopper import FourBitHopperConfig
from nanovllm.kernels.matmul.split_k import make_arrivals
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.four_bit import arranged, four_bit
from nanovllm.layers.matmul.problem import Problem
from nanovllm.layers.matmul.table import Key

_MIN_CHALLENGING_TOKENS = 9
_SHARED_BYTES = 225 * 1024
_MAX_STAGES = 8


class FourBitHopper(Candidate):
    """One launch computes the input's norm or activation and arranges it, another multiplies. The activation of a
    linear_silu is left to the next product. constants: a `FourBitHopperConfig`'s."""

    name = "hopper-4bit"
    operations = ("linear", "linear_silu", "linear_add", "linear_sum")
    formats = (Int4.name,)

    def __init__(self, device: torch.device):
        # Shared by all launches of an engine, because each waits for the one before.
        self._arrivals = make_arrivals(device)

    def supports(self, key: Key, weight: Weight) -> bool:
        return self.is_for(key) and use_kernels(weight.values) and kernels.can_multiply(four_bit(weight), weight.dtype)

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        return FourBitHopperConfig(*constants).fitted(weight.device)

    def launch(self, problem: Problem, constants: tuple) -> Tensor | Gated:
        key, x, weight, bias, out = problem
        y = weight.new_empty(len(x), key.N) if out is None else out
        add = key.operation == "linear_add"
        config = FourBitHopperConfig(*constants)
        kernels.four_bit_hopper(arranged(x), four_bit(weight), y, bias, config, self._arrivals, add=add, pdl=True)
        return Gated(y) if key.operation == "linear_silu" else y

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        """Tiles as a whole, if they are enough for most multiprocessors. Equal parts of all tiles, if these are not
        many. The stages fill the shared memory."""
        if not cls.is_for(key) or num_tokens < _MIN_CHALLENGING_TOKENS:
            return
        padded = max(16, 1 << (num_tokens - 1).bit_length())
        for rows, tokens in product((128, 256), (16, 32, 64, 128, 256)):
            if tokens > padded or tokens < min(padded, 128) or rows * tokens > 256 * 128:
                continue
            tiles = -(-key.N // rows) * -(-num_tokens // tokens)
            for shares in (False, True):
                if tiles < 4 * num_multiprocessors if shares else tiles > 0.6 * num_multiprocessors:
                    config = FourBitHopperConfig(rows, tokens, shares, 0)
                    num_stages = min(_MAX_STAGES, (_SHARED_BYTES - config.shared_bytes) // config.stage_bytes)
                    if num_stages >= 2:
                        yield config._replace(num_stages=num_stages)
