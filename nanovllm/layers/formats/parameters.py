"""Parameters of layers that are split over ranks: each knows how it is loaded, and in which format it is stored."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.formats.quantization import BLOCK, E4M3, Fp8Weight, Weight, get_weight_format


def make_parameter(
    shape: tuple[int, ...], shards: dict, weight_loader: Any, dtype: torch.dtype | None = None
) -> nn.Parameter:
    """An uninitialised parameter with what the loader asks it for.

    Args:
        shape: this rank's part.
        shards: the checkpoint tensors that make it up: {shard id: full shape}; {} if it comes with another parameter.
        weight_loader: `weight_loader(param, loaded, shard_id)` copies this rank's part of one of them. `loaded` is a
            tensor, or a safetensors slice, of which only that part is read.
        dtype: torch's default by default.
    """
    parameter: Any = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    parameter.shards, parameter.weight_loader = shards, weight_loader
    parameter.format = parameter.scale = None  # of a weight in fp8
    parameter.rows_of_weight = 1  # that one row stands for
    return parameter


def make_weight(shape: tuple[int, ...], shards: dict, weight_loader: Any) -> tuple[nn.Parameter, nn.Parameter | None]:
    """A weight `[..., N, K]` in the format of the `weight_format` block around the call, and its scales if it has
    any."""
    format = get_weight_format()
    if format is None:
        return make_parameter(shape, shards, weight_loader), None
    scale_shards = {key: format.scale_shape(full) for key, full in shards.items()} if format.is_stored else {}
    scale: Any = make_parameter(format.scale_shape(shape), scale_shards, weight_loader, torch.float32)
    scale.checkpoint_name = format.scale_name
    scale.rows_of_weight = BLOCK if format.is_blocked else 1
    weight: Any = make_parameter(shape, shards, weight_loader, E4M3)
    weight.format, weight.scale, weight.input_dtype = format, scale, torch.get_default_dtype()
    return weight, scale


def scale_while_loading(modules: Iterable[nn.Module], factor: float) -> None:
    """Have the loader multiply what it loads into these modules by a factor, biases included, in float32 and rounded
    once. Of a weight that is stored in fp8, its scales are multiplied."""
    if factor == 1:
        return
    for module in modules:
        for parameter in module.parameters():
            format = getattr(parameter, "format", None)
            if format is None or not format.is_stored:
                parameter.loading_factor = factor  # type: ignore[attr-defined]


def as_weight(parameter: Any) -> Weight:
    """A parameter of `make_weight`, as products take it."""
    if parameter.format is None:
        return parameter
    return Fp8Weight(parameter, parameter.scale, parameter.format, parameter.input_dtype)


def load_rows(parameter: Any, row: int, loaded: Any, start: int, num_rows: int, expert: int | None = None) -> None:
    """Write num_rows rows of `loaded`, from `start` on, to a parameter's rows from `row` on. Rows are a weight's, also
    where the parameter holds scales, of which one may stand for many."""
    unit = parameter.rows_of_weight
    store(parameter, loaded[start // unit : (start + num_rows) // unit], row // unit, expert)


def store(parameter: Any, values: Tensor, row: int = 0, expert: int | None = None) -> None:
    """Write rows to a parameter, or to one expert's part of it, from `row` on. A weight in fp8 quantizes values of any
    other dtype."""
    if parameter.format is not None and values.dtype != E4M3:
        values, scale = parameter.format.quantize(values.to(parameter.device))
        store(parameter.scale, scale, row // parameter.scale.rows_of_weight, expert)
    target = parameter.data if expert is None else parameter.data[expert]
    target[row : row + len(values)].copy_(values)
