"""Weights of a CPU's products in the order in which oneDNN, which is a part of torch, reads them.

torch computes `x W^T` of plain tensors in float32 by MKL, which does not use AVX-512 on every CPU, and in bfloat16 by
oneDNN, which then reorders the weight in each product. Packed once, a weight is read by oneDNN's own kernels at once.
A row of the result then has the same bits in a batch of any size, which MKL's has not in batches of up to three rows.

A packed weight is still a tensor `[N, K]`, but opaque (torch's layout for oneDNN, `is_mkldnn`). Only
`compute_packed` reads it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.activation import Gated


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a kernel of its own for this weight on this CPU."""
    if not torch.backends.mkldnn.is_available() or weight.device.type != "cpu" or weight.dim() != 2:
        return False
    if not weight.numel():  # a rank without a part of the vocabulary
        return False
    ops = torch.ops.mkldnn
    is_supported = {
        torch.float32: lambda: True,
        torch.bfloat16: ops._is_mkldnn_bf16_supported,
        torch.float16: ops._is_mkldnn_fp16_supported,
    }
    return weight.dtype in is_supported and is_supported[weight.dtype]()


def packed(weight: Any) -> Any:
    """A packed copy of a loaded weight `[N, K]`, of a parameter with the same attributes; the weight itself if it
    cannot be packed."""
    if not can_pack(weight):
        return weight
    values = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    if not isinstance(weight, nn.Parameter):
        return values
    parameter = nn.Parameter(values, requires_grad=False)
    vars(parameter).update(vars(weight))
    return parameter


def linear_packed(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x W^T + bias`: a new `[num_tokens, N]`. x: `[num_tokens, K]`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def compute_packed(problem: Any) -> Tensor:
    """The result of a `matmul.Problem` with a packed weight. linear_add rounds once, also with a bias."""
    x, weight, bias, out = problem.input, problem.weight, problem.bias, problem.out
    if problem.operation == "linear_add":
        return out.copy_(torch.ops.mkldnn._linear_pointwise.binary(x, out, weight, bias, "add"))
    y = linear_packed(x, weight, bias)
    if problem.operation == "linear_silu":
        return Gated(y).value()
    return y if out is None else out.copy_(y)
