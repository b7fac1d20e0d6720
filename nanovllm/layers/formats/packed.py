"""Weights of a CPU's products in the order in which oneDNN, which is a part of torch, reads them.

torch computes `x W^T` of plain tensors in float32 by MKL, which does not use AVX-512 on every CPU, and in bfloat16 by
oneDNN, which then reorders the weight in each product. Packed once, a weight is read by oneDNN's own kernels at once.
The bits of a result's row then do not depend on the batch's size. MKL's do, in batches of up to three rows.

A packed weight is still a tensor `[N, K]`, but opaque (torch's layout for oneDNN, `is_mkldnn`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.formats.format import Input, T, Weight, WeightFormat
from nanovllm.layers.formats.parameters import LayerParameter, Shards, WeightLoader


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN has a kernel of its own for this weight on this CPU."""
    if not torch.backends.mkldnn.is_available() or weight.device.type != "cpu" or weight.dim() != 2:
        return False
    if not weight.numel():  # a rank without a part of the vocabulary
        return False
    ops = torch.ops.mkldnn
    is_supported: dict[torch.dtype, Callable[[], bool]] = {
        torch.float32: lambda: True,
        torch.bfloat16: ops._is_mkldnn_bf16_supported,
        torch.float16: ops._is_mkldnn_fp16_supported,
    }
    return weight.dtype in is_supported and is_supported[weight.dtype]()


@dataclass(frozen=True)
class Packed(WeightFormat):
    """What unquantized weights become once they are loaded (`Unquantized.packed`)."""

    name = "packed"

    def parameters(
        self, shape: tuple[int, ...], shards: Shards, weight_loader: WeightLoader
    ) -> dict[str, LayerParameter]:
        raise NotImplementedError("weights are packed once they are loaded")

    @staticmethod
    def pack(weight: T) -> T:
        """A packed copy of a weight `[N, K]`. A parameter's copy keeps its attributes."""
        return _like(weight, torch.ops.mkldnn._reorder_linear_weight(weight.detach()))

    def unpacked(self, weight: Any) -> tuple[WeightFormat, Any]:
        return weight.stored.format, _like(weight, weight.detach().to_dense())

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> Weight:
        return Weight(self, self.pack(weight.to(dtype)))

    def linear(self, x: Input, weight: Weight) -> Tensor:
        x = x if isinstance(x, Tensor) else x.value()
        return torch.ops.mkldnn._linear_pointwise(x, weight.values, None, "none", [], "")


def _like(weight: Tensor, values: Tensor) -> Any:
    """The values as what the weight is: a tensor, or a parameter with its attributes."""
    if not isinstance(weight, nn.Parameter):
        return values
    parameter = nn.Parameter(values, requires_grad=False)
    vars(parameter).update(vars(weight))
    return parameter
