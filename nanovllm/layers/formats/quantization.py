"""fp8 weights: the formats, what is quantized how, and the plain twins of their products.

A value is an e4m3 number (Micikevicius et al. 2022, arXiv:2209.05433) times a scale in float32. A scale is the largest
magnitude of its group divided by 448, the largest e4m3 number, so nothing saturates. Numbers are rounded to nearest,
ties to even.

`fp8_product` quantizes its input as well, as the tensor cores' fp8 products need it. The GEMV kernel reads the input
as it is. Both sum in float32 and round once.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
SMALLEST_SCALE = 1e-37  # The inverse of a smaller one overflows, or it is flushed to zero.
BLOCK = 128


@dataclass(frozen=True)
class Fp8Format:
    """How a linear layer's weight [N, K] is stored: in e4m3, with scales.

    Attributes:
        is_blocked: whether each 128 x 128 block has a scale, instead of each output channel.
        scale_name: what the checkpoint calls the scales; None if weights are quantized while they are loaded.
    """

    is_blocked: bool = False
    scale_name: str | None = None

    @property
    def table_name(self) -> str:
        """In place of a dtype in tables."""
        return "float8_e4m3fn-128x128" if self.is_blocked else "float8_e4m3fn"

    @property
    def is_stored(self) -> bool:
        """Whether the checkpoint is in this format."""
        return self.scale_name is not None

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the scales of a weight `[..., N, K]`."""
        *experts, N, K = shape
        return (*experts, -(-N // BLOCK), -(-K // BLOCK)) if self.is_blocked else (*experts, N, 1)

    def quantize(self, weight: Tensor) -> "Quantized":
        """weight: `[N, K]`, any float dtype; of blocks both multiples of 128."""
        if not self.is_blocked:
            return quantize_rows_torch(weight)
        N, K = weight.shape
        blocks = weight.view(N // BLOCK, BLOCK, K // BLOCK, BLOCK).transpose(1, 2).reshape(-1, BLOCK * BLOCK)
        values, scale = quantize_rows_torch(blocks)
        values = values.view(N // BLOCK, K // BLOCK, BLOCK, BLOCK).transpose(1, 2).reshape(N, K)
        return Quantized(values, scale.view(N // BLOCK, K // BLOCK))


# What LLM(quantization=...) may be.
QUANTIZATIONS = {"fp8": Fp8Format()}
# Names in tables -> formats, which may come from any kind of checkpoint.
FORMATS = {format.table_name: format for format in (Fp8Format(), Fp8Format(is_blocked=True))}


class Quantized(NamedTuple):
    """Numbers `values * scale`."""

    values: Tensor  # e4m3 [..., rows, columns]
    scale: Tensor  # float32: [..., rows, 1], or one for each group of rows and columns

    def dequantized(self) -> Tensor:
        """float32 [..., rows, columns]."""
        values, scale = self.values.float(), self.scale
        num_rows, num_columns = values.shape[-2:]
        if scale.shape[-2:] == (num_rows, 1):
            return values * scale
        if scale.shape[-2] != num_rows:
            scale = scale.repeat_interleave(BLOCK, -2)
        return values * scale.repeat_interleave(BLOCK, -1)[..., :num_rows, :num_columns]


@dataclass(frozen=True, eq=False, slots=True)
class Fp8Weight:
    """A weight `[N, K]`, or `[num_experts, N, K]`, in a format, as products take it. It stands where they may also have
    a tensor.

    Attributes:
        values: e4m3, of the weight's shape.
        scale: float32, `format.scale_shape` of it.
        input_dtype: of the products' input and result.
    """

    values: Tensor
    scale: Tensor
    format: Fp8Format
    input_dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def is_cuda(self) -> bool:
        return self.values.is_cuda

    @property
    def dtype(self) -> str:
        """The name that tables have for it."""
        return self.format.table_name

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, expert: int) -> "Fp8Weight":
        """One expert's."""
        return replace(self, values=self.values[expert], scale=self.scale[expert])

    def new_empty(self, *size: int) -> Tensor:
        """A tensor for inputs or results."""
        return self.values.new_empty(size, dtype=self.input_dtype)

    def dequantized(self) -> Tensor:
        """float32, of its shape."""
        return Quantized(self.values, self.scale).dequantized()


Weight = Tensor | Fp8Weight


def values_and_scale(weight: Weight) -> tuple[Tensor, Tensor | None]:
    return (weight.values, weight.scale) if isinstance(weight, Fp8Weight) else (weight, None)


_weight_format: ContextVar[Fp8Format | None] = ContextVar("nanovllm_weight_format", default=None)


@contextmanager
def weight_format(value: Fp8Format | None) -> Iterator[None]:
    """A block in which linear layers are made with this format, as torch's default dtype is for tensors."""
    token = _weight_format.set(value)
    try:
        yield
    finally:
        _weight_format.reset(token)


def get_weight_format() -> Fp8Format | None:
    return _weight_format.get()


def quantize_rows_torch(x: Tensor) -> Quantized:
    """One scale for each row of `[rows, columns]`; zeros where a row is zero, or so small that the inverse of its scale
    would overflow. Twin of `kernels.fp8`'s kernels."""
    # A factor instead of a division, which GPUs round in several ways.
    scale = x.abs().amax(-1, keepdim=True).float() * (1 / E4M3_MAX)
    inverse = torch.where(scale >= SMALLEST_SCALE, 1 / scale, 0.0)
    return Quantized((x.float() * inverse).to(E4M3), scale)


def quantize_input_torch(x: Tensor, format: Fp8Format) -> Quantized:
    """A product's input `[num_tokens, K]`: one scale for each token, or with blocks for each token and 128 columns."""
    if not format.is_blocked:
        return quantize_rows_torch(x)
    num_tokens, K = x.shape
    values, scale = quantize_rows_torch(x.reshape(-1, BLOCK))
    return Quantized(values.view(num_tokens, K), scale.view(num_tokens, K // BLOCK))


def fp8_product_torch(x: Quantized, weight: Fp8Weight) -> Tensor:
    """`x W^T`, `[num_tokens, N]` of the weight's input_dtype. Twin of `torch._scaled_mm` and the split-K kernel."""
    return (x.dequantized() @ weight.dequantized().t()).to(weight.input_dtype)
