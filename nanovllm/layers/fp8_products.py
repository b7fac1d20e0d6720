"""Products of fp8 weights with inputs that are quantised first, by torch: `[num_tokens, K]` times `[N, K]`.

On a GPU one kernel computes the input's norm or activation and quantises it (`kernels.fp8`), and `torch._scaled_mm`
multiplies. A CPU computes their twins.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.layers.activation import Gated
from nanovllm.layers.layernorm import Normed
from nanovllm.layers.quantization import (
    Fp8Format,
    Fp8Weight,
    Quantized,
    fp8_product_torch,
    quantize_input_torch,
)

if HAS_TRITON:
    from nanovllm.kernels.fp8 import quantize, rms_norm_quantize, silu_and_mul_quantize


def compute_fp8(problem: Any) -> Tensor | Gated:
    """The result of a `matmul.Problem` with a weight in fp8; of a linear_silu before its activation, which the
    quantisation of the next product's input contains."""
    y = fp8_product(problem.x, problem.weight)
    if problem.operation == "linear_silu":
        return Gated(y)
    if problem.bias is not None:
        y += problem.bias
    if problem.out is None:
        return y
    return problem.out.add_(y) if problem.operation == "linear_add" else problem.out.copy_(y)


def fp8_product(x: Tensor | Normed | Gated, weight: Fp8Weight) -> Tensor:
    """`x W^T` of the quantised x: `[num_tokens, N]` of the weight's input_dtype, a new tensor."""
    quantized = quantize_input(x, weight.format)
    if not weight.is_cuda:
        return fp8_product_torch(quantized, weight)
    # The scales of blocks are for cuBLAS, those of rows for CUTLASS. Fast accumulation leaves out the promotion of the
    # tensor cores' sums to float32 after every few products; blocks have none.
    return torch._scaled_mm(
        quantized.values,
        weight.values.t(),
        scale_a=quantized.scale,
        scale_b=weight.scale.t(),
        out_dtype=weight.input_dtype,
        use_fast_accum=not weight.format.is_blocked,
    )


def quantize_input(x: Tensor | Normed | Gated, format: Fp8Format) -> Quantized:
    """On a GPU the scales of blocks are `[num_tokens, K / 128]` with the tokens side by side, as cuBLAS needs them."""
    if isinstance(x, Normed) and not x.is_computed and use_kernels(x.residual):
        return Quantized(*rms_norm_quantize(x.residual, x.weight, x.eps, format.is_blocked))
    if isinstance(x, Gated) and use_kernels(x.gate_up):
        return Quantized(*silu_and_mul_quantize(x.gate_up, format.is_blocked))
    if not isinstance(x, Tensor):
        x = x.value()
    if use_kernels(x):
        return Quantized(*quantize(x, format.is_blocked))
    return quantize_input_torch(x, format)
