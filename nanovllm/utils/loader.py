"""Weights of the plain model: a loop over all tensors of a checkpoint. (`models.loader` is the fast decoder's.)"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

_FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MAX_NAMED = 5


class _Wanted(NamedTuple):
    """What one tensor of a checkpoint fills."""

    param: Any  # nn.Parameter
    shard_id: Any  # for the parameter's weight_loader; None: there is none
    shape: tuple[int, ...]  # on all ranks together


def default_weight_loader(param: nn.Parameter, loaded_weight: torch.Tensor) -> None:
    """Of a parameter without a weight_loader of its own: copy all of it."""
    param.data.copy_(loaded_weight)


def load_model(model: nn.Module, path: str) -> None:
    """Fill every parameter from all *.safetensors files of a directory.

    model: its `packed_modules_mapping` says which of the checkpoint's modules are parts of one of ours: {theirs: (ours,
    shard id)}. A parameter may have a `weight_loader(param, loaded_weight)`, with the shard id as third argument for a
    part.

    Raises FileNotFoundError if there is no such file, and ValueError, naming the tensor and its file, for a damaged
    file, and for a tensor that is missing, unknown, there twice, or of a wrong shape or dtype. Parameters may have
    been changed then.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path}: holds no *.safetensors file")
    wanted, place = _wanted(model), dict[str, str]()  # the file of each tensor
    for file in files:
        try:
            with safe_open(file, "pt", "cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a dict)
                    if name in place:
                        raise ValueError(f"{file}: tensor {name!r} is in {place[name]} as well")
                    place[name] = file.name
                    _load(wanted, name, tensors.get_tensor(name), file)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: damaged or truncated safetensors file ({error}): download it again") from error
    filled = {(id(wanted[name].param), wanted[name].shard_id) for name in place}
    missing = [name for name, each in wanted.items() if (id(each.param), each.shard_id) not in filled]
    if missing:
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise ValueError(f"{path}: the checkpoint lacks {', '.join(map(repr, missing[:_MAX_NAMED]))}{more}")


def _load(wanted: dict[str, _Wanted], name: str, tensor: torch.Tensor, file: Path) -> None:
    if name not in wanted:
        raise ValueError(f"{file}: the model has no tensor {name!r}; is config.json the same model's?")
    param, shard_id, shape = wanted[name]
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{file}: tensor {name!r} has shape {list(tensor.shape)}, the model needs {list(shape)}")
    if tensor.dtype not in _FLOATS:
        raise ValueError(f"{file}: tensor {name!r} has dtype {tensor.dtype}: must be a float of 16 bits or more")
    weight_loader = getattr(param, "weight_loader", default_weight_loader)
    args = (param, tensor) if shard_id is None else (param, tensor, shard_id)
    weight_loader(*args)


def _wanted(model: nn.Module) -> dict[str, _Wanted]:
    """What each tensor of a checkpoint fills, by its name there."""
    parts: dict[str, list[tuple[str, Any]]] = {}  # our module -> its parts in the checkpoint
    for theirs, (ours, shard_id) in getattr(model, "packed_modules_mapping", {}).items():
        parts.setdefault(ours, []).append((theirs, shard_id))
    wanted = {}
    for name, param in model.named_parameters(remove_duplicate=False):  # Two modules may share one.
        shapes = getattr(param, "shards", {None: tuple(param.shape)})
        *parents, module, kind = ("", *name.split("."))[-len(name.split(".")) - 1 :]
        for theirs, shard_id in parts.get(module, [(module, None)]):
            wanted[".".join((*parents, theirs, kind)).lstrip(".")] = _Wanted(param, shard_id, tuple(shapes[shard_id]))
    return wanted
