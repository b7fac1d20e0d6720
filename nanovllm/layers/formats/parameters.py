"""Parameters of layers that are split over ranks: each knows how it is loaded, and in which format it is stored."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

FLOATS = ("BF16", "F16", "F32", "F64")  # safetensors' names

Index = int | slice | EllipsisType | tuple[int | slice | EllipsisType, ...]
Shards = Mapping[Any, tuple[int, ...]]  # {shard id: full shape}; each layer has its own kind of shard ids
WeightLoader = Callable[..., None]  # of a parameter, what is loaded, and a shard id of the layer's own kind
Check = Callable[[Tensor, Hashable], str | None]  # of a checkpoint's tensor and a shard id: what is wrong, or None


class Sliceable(Protocol):
    """What a weight loader reads: a tensor, or a safetensors slice, of which only the parts asked for are read."""

    def __getitem__(self, index: Index, /) -> Tensor: ...


class StorageFormat(Protocol):
    """What is asked of the `WeightFormat` of a parameter."""

    def shape_of(self, values: Tensor) -> torch.Size: ...

    def are_scales(self, scales: Tensor) -> bool: ...

    def says_nothing(self, name: str, found: Tensor) -> bool: ...

    def store(self, parameter: "LayerParameter", values: Tensor, row: int = 0, expert: int | None = None) -> None: ...

    def draw(self, parameter: nn.Parameter, generator: torch.Generator) -> None: ...


class Slice(Sliceable, Protocol):
    """What the loader reads of a safetensors slice."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


@dataclass
class Stored:
    """What the loader must know of a parameter, as its attribute `stored`.

    Attributes:
        format: of a weight, or of what belongs to it; None for what is no part of a linear layer.
        rows_of_weight: how many rows of the weight one row stands for.
        checkpoint_name: its last name in the checkpoint; None for its own.
        stored_dtypes: safetensors' names of what the checkpoint may hold.
        packing: how the checkpoint stores it, if in another layout than shards says.
        check: a function of the checkpoint's tensor and a shard id, which returns what is wrong or None.
        numbers_each: of the model, in each number of a tensor of the checkpoint.
        is_scale: whether it belongs to a weight, and must hold what the format's `are_scales` says.
        is_one_number: whether a tensor of the checkpoint is one number, for all of its shard.
        takes_factor: whether `scale_while_loading` multiplies it.
        loading_factor: what that multiplies it by.
        num_experts: of a layer, whose tensors have shard ids (expert, shard id of one); None for no experts.
        experts: those that this rank holds; it reads no others' tensors.
        scale, zero: of a weight, parameters that belong to it.
        input_dtype: of a weight's products, if that is not its own.
    """

    format: StorageFormat | None = None
    rows_of_weight: int = 1
    checkpoint_name: str | None = None
    stored_dtypes: tuple[str, ...] = FLOATS
    packing: "Packing | None" = None
    check: Check | None = None
    numbers_each: int = 1
    is_scale: bool = False
    is_one_number: bool = False
    takes_factor: bool = True
    loading_factor: float = 1
    num_experts: int | None = None
    experts: range = range(0)
    scale: nn.Parameter | None = None
    zero: nn.Parameter | None = None
    input_dtype: torch.dtype | None = None


if TYPE_CHECKING:

    class StoredOfLayer(Stored):
        """The same of a linear layer's parameter: there is a format, and what that format reads is not None."""

        format: StorageFormat
        scale: "LayerParameter"
        zero: "LayerParameter | None"

    class LayerParameter(nn.Parameter):
        """An nn.Parameter of `make_parameter`, with the attributes that it gets there."""

        shards: dict
        weight_loader: WeightLoader
        stored: StoredOfLayer

else:
    LayerParameter = nn.Parameter


def stored(parameter: Any) -> Stored:
    """A parameter's, which it gets here if it was not made by `make_parameter`."""
    return vars(parameter).setdefault("stored", Stored())


def make_parameter(
    shape: tuple[int, ...],
    shards: Shards,
    weight_loader: WeightLoader,
    format: StorageFormat | None = None,
    dtype: torch.dtype | None = None,
    **fields: Any,
) -> LayerParameter:
    """An uninitialised parameter with what the loader asks it for.

    Args:
        shape: this rank's part.
        shards: the checkpoint tensors that make it up: {shard id: full shape}; {} if it comes with another parameter.
        weight_loader: `weight_loader(param, loaded, shard_id)` copies this rank's part of one of them. `loaded` is a
            tensor, or a safetensors slice, of which only that part is read.
        dtype: torch's default by default.
        format, fields: those of `Stored`.
    """
    parameter: Any = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    parameter.shards, parameter.weight_loader, parameter.stored = shards, weight_loader, Stored(format, **fields)
    return parameter


class Packing(ABC):
    """How a checkpoint stores numbers `[N, M]`, if in another layout."""

    @abstractmethod
    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""

    @abstractmethod
    def read(self, content: Sliceable, rows: slice, columns: slice) -> Tensor:
        """These rows and columns. content: the checkpoint's tensor, or a safetensors slice."""


class Unpacking:
    """A checkpoint's tensor that is read in slices: rows, or columns of all rows, as its parameter's packing says."""

    def __init__(self, content: Sliceable, packing: Packing, shape: tuple[int, int]):
        self._content, self._packing, self._shape = content, packing, shape

    def __getitem__(self, index: slice | tuple[slice, slice]) -> Tensor:
        indices = index if isinstance(index, tuple) else (index, slice(None))
        ranges = (each.indices(size) for each, size in zip(indices, self._shape, strict=True))
        return self._packing.read(self._content, *(slice(start, stop) for start, stop, _ in ranges))


def scale_while_loading(modules: Iterable[nn.Module], factor: float) -> None:
    """Have the loader multiply what it loads into these modules by a factor, biases included, in float32 and rounded
    once. Of a weight that is stored with scales, these are multiplied. Raises ValueError if the scales are powers of
    two."""
    if factor == 1:
        return
    for module in modules:
        weights = [parameter for name, parameter in module.named_parameters() if "weight" in name]
        if not any(stored(parameter).takes_factor for parameter in weights):
            raise ValueError(
                f"the checkpoint's weights cannot be multiplied by {factor}; use the unquantized checkpoint"
            )
        for parameter in module.parameters():
            if stored(parameter).takes_factor:
                stored(parameter).loading_factor = factor


def load_rows(
    parameter: "LayerParameter", row: int, loaded: Sliceable, start: int, num_rows: int, expert: int | None = None
) -> None:
    """Write num_rows rows of `loaded`, from `start` on, to a parameter's rows from `row` on. Rows are a weight's, also
    where the parameter holds scales, of which one may stand for many."""
    unit = parameter.stored.rows_of_weight
    values = loaded[start // unit : (start + num_rows) // unit]
    parameter.stored.format.store(parameter, values, row // unit, expert)
