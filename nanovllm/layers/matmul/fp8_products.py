"""Products of fp8 weights with inputs that are quantized first, by torch: `[num_tokens, K]` times `[N, K]`.

On a GPU one kernel computes the input's norm or activation and quantizes it (`kernels.fp8`), and `torch._scaled_mm`
multiplies, or our own kernel where that cannot. A CPU computes their twins.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.quantization import (
    Fp8Format,
    Fp8Weight,
    Quantized,
    fp8_product_torch,
    quantize_input_torch,
)
from nanovllm.layers.layernorm import Normed

if HAS_TRITON:
    from nanovllm.kernels.matmul.fp8 import quantize, rms_norm_quantize, silu_and_mul_quantize
    from nanovllm.kernels.matmul.split_k import SplitKConfig, split_k

    # For any number of tokens and any shape.
    _WHOLE_K = SplitKConfig(tile_rows=128, tile_k=128, splits=1, num_stages=4, prefetch=0, tile_tokens=128, num_warps=8)

# cuBLAS needs the scales of blocks, and of groups of the input, in lines of a multiple of four.
_SCALES = 4


def compute_fp8(problem: Any) -> Tensor | Gated:
    """The result of a `matmul.Problem` with a weight in fp8; of a linear_silu before its activation, which the
    quantization of the next product's input contains."""
    y = fp8_product(problem.x, problem.weight)
    if problem.operation == "linear_silu":
        return Gated(y)
    if problem.bias is not None:
        y += problem.bias
    if problem.out is None:
        return y
    return problem.out.add_(y) if problem.operation == "linear_add" else problem.out.copy_(y)


def fp8_product(x: Tensor | Normed | Gated, weight: Fp8Weight) -> Tensor:
    """`x W^T` of the quantized x: `[num_tokens, N]` of the weight's input_dtype, a new tensor."""
    is_blocked, num_tokens = weight.format.is_blocked, len(x)
    if not weight.is_cuda or (
        is_blocked and not HAS_TRITON
    ):  # cuBLAS wants a block's scales as our kernels write them.
        return fp8_product_torch(quantize_input(x, weight.format), weight)
    if num_tokens == 0:
        return weight.new_empty(0, len(weight))
    if is_blocked and weight.scale.shape[1] % _SCALES:
        # torch takes no padding in a weight's scales.
        y = weight.new_empty(num_tokens, len(weight))
        values, scale = quantize_input(x, weight.format)
        scales = {"x_scale": scale, "weight_scale": weight.scale}
        split_k(values, weight.values, y, None, _WHOLE_K, None, **scales, pdl=True)
        return y
    quantized = quantize_input(x, weight.format, _SCALES if is_blocked else 1)
    # The scales of blocks are for cuBLAS, those of rows for CUTLASS. Fast accumulation leaves out the promotion of the
    # tensor cores' sums to float32 after every few products; blocks have none.
    y = torch._scaled_mm(
        quantized.values,
        weight.values.t(),
        scale_a=quantized.scale,
        scale_b=weight.scale.t(),
        out_dtype=weight.input_dtype,
        use_fast_accum=not is_blocked,
    )
    return y[:num_tokens]


def quantize_input(x: Tensor | Normed | Gated, format: Fp8Format, unit: int = 1) -> Quantized:
    """On a GPU the scales of blocks are `[num_tokens, K / 128]` with the tokens side by side, as cuBLAS needs them, and
    the number of rows is a multiple of unit; those beyond the tokens hold anything."""
    if isinstance(x, Normed) and not x.is_computed and use_kernels(x.residual):
        return Quantized(*rms_norm_quantize(x.residual, x.weight, x.eps, format.is_blocked, unit))
    if isinstance(x, Gated) and use_kernels(x.gate_up):
        return Quantized(*silu_and_mul_quantize(x.gate_up, format.is_blocked, unit))
    if not isinstance(x, Tensor):
        x = x.value()
    if use_kernels(x):
        return Quantized(*quantize(x, format.is_blocked, unit))
    return quantize_input_torch(x, format)
