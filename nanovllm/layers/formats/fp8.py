"""fp8 weights: e4m3 numbers (Micikevicius et al. 2022, arXiv:2209.05433) times scales in float32.

A scale is the largest magnitude of its group divided by 448, the largest e4m3 number, so nothing saturates. Numbers are
rounded to nearest, ties to even. A product's input is quantized in this way too, because the tensor cores' fp8
products need it. Only the GEMV kernels read it as it is.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from nanovllm.kernels.matmul.fp8 import (
    E4M3,
    dequantize_torch,
    gated_rms_norm_quantize,
    quantize,
    quantize_blocks_torch,
    quantize_rows_torch,
    rms_norm_quantize,
    sigmoid_gate_quantize,
    silu_and_mul_quantize,
)
from nanovllm.kernels.matmul.linear_checks import BLOCK
from nanovllm.layers.activation import Gated, OutputGate
from nanovllm.layers.formats.compressed_tensors import is_e4m3, only_group
from nanovllm.layers.formats.format import Input, Quantized, Settings, StoredLayer, Weight, WeightFormat, value_of
from nanovllm.layers.formats.parameters import FLOATS, LayerParameter, Shards, WeightLoader, make_parameter, stored
from nanovllm.layers.layernorm import Normed, NormOfSum

_CAPABILITY = (8, 9)  # of a GPU that multiplies e4m3 numbers


@dataclass(frozen=True)
class Fp8(WeightFormat):
    """A scale for each output channel, and for each token of the input.

    Attributes:
        scale_name: what the checkpoint calls the scales; None if weights are quantized while they are loaded.
    """

    name = "float8_e4m3fn"
    kind = "fp8"
    unit = 16  # what torch._scaled_mm takes
    needs_bfloat16 = True
    quantizes_inputs = True
    bits = 8
    is_blocked: ClassVar[bool] = False
    rows_of_scale: ClassVar[int] = 1

    scale_name: str | None = None

    @classmethod
    def declared(cls, method: str, settings: Settings) -> "WeightFormat | None":
        """compressed-tensors' FP8_DYNAMIC, FP8 and FP8_BLOCK. Where the checkpoint has one scale for all inputs, each
        token has its own here: it is no coarser, and saturates nothing."""
        group = only_group(method, settings)
        weights, inputs = (group or {}).get("weights") or {}, (group or {}).get("input_activations") or {}
        if not is_e4m3(weights) or not is_e4m3(inputs) or weights.get("dynamic"):
            return None
        of_weights, of_inputs = weights.get("strategy"), inputs.get("strategy")
        if of_weights == "block":
            of_blocks = list(weights.get("block_structure") or ()), inputs.get("group_size"), inputs.get("dynamic")
            is_right = of_inputs == "group" and of_blocks == ([BLOCK, BLOCK], BLOCK, True)
            return Fp8Blocks(scale_name="weight_scale") if is_right else None
        is_right = of_inputs == "tensor" or (of_inputs == "token" and inputs.get("dynamic") is True)
        format = {"channel": Fp8, "tensor": Fp8Tensors}.get(str(of_weights))
        return format(scale_name="weight_scale") if format is not None and is_right else None

    def check_gpu(self, capability: tuple[int, int]) -> str | None:
        return None if capability >= _CAPABILITY else "{}.{} or more".format(*_CAPABILITY)

    @property
    def is_stored(self) -> bool:
        return self.scale_name is not None

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a weight `[..., N, K]`."""
        return (*shape[:-1], 1)

    def parameters(
        self, shape: tuple[int, ...], shards: Shards, weight_loader: WeightLoader
    ) -> dict[str, LayerParameter]:
        options: dict[str, Any] = {"rows_of_weight": self.rows_of_scale, "is_scale": True}
        if self.scale_name is not None:
            options["checkpoint_name"] = self.scale_name
        scale_shards = {key: self.scale_shape(full) for key, full in shards.items()} if self.is_stored else {}
        scale = make_parameter(self.scale_shape(shape), scale_shards, weight_loader, self, torch.float32, **options)
        dtypes = ("F8_E4M3",) if self.is_stored else FLOATS
        options = {"stored_dtypes": dtypes, "takes_factor": not self.is_stored, "scale": scale}
        options["input_dtype"] = torch.get_default_dtype()
        return {"weight": make_parameter(shape, shards, weight_loader, self, E4M3, **options), "weight_scale": scale}

    def weight(self, layer: StoredLayer) -> Weight:
        return Weight(self, layer.weight, layer.weight_scale, layer.weight.stored.input_dtype)

    def store(self, parameter: LayerParameter, values: Tensor, row: int = 0, expert: int | None = None) -> None:
        if parameter.dtype == E4M3 and values.dtype != E4M3:
            values, scale = self._quantized(values.to(parameter.device))
            super().store(parameter.stored.scale, scale, row // self.rows_of_scale, expert)
        super().store(parameter, values, row, expert)

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> Weight:
        if weight.dim() == 2:
            return Weight(self, *self._quantized(weight), dtype)
        values, scales = zip(*map(self._quantized, weight), strict=True)
        return Weight(self, torch.stack(values), torch.stack(scales), dtype)

    def _quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_rows_torch(weight)

    def quantize_input(self, x: Input, unit: int = 1) -> Quantized:
        """On a GPU one kernel computes x's norm, activation or gate too. There the scales of blocks are `[num_tokens,
        K / 128]` with the tokens side by side, as cuBLAS needs them. Rows beyond the tokens hold anything. A norm is
        quantized once for all products that read it."""
        options = self.is_blocked, unit
        if isinstance(x, Normed):
            x.quantized, key = x.quantized or {}, (self.is_blocked, -len(x) % unit)
            if key not in x.quantized:
                x.quantized[key] = self._quantize_norm(x, unit)
            return x.quantized[key]
        if isinstance(x, Gated):
            return Quantized(*silu_and_mul_quantize(x.gate_up, *options, x.of_token))
        if isinstance(x, OutputGate) and not x.is_computed:
            if x.weight is None:
                return Quantized(*sigmoid_gate_quantize(x.x, x.gate, *options))
            return Quantized(*gated_rms_norm_quantize(x.x, x.gate, x.weight, x.eps, *options))
        return Quantized(*quantize(value_of(x), *options))

    def _quantize_norm(self, x: Normed, unit: int) -> Quantized:
        if x.is_computed:
            return Quantized(*quantize(x.value(), self.is_blocked, unit))
        addend = x.take_addend() if isinstance(x, NormOfSum) else None
        normed = torch.empty_like(x.residual) if x.is_read_again else None
        quantized = rms_norm_quantize(x.residual, x.weight, x.eps, self.is_blocked, unit, normed, addend)
        if normed is not None:
            x.keep(normed)
        return Quantized(*quantized)

    def linear(self, x: Input, weight: Weight) -> Tensor:
        values, scale = self.quantize_input(x)
        product = dequantize_torch(values, scale) @ self.dequantized(weight).t()
        return product.to(weight.dtype)

    def dequantized(self, weight: Weight) -> Tensor:
        """float32, of the weight's shape."""
        return dequantize_torch(weight.values, weight.scale)


@dataclass(frozen=True)
class Fp8Blocks(Fp8):
    """A scale for each 128 x 128 block, and for each token and 128 columns of the input."""

    name = "float8_e4m3fn-128x128"
    kind = "blocks of 128 x 128"
    unit = BLOCK
    is_blocked = True
    rows_of_scale = BLOCK

    @classmethod
    def declared(cls, method: str, settings: Settings) -> "WeightFormat | None":
        is_right = method == "fp8" and settings.get("fmt", "e4m3") == "e4m3"
        is_dynamic = settings.get("activation_scheme", "dynamic") == "dynamic"
        are_blocks = list(settings.get("weight_block_size") or ()) == [BLOCK, BLOCK]
        return cls(scale_name="weight_scale_inv") if is_right and is_dynamic and are_blocks else None

    def check_gpu(self, capability: tuple[int, int]) -> str | None:
        return None if capability[0] == 9 else "9.x (Hopper) for weights in blocks"

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        *experts, N, K = shape
        return (*experts, -(-N // BLOCK), -(-K // BLOCK))

    def _quantized(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_blocks_torch(weight)


@dataclass(frozen=True)
class Fp8Tensors(Fp8):
    """A scale for each tensor of the checkpoint, which becomes that of all its output channels. Each token of the input
    has a scale of its own (see `Fp8.declared`)."""

    @classmethod
    def declared(cls, method: str, settings: Settings) -> "WeightFormat | None":
        """Mistral's checkpoints."""
        is_right = method == "fp8" and settings.get("fmt", "e4m3") == "e4m3"
        is_whole = settings.get("weight_block_size", ()) is None  # Left out it means blocks of 128 x 128.
        has_scheme = settings.get("activation_scheme", "dynamic") in ("dynamic", "static")
        return cls(scale_name="weight_scale_inv") if is_right and is_whole and has_scheme else None

    def parameters(
        self, shape: tuple[int, ...], shards: Shards, weight_loader: WeightLoader
    ) -> dict[str, LayerParameter]:
        parameters = super().parameters(shape, shards, weight_loader)
        stored(parameters["weight_scale"]).is_one_number = True
        return parameters
