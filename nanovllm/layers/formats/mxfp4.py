"""MXFP4 weights (OCP Microscaling Formats, 2023): e2m1 numbers of 4 bits, of which 32 columns share a power of two.

Inputs of products stay as they are.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.matmul.dequantize_four_bit import dequantize
from nanovllm.kernels.matmul.four_bit import FourBit
from nanovllm.kernels.matmul.mxfp4 import GROUP, pack_pairs, quantize_torch
from nanovllm.layers.formats.compressed_tensors import only_group
from nanovllm.layers.formats.format import Input, Settings, StoredLayer, Weight, WeightFormat, value_of
from nanovllm.layers.formats.parameters import FLOATS, LayerParameter, Shards, WeightLoader, make_parameter

_NAN = 255  # the exponent that means it


@dataclass(frozen=True)
class Mxfp4(WeightFormat):
    """Values are uint8 `[..., N, K / 2]` in the order of `kernels.matmul.four_bit`, scales uint8 `[..., N, K / 32]`.

    Attributes:
        is_stored: whether the checkpoint has packed weights. Otherwise they are quantized while they are loaded.
        experts_only: whether only the weights of experts are in it, as in the checkpoints of gpt-oss.
    """

    name = "mxfp4"
    kind = "MXFP4"
    unit = GROUP
    bits = 4 + 8 / GROUP

    is_stored: bool = False
    experts_only: bool = False

    @classmethod
    def declared(cls, method: str, settings: Settings) -> "WeightFormat | None":
        """gpt-oss's, or compressed-tensors' mxfp4-pack-quantized with inputs that are not quantized."""
        if method == "mxfp4":
            return cls(is_stored=True, experts_only=True)
        group = only_group(method, settings)
        if group is None:
            return None
        weights = group.get("weights") or {}
        names = "type", "num_bits", "strategy", "group_size"
        is_mxfp4 = tuple(weights.get(name) for name in names) == ("float", 4, "group", GROUP)
        is_mxfp4 = is_mxfp4 and "mxfp4-pack-quantized" in (settings.get("format"), group.get("format"))
        is_static = weights.get("symmetric", True) is True and not weights.get("dynamic")
        is_right = is_mxfp4 and is_static and not group.get("input_activations")
        return cls(is_stored=True) if is_right else None

    def shape_of(self, values: Tensor) -> torch.Size:
        return torch.Size((*values.shape[:-1], 2 * values.shape[-1]))

    def are_scales(self, scales: Tensor) -> bool:
        return not bool((scales == _NAN).any())

    def parameters(
        self, shape: tuple[int, ...], shards: Shards, weight_loader: WeightLoader
    ) -> dict[str, LayerParameter]:
        def of(size: int, shape: tuple[int, ...]) -> tuple[int, ...]:
            return (*shape[:-1], shape[-1] // size)

        options: dict[str, Any] = {"is_scale": True, "takes_factor": False, "stored_dtypes": ("U8",)}
        scale_shards = {key: of(GROUP, full) for key, full in shards.items()} if self.is_stored else {}
        scale = make_parameter(of(GROUP, shape), scale_shards, weight_loader, self, torch.uint8, **options)
        options = {"stored_dtypes": ("U8",) if self.is_stored else FLOATS, "takes_factor": not self.is_stored}
        if self.is_stored:
            options |= {"checkpoint_name": "weight_packed", "numbers_each": 2}
            shards = {key: of(2, full) for key, full in shards.items()}
        options |= {"scale": scale, "input_dtype": torch.get_default_dtype()}
        weight = make_parameter(of(2, shape), shards, weight_loader, self, torch.uint8, **options)
        return {"weight": weight, "weight_scale": scale}

    def weight(self, layer: StoredLayer) -> Weight:
        return Weight(self, layer.weight, layer.weight_scale, layer.weight.stored.input_dtype)

    def store(self, parameter: LayerParameter, values: Tensor, row: int = 0, expert: int | None = None) -> None:
        if parameter.stored.is_scale:
            super().store(parameter, values, row, expert)
            return
        values = values.to(parameter.device)
        if values.dtype == torch.uint8:
            values = pack_pairs(values)
        else:
            values, scale = quantize_torch(values)
            super().store(parameter.stored.scale, scale, row, expert)
        super().store(parameter, values, row, expert)

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> Weight:
        return Weight(self, *quantize_torch(weight), dtype)

    def dequantized(self, weight: Weight) -> Tensor:
        assert weight.scale is not None
        return dequantize(FourBit(weight.values, weight.scale), weight.dtype)

    def linear(self, x: Input, weight: Weight) -> Tensor:
        return F.linear(value_of(x), self.dequantized(weight))
