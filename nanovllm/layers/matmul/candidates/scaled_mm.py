"""torch's products of weights in fp8, with inputs that are quantized first."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels import HAS_TRITON
from nanovllm.kernels.matmul.split_k import SplitKConfig, split_k
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.format import Input, Weight
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.problem import Problem
from nanovllm.layers.matmul.table import Key

# For any number of tokens and any shape.
_WHOLE_K = SplitKConfig(tile_rows=128, tile_k=128, splits=1, num_stages=4, prefetch=0, tile_tokens=128, num_warps=8)
# cuBLAS needs the scales of blocks, and of groups of the input, in lines of a multiple of four.
_SCALES = 4


class ScaledMm(Candidate):
    """On a GPU one kernel computes the input's norm or activation and quantizes it, and `torch._scaled_mm` multiplies,
    or our own kernel where that cannot. A CPU computes the format's twin. The activation of a linear_silu is left to
    the quantization of the next product's input."""

    name = "scaled-mm"
    operations = ("linear", "linear_silu", "linear_add", "linear_sum")
    formats = (Fp8.name, Fp8Blocks.name)
    is_default = True
    adds_apart = True

    def launch(self, problem: Problem, constants: tuple = ()) -> Tensor | Gated:
        key, x, weight, bias, out = problem
        y = scaled_mm(x, weight)
        if key.operation == "linear_silu":
            return Gated(y)
        if bias is not None:
            y += bias
        if out is None:
            return y
        return out.add_(y) if key.operation == "linear_add" else out.copy_(y)

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        if cls.is_for(key):
            yield ()


def scaled_mm(x: Input, weight: Weight) -> Tensor:
    """`x W^T` of the quantized x: `[num_tokens, N]` of the weight's dtype, a new tensor."""
    format, is_blocked, num_tokens = weight.format, weight.format.name == Fp8Blocks.name, len(x)
    weight_scale: Any = weight.scale
    if not is_on_gpu(weight):
        return format.linear(x, weight)
    if num_tokens == 0:
        return weight.new_empty(0, len(weight))
    if is_blocked and weight_scale.shape[1] % _SCALES:
        # torch takes no padding in a weight's scales.
        y = weight.new_empty(num_tokens, len(weight))
        values, scale = format.quantize_input(x)
        split_k(values, weight.values, y, None, _WHOLE_K, None, x_scale=scale, weight_scale=weight_scale, pdl=True)
        return y
    values, scale = format.quantize_input(x, _SCALES if is_blocked else 1)
    scales: Any = {"scale_a": scale, "scale_b": weight_scale.t()}
    # The scales of blocks are for cuBLAS, those of rows for CUTLASS. Fast accumulation leaves out the promotion of the
    # tensor cores' sums to float32 after every few products; blocks have none.
    y = torch._scaled_mm(
        values,
        weight.values.t(),
        **scales,
        out_dtype=weight.dtype,
        use_fast_accum=not is_blocked,
    )
    return y[:num_tokens]


def is_on_gpu(weight: Weight) -> bool:
    """Whether it is on a GPU that has what its products need: our kernels write the scales of blocks as cuBLAS wants
    them."""
    return weight.values.is_cuda and (HAS_TRITON or weight.format.name == Fp8.name)
