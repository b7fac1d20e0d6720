"""int4 weights: integers of four bits, with a scale for each group of a row's columns, and perhaps a zero.

An integer q of 0..15 stands for `(q - zero) * scale`. Without zeros, all are 8. `kernels.matmul.four_bit` has the order
of the integers in memory. Products multiply in the model's dtype, to which the weights are rounded.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.matmul.dequantize_four_bit import dequantize
from nanovllm.kernels.matmul.four_bit import UNIT, FourBit, pack_torch
from nanovllm.layers.formats.format import Input, StoredLayer, Weight, WeightFormat, value_of
from nanovllm.layers.formats.parameters import LayerParameter, Shards, WeightLoader, make_parameter

GROUPS = (128, 64, 32)  # columns that share a scale where weights are rounded while they are loaded
ZERO = 8  # of weights without zeros of their own
_NUMBERS_AT_ONCE = 2**21  # that are rounded: in float32 they take memory beside the weights


@dataclass(frozen=True)
class Int4(WeightFormat):
    """Weights that are rounded to nearest while they are loaded, in groups of 128 columns, or of 64 or 32 where 128
    does not divide a rank's columns."""

    name = "int4"
    kind = "int4"

    @property
    def is_stored(self) -> bool:
        return False

    @property
    def unit(self) -> int:
        return UNIT

    @property
    def bits(self) -> float:
        return 4 + 16 / GROUPS[0]

    @property
    def row_unit(self) -> int:
        return 1

    def shape_of(self, values: Tensor) -> torch.Size:
        return torch.Size((*values.shape[:-1], 2 * values.shape[-1]))

    def parameters(
        self, shape: tuple[int, ...], shards: Shards, weight_loader: WeightLoader
    ) -> dict[str, LayerParameter]:
        *rows, K = shape
        # No tensor of a checkpoint fills the scales: `store` does, with the weights.
        scale = make_parameter((*rows, K // group_of(K)), {}, weight_loader, self, is_scale=True)
        options: dict[str, Any] = {"scale": scale, "input_dtype": scale.dtype}
        weight = make_parameter((*rows, K // 2), shards, weight_loader, self, torch.uint8, **options)
        return {"weight": weight, "weight_scale": scale}

    def weight(self, layer: StoredLayer) -> Weight:
        zero = getattr(layer, "weight_zero", None)
        return Weight(self, layer.weight, layer.weight_scale, layer.weight.stored.input_dtype, zero)

    def store(self, parameter: LayerParameter, values: Tensor, row: int = 0, expert: int | None = None) -> None:
        stored = parameter.stored
        if stored.is_scale:
            super().store(parameter, values, row, expert)
            return
        if not values.is_floating_point():
            super().store(parameter, pack_torch(values), row, expert)
            return
        group = 2 * parameter.shape[-1] // stored.scale.shape[-1]
        for part in values.split(max(1, _NUMBERS_AT_ONCE // values.shape[1])):
            packed, scale = round_groups(part.to(parameter.device), group, stored.scale.dtype)
            super().store(parameter, packed, row, expert)
            super().store(stored.scale, scale, row, expert)
            if stored.zero is not None:
                super().store(stored.zero, torch.full_like(scale, ZERO), row, expert)
            row += len(part)

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> Weight:
        group = group_of(weight.shape[-1])
        if weight.dim() == 2:
            return Weight(self, *round_groups(weight, group, dtype), dtype)
        values, scales = zip(*(round_groups(each, group, dtype) for each in weight), strict=True)
        return Weight(self, torch.stack(values), torch.stack(scales), dtype)

    def linear(self, x: Input, weight: Weight) -> Tensor:
        return F.linear(value_of(x), self.dequantized(weight))

    def dequantized(self, weight: Weight) -> Tensor:
        """A weight's numbers, rounded to the model's dtype."""
        return dequantize(four_bit(weight), weight.dtype)


def group_of(num_columns: int) -> int:
    """How many columns share a scale, of a weight that is rounded while it is loaded."""
    return next(group for group in GROUPS if num_columns % group == 0)


def round_groups(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A weight `[N, K]` rounded to nearest: packed uint8 `[N, K / 2]`, and the scales, `[N, K / group]` of a dtype. The
    number of the largest magnitude in a group becomes -8, so a scale may be negative."""
    groups = weight.float().unflatten(1, (-1, group))
    largest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = (largest / -8).to(dtype)
    # Where it is zero in the dtype, all numbers of the group become zero.
    scale = torch.where(scale == 0, 1, scale)
    codes = (groups / scale.float()).round_().clamp_(-8, 7).add_(8).to(torch.uint8)
    return pack_torch(codes.flatten(1)), scale.squeeze(2)


def four_bit(weight: Weight) -> FourBit:
    """A weight in int4 as the kernels take it."""
    return FourBit(weight.values, weight.scale, weight.zero)  # type: ignore[arg-type]
