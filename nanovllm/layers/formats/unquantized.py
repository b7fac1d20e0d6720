"""Weights that are tensors of the model's dtype."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.layers.formats.format import Input, T, Weight, WeightFormat, value_of
from nanovllm.layers.formats.packed import Packed, can_pack
from nanovllm.layers.formats.parameters import LayerParameter, Shards, WeightLoader, make_parameter
from nanovllm.layers.matmul.table import speed_name


@dataclass(frozen=True)
class Unquantized(WeightFormat):
    name = "unquantized"

    def table_name(self, dtype: torch.dtype) -> str:
        return speed_name(dtype)

    def parameters(
        self, shape: tuple[int, ...], shards: Shards, weight_loader: WeightLoader
    ) -> dict[str, LayerParameter]:
        return {"weight": make_parameter(shape, shards, weight_loader, self)}

    def packed(self, weight: T) -> tuple[WeightFormat, T]:
        return (Packed(), Packed.pack(weight)) if can_pack(weight) else (self, weight)

    def draw(self, parameter: nn.Parameter, generator: torch.Generator) -> None:
        parameter.data.normal_(std=0.02, generator=generator)

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> Weight:
        return Weight(self, weight.to(dtype))

    def linear(self, x: Input, weight: Weight) -> Tensor:
        return F.linear(value_of(x), weight.values)

    def linear_into(self, x: Input, weight: Weight, out: Tensor) -> Tensor:
        return torch.mm(value_of(x), weight.values.t(), out=out)
