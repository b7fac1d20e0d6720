"""Parameters of layers that are split over ranks: each knows how it is loaded, and in which format it is stored."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from nanovllm.layers.formats.format import WeightFormat

FLOATS = ("BF16", "F16", "F32", "F64")  # safetensors' names


def make_parameter(
    shape: tuple[int, ...],
    shards: dict,
    weight_loader: Any,
    format: "WeightFormat | None" = None,
    dtype: torch.dtype | None = None,
    **attributes: Any,
) -> nn.Parameter:
    """An uninitialised parameter with what the loader asks it for.

    Args:
        shape: this rank's part.
        shards: the checkpoint tensors that make it up: {shard id: full shape}; {} if it comes with another parameter.
        weight_loader: `weight_loader(param, loaded, shard_id)` copies this rank's part of one of them. `loaded` is a
            tensor, or a safetensors slice, of which only that part is read.
        format: of a weight, or of what belongs to it.
        dtype: torch's default by default.
        attributes: others than these:
            rows_of_weight (1): how many rows of the weight one row stands for.
            checkpoint_name (its own): its last name in the checkpoint.
            stored_dtypes (floats): safetensors' names of what the checkpoint may hold.
            packing (None): how the checkpoint stores it, if in another layout than shards says.
            check (None): a function of the checkpoint's tensor and a shard id, which returns what is wrong or None.
            numbers_each (1): of the model, in each number of a tensor of the checkpoint.
            is_scale (False): whether it belongs to a weight, and must hold what the format's `are_scales` says.
            is_one_number (False): whether a tensor of the checkpoint is one number, for all of its shard.
            takes_factor (True): whether `scale_while_loading` multiplies it.
    """
    parameter: Any = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    defaults: dict[str, Any] = {"rows_of_weight": 1, "stored_dtypes": FLOATS, "takes_factor": True, "numbers_each": 1}
    defaults |= {"packing": None, "check": None}
    defaults |= {"is_scale": False, "is_one_number": False}
    vars(parameter).update(defaults | attributes, shards=shards, weight_loader=weight_loader, format=format)
    return parameter


class Packing(ABC):
    """How a checkpoint stores numbers `[N, M]`, if in another layout."""

    @abstractmethod
    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""

    @abstractmethod
    def read(self, content: Any, rows: slice, columns: slice) -> Tensor:
        """These rows and columns. content: the checkpoint's tensor, or a safetensors slice."""


class Unpacking:
    """A checkpoint's tensor that is read in slices: rows, or columns of all rows, as its parameter's packing says."""

    def __init__(self, content: Any, packing: Packing, shape: tuple[int, int]):
        self._content, self._packing, self._shape = content, packing, shape

    def __getitem__(self, index: Any) -> Tensor:
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
        if not any(getattr(parameter, "takes_factor", True) for parameter in weights):
            raise ValueError(
                f"the checkpoint's weights cannot be multiplied by {factor}; use the unquantized checkpoint"
            )
        for parameter in module.parameters():
            if getattr(parameter, "takes_factor", True):
                parameter.loading_factor = factor  # type: ignore[attr-defined]


def load_rows(parameter: Any, row: int, loaded: Any, start: int, num_rows: int, expert: int | None = None) -> None:
    """Write num_rows rows of `loaded`, from `start` on, to a parameter's rows from `row` on. Rows are a weight's, also
    where the parameter holds scales, of which one may stand for many."""
    unit = parameter.rows_of_weight
    values = loaded[start // unit : (start + num_rows) // unit]
    parameter.format.store(parameter, values, row // unit, expert)
