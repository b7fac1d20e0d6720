"""Our kernel that splits K. It requests weights while the kernel before it still runs."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.matmul import split_k as kernels
from nanovllm.kernels.matmul.split_k import SplitKConfig
from nanovllm.layers.formats.all_formats import format_of_table
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.problem import Problem
from nanovllm.layers.matmul.table import Key


class SplitK(Candidate):
    """It is for weights in fp8, or for up to 128 tokens and weights with few rows. With at most 64 rows, such as a
    router's, these may have 1,024 tokens. constants: a `SplitKConfig`'s."""

    name = "split-k"
    operations = ("linear", "linear_silu", "linear_add", "linear_sum")
    formats = (Unquantized.name, Fp8.name, Fp8Blocks.name)

    def __init__(self, device: torch.device):
        # Shared by all launches of an engine, because each waits for the one before.
        self.arrivals = kernels.make_arrivals(device)

    def supports(self, key: Key, weight: Weight) -> bool:
        is_there = use_kernels(weight.values) and GpuFacts.of(weight.device).is_hopper
        is_right = key.K % kernels.ALIGNMENT == 0 and weight.dtype in kernels.DTYPES
        is_small = weight.scale is not None or key.N <= kernels.MAX_ROWS
        return self.is_for(key) and is_there and is_right and is_small

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        return SplitKConfig(*constants).fitted(weight.values.itemsize, weight.device)

    def launch(self, problem: Problem, constants: tuple) -> Tensor | None:
        key, x, weight, bias, _ = problem
        if weight.scale is None and len(x) > kernels.max_tokens(key.N):
            return None
        values, x_scale = weight.format.quantize_input(x)
        y = problem.result()
        kernels.split_k(
            values,
            weight.values,
            y,
            bias,
            SplitKConfig(*constants),
            self.arrivals,
            x_scale=x_scale,
            weight_scale=weight.scale,
            silu=key.operation == "linear_silu",
            add=key.operation == "linear_add",
            pdl=True,
        )
        return y

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        if not cls.is_for(key) or key.phase != "decode":
            return
        format = format_of_table(key.format)
        if isinstance(format, Fp8):
            yield from _challengers_in_fp8(key, num_tokens, num_multiprocessors, format.is_blocked)
        elif num_tokens > kernels.max_tokens(key.N):
            return
        elif kernels.max_tokens(key.N) > kernels.MAX_TOKENS:
            # Few tokens of so few rows give most multiprocessors no program, however K is split.
            for tile_rows, tile_k, tile_tokens, splits in product((16, 32), (128, 256), (16, 64), (4, 8)):
                if 2 * tile_k * splits <= key.K:
                    yield SplitKConfig(tile_rows, tile_k, splits, 4, 0, tile_tokens)
        else:
            for tile_rows in (16, 32, 64):
                for splits in (1, 2, 4, 8):
                    programs = -(-key.N // tile_rows) * splits * -(-num_tokens // kernels.TILE_TOKENS)
                    is_enough = num_multiprocessors // 2 <= programs <= 4 * num_multiprocessors
                    if 512 * splits <= key.K and is_enough:
                        yield tile_rows, 128, splits, 6, 1024
                        yield tile_rows, 128, splits, 4, 0


def _challengers_in_fp8(key: Key, num_tokens: int, num_multiprocessors: int, in_blocks: bool) -> Iterator[tuple]:
    """As few splits as give most multiprocessors a program, and twice as many. The stages fill a multiprocessor's
    shared memory, or half of it, where another program, perhaps the next kernel's, finds room too."""
    for tile_rows, tile_tokens in _tiles_in_fp8(num_tokens):
        tiles = -(-key.N // tile_rows) * -(-num_tokens // tile_tokens)
        fewest = next((n for n in (1, 2, 4) if n * tiles >= 0.6 * num_multiprocessors or 1024 * n > key.K), 8)
        for splits in (fewest, 2 * fewest):
            programs = splits * tiles
            if splits > fewest and (splits > 8 or programs > 2.2 * num_multiprocessors or 512 * splits > key.K):
                continue
            # A program that has few others beside it keeps up with the memory in large steps only.
            steps = (256, 128) if tile_rows == 64 and not in_blocks else (128,)
            kibibytes = 220 if programs <= num_multiprocessors else 110
            num_warps = 8 if tile_rows >= 128 and tile_tokens >= 64 else 4
            for tile_k in steps:
                num_stages = min(max(kibibytes * 1024 // (tile_k * (tile_rows + tile_tokens)), 3), 6)
                yield SplitKConfig(tile_rows, tile_k, splits, num_stages, 0, tile_tokens, num_warps)


def _tiles_in_fp8(num_tokens: int) -> Iterator[tuple[int, int]]:
    """Rows of a weight and tokens. Larger ones read less from L2."""
    tokens = min(max(16, 1 << (num_tokens - 1).bit_length()), 128)
    yield from ((rows, tokens) for rows in (64, 128))
    if tokens == 64:
        yield 256, 64
    if tokens == 128:
        yield 128, 64
