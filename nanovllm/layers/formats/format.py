"""A weight's format: how it is declared, allocated, loaded, quantized and multiplied. One file a format."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from nanovllm.layers.activation import Gated, OutputGate
from nanovllm.layers.formats.parameters import LayerParameter, Shards, WeightLoader
from nanovllm.layers.layernorm import Normed

T = TypeVar("T", bound=Tensor)  # a parameter, or a tensor
Settings = Mapping[str, Any]  # config.json's quantization_config
# [num_tokens, K]; a norm, an activation or a gate is computed within the product, or before it.
Input = Tensor | Normed | Gated | OutputGate


def value_of(x: Input) -> Tensor:
    return x if isinstance(x, Tensor) else x.value()


class Quantized(NamedTuple):
    """A product's input, as it is multiplied: `values * scale`."""

    values: Tensor  # [num_tokens, K]
    scale: Tensor | None  # float32, a number for each token or group of a token's columns; None: there is none


@dataclass(frozen=True, eq=False, slots=True)
class Weight:
    """A weight `[N, K]`, or `[num_experts, N, K]`, in a format, as products take it.

    Attributes:
        values: in the format's own dtype.
        scale: what values are multiplied by; None in a format without scales.
        zero: what is subtracted from values first; None if the format says what, or nothing is.
        input_dtype: of the products' input and result, if that is not the dtype of values.
    """

    format: "WeightFormat"
    values: Tensor
    scale: Tensor | None = None
    input_dtype: torch.dtype | None = None
    zero: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.format.shape_of(self.values)

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the products' input and result."""
        return self.input_dtype or self.values.dtype

    @property
    def table_name(self) -> str:
        """What tables call its format and dtype."""
        return self.format.table_name(self.dtype)

    def __len__(self) -> int:
        return len(self.values)

    def of_expert(self, expert: int) -> "Weight":
        """One expert's weight."""
        scale, zero = (None if each is None else each[expert] for each in (self.scale, self.zero))
        return Weight(self.format, self.values[expert], scale, self.input_dtype, zero)

    def linear(self, x: Input) -> Tensor:
        """`x W^T`, by the format's plain product."""
        return self.format.linear(x, self)

    def new_empty(self, *size: int) -> Tensor:
        """A tensor for inputs or results."""
        return self.values.new_empty(size, dtype=self.dtype)


class StoredLayer(Protocol):
    """A layer with the parameters of a format."""

    weight: LayerParameter
    weight_scale: LayerParameter  # in a format with scales


class WeightFormat(ABC):
    """How linear layers store their weights. Formats are compared by what they are, so they are frozen dataclasses."""

    name: ClassVar[str]  # what candidates call it
    kind: ClassVar[str] = ""  # in messages: "weights in fp8"
    needs_bfloat16: ClassVar[bool] = False  # of its products' inputs, on a GPU
    # Whether inputs are quantized first, by a kernel that also computes the norm and can add to the residual stream.
    quantizes_inputs: ClassVar[bool] = False
    is_batch_invariant: ClassVar[bool] = False  # whether no row's bits in its products depend on the other rows

    @classmethod
    def declared(cls, method: str, settings: Settings) -> "WeightFormat | None":
        """The format that a config.json's quantization_config declares; None if that is another one. method: its
        quant_method."""
        return None

    def table_name(self, dtype: torch.dtype) -> str:
        """What tables call it. dtype: of the products' input."""
        return self.name

    def settings_name(self, dtype: torch.dtype) -> str:
        """What the table's settings call it, which depend on sizes rather than on who computes a product."""
        return self.table_name(dtype)

    def check_gpu(self, capability: tuple[int, int]) -> str | None:
        """None if GPUs of this compute capability multiply such weights, else what they need."""
        return None

    @property
    def bits(self) -> float | None:
        """Of a number, its part of a scale included; None: those of the model's dtype."""
        return None

    @property
    def unit(self) -> int:
        """Of how many columns a weight on each rank must have a multiple."""
        return 1

    @property
    def row_unit(self) -> int:
        """The same of its rows."""
        return self.unit

    def check_sizes(self, rows: Iterable[tuple[str, int]], columns: tuple[str, int], num_ranks: int) -> None:
        """Raises ValueError, naming the size, if it cannot store a rank's part of a weight.

        Args:
            rows: what config.json calls them, and how many are cut from a tensor of the checkpoint at once.
            columns: the same of the columns, and how many a rank has.
        """
        for name, size, unit in [*((*each, self.row_unit) for each in rows), (*columns, self.unit)]:
            if size % unit:
                where, fewer = f"tensor_parallel_size={num_ranks}", "fewer ranks, or "
                if num_ranks == 1:
                    where, fewer = "quantization", ""
                raise ValueError(
                    f"{where}: weights in {self.kind} need sizes that are multiples of {unit} on each rank, and "
                    f"its {name} would be {size}; use {fewer}the unquantized checkpoint without quantization"
                )

    def shape_of(self, values: Tensor) -> torch.Size:
        """`[..., N, K]`, of a format that has several numbers in one too."""
        return values.shape

    @property
    def is_stored(self) -> bool:
        """Whether the checkpoint is in this format. Otherwise weights are quantized while they are loaded."""
        return True

    @property
    def experts_only(self) -> bool:
        """Whether only the weights of experts are in this format."""
        return False

    def are_scales(self, scales: Tensor) -> bool:
        """Whether a checkpoint's scales may be right. Wrong ones would show in the results alone."""
        return bool((scales.isfinite() & (scales >= 0)).all())

    def says_nothing(self, name: str, found: Tensor) -> bool:
        """Whether a checkpoint's tensor of this last name, which no parameter reads, may be left out: a weight in this
        format is the same without it. Raises ValueError, with what is wrong, if it contradicts config.json."""
        return False

    @abstractmethod
    def parameters(
        self, shape: tuple[int, ...], shards: Shards, weight_loader: WeightLoader
    ) -> dict[str, LayerParameter]:
        """The parameters of a layer's weight `[..., N, K]`, by their names in the layer: "weight", and what belongs to
        it. Arguments are those of `make_parameter`."""

    def weight(self, layer: StoredLayer) -> Weight:
        """A layer's weight, which has been made by `parameters`."""
        return Weight(self, layer.weight)

    def store(self, parameter: LayerParameter, values: Tensor, row: int = 0, expert: int | None = None) -> None:
        """Write rows to a parameter, or to one expert's part of it, from `row` on."""
        target = parameter.data if expert is None else parameter.data[expert]
        target[row : row + len(values)].copy_(values)

    def draw(self, parameter: Any, generator: torch.Generator) -> None:
        """Fill a weight, and what belongs to it, with numbers N(0, 0.02^2)."""
        # One expert at a time: all of them in float32 take much memory.
        for expert in [None] if parameter.dim() == 2 else range(len(parameter)):
            drawn = torch.empty(self.shape_of(parameter)[-2:], dtype=torch.float32, device=parameter.device)
            self.store(parameter, drawn.normal_(std=0.02, generator=generator), expert=expert)

    def packed(self, weight: T) -> "tuple[WeightFormat, T]":
        """A loaded parameter, or a tensor, as this machine multiplies it fastest, and its format then."""
        return self, weight

    def unpacked(self, weight: T) -> "tuple[WeightFormat, T]":
        """The inverse of `packed`: what can be loaded into, and its format."""
        return self, weight

    @abstractmethod
    def quantize(self, weight: Tensor, dtype: torch.dtype) -> Weight:
        """A weight `[N, K]` or `[num_experts, N, K]` of any float dtype in this format, for inputs of a dtype."""

    def quantize_input(self, x: Input, unit: int = 1) -> Quantized:
        """A product's input as it is multiplied. unit: the result may have further rows, up to a multiple of it."""
        return Quantized(value_of(x), None)

    def dequantized(self, weight: Weight) -> Tensor:
        """The numbers of a weight, in a new tensor, for candidates that multiply plain ones."""
        raise NotImplementedError(f"weights in {self.kind} are multiplied as they are")

    @abstractmethod
    def linear(self, x: Input, weight: Weight) -> Tensor:
        """`x W^T`: a new `[num_tokens, N]` of the weight's dtype. The plain twin of all candidates."""

    def linear_into(self, x: Input, weight: Weight, out: Tensor) -> Tensor:
        """`linear`, written to `out`, which it returns."""
        return out.copy_(self.linear(x, weight))
