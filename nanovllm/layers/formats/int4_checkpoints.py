"""Checkpoints in int4: those of compressed-tensors (llm-compressor), AutoAWQ, and AutoGPTQ or GPTQModel.

Eight integers of four bits are an int32. The formats differ in the dimension along which these eight lie and in their
order, and two of them store weights transposed.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from nanovllm.kernels.matmul.four_bit import UNIT
from nanovllm.layers.formats.compressed_tensors import only_group
from nanovllm.layers.formats.format import Settings, WeightFormat
from nanovllm.layers.formats.int4 import ZERO, Int4
from nanovllm.layers.formats.parameters import (
    Check,
    LayerParameter,
    Packing,
    Shards,
    Sliceable,
    WeightLoader,
    make_parameter,
)
from nanovllm.utils.checks import quoted

_PER_INT32 = 8
_ZEROS = 0x88888888 - 2**32  # an int32 of eight `ZERO`
_ZEROS_LESS_ONE = 0x77777777
_INTEGERS = ("I32", "I64")


@dataclass(frozen=True)
class Int32s(Packing):
    """Integers 0..15 `[N, M]`, eight in an int32.

    Attributes:
        transposed: whether the checkpoint's tensor is `[M, N]`.
        dim: of the checkpoint's tensor, along which eight lie; None for numbers that are not packed.
        order: which of eight each four bits hold, from the lowest.
        are_less_one: whether each of eight is stored less one. These are differences of int32s: a zero borrows from the
            next number.
    """

    transposed: bool = False
    dim: int | None = 1
    order: tuple[int, ...] = tuple(range(_PER_INT32))
    are_less_one: bool = False

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        sizes = list(reversed(shape) if self.transposed else shape)
        if self.dim is not None:
            sizes[self.dim] = -(-sizes[self.dim] // _PER_INT32)
        return tuple(sizes)

    def read(self, content: Sliceable, rows: slice, columns: slice) -> Tensor:
        index = [columns, rows] if self.transposed else [rows, columns]
        if self.dim is None:
            found = content[tuple(index)]
        else:
            wanted = index[self.dim]
            first = wanted.start // _PER_INT32
            index[self.dim] = slice(first, -(-wanted.stop // _PER_INT32))
            found = self._unpacked(content[tuple(index)], self.dim)
            found = found.narrow(self.dim, wanted.start - first * _PER_INT32, wanted.stop - wanted.start)
        return found.t() if self.transposed else found

    def _unpacked(self, packed: Tensor, dim: int) -> Tensor:
        """One uint8 for each number: dim becomes eight times as long."""
        packed = packed + 0x11111111 if self.are_less_one else packed
        pairs = packed.contiguous().view(torch.uint8).unflatten(1, (-1, 4))  # the lowest first
        places = torch.stack((pairs & 15, pairs >> 4), dim=3).flatten(2)  # [., ., 8], from the lowest bits on
        numbers = places[:, :, [self.order.index(i) for i in range(_PER_INT32)]]
        return numbers.flatten(1) if dim == 1 else numbers.transpose(1, 2).flatten(0, 1)


_FLOATS = Int32s(dim=None)


@dataclass(frozen=True)
class StoredInt4(Int4):
    """Weights that a checkpoint has in int4.

    Attributes:
        group: columns that share a scale; None for whole rows.
        has_zeros: whether groups have zeros of their own.
    """

    names: ClassVar[tuple[str, str, str]]  # of values, scales and zeros in the checkpoint
    packings: ClassVar[tuple[Int32s, Int32s, Int32s]]

    group: int | None = 128
    has_zeros: bool = False

    @property
    def is_stored(self) -> bool:
        return True

    @property
    def unit(self) -> int:
        return self.group or UNIT

    @property
    def bits(self) -> float:
        return 4 + (24 if self.has_zeros else 16) / self.group if self.group else 4

    def are_scales(self, scales: Tensor) -> bool:
        return not scales.is_floating_point() or super().are_scales(scales)

    def parameters(
        self, shape: tuple[int, ...], shards: Shards, weight_loader: WeightLoader
    ) -> dict[str, LayerParameter]:
        *rows, K = shape
        names = zip(self.names, self.packings, strict=True)
        values, scale, zero = (dict[str, Any]({"checkpoint_name": name, "packing": packing}) for name, packing in names)
        of_groups = {key: (N, columns // (self.group or columns)) for key, (N, columns) in shards.items()}
        groups = (*rows, K // (self.group or K))
        scales = make_parameter(groups, of_groups, weight_loader, self, None, is_scale=True, **scale)
        integers: dict[str, Any] = {"stored_dtypes": _INTEGERS, "takes_factor": False}
        found = {"weight_scale": scales}
        options: dict[str, Any] = {"scale": scales, "input_dtype": scales.dtype}
        if self.has_zeros:
            zero |= integers
            found["weight_zero"] = make_parameter(
                groups, of_groups, weight_loader, self, torch.uint8, is_scale=True, **zero
            )
            options["zero"] = found["weight_zero"]
        options |= values | integers | {"numbers_each": _PER_INT32}
        weight = make_parameter((*rows, K // 2), shards, weight_loader, self, torch.uint8, **options)
        for name, (check_shards, check) in self.checks(shards).items():
            options = integers | {"checkpoint_name": name, "is_scale": True, "check": check}
            # Of no size: it is read to be checked.
            empty = (*rows[:-1], 0)
            found[f"weight_{name}"] = make_parameter(empty, check_shards, _keep_nothing, self, torch.uint8, **options)
        return {"weight": weight, **found}

    def checks(self, shards: Shards) -> dict[str, tuple[Shards, Check]]:
        """Further tensors of a weight, by their names in the checkpoint: their shards, and a function of such a tensor
        and a shard's id that says what is wrong with it, or None. shards: the weight's."""
        return {}


def _keep_nothing(param: nn.Parameter, loaded: Sliceable, shard_id: object = None) -> None:
    pass


class CompressedInt4(StoredInt4):
    """compressed-tensors' pack-quantized."""

    names = ("weight_packed", "weight_scale", "weight_zero_point")
    packings = (Int32s(), _FLOATS, Int32s(dim=0))

    @classmethod
    def declared(cls, method: str, settings: Settings) -> "WeightFormat | None":
        group = only_group(method, settings)
        if group is None or "pack-quantized" not in (group.get("format"), settings.get("format")):
            return None
        weights = group.get("weights") or {}
        if group.get("input_activations"):
            return None
        if weights.get("type") != "int" or weights.get("dynamic"):
            return None
        _require("num_bits", weights.get("num_bits"), (4,))
        strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "channel")
        _require("strategy", strategy, ("group", "channel"))
        _require("actorder", weights.get("actorder"), (None, False, "static", "weight"))
        size = _group_size(weights.get("group_size")) if strategy == "group" else None
        return cls(size, not weights.get("symmetric", True))

    def checks(self, shards: Shards) -> dict[str, tuple[Shards, Check]]:
        def shape_fault(found: Tensor, shard_id: Hashable) -> str | None:
            needed = list(shards[shard_id])
            return None if found.tolist() == needed else f"is {found.tolist()}, and the model needs {needed}"

        return {"weight_shape": (dict.fromkeys(shards, (2,)), shape_fault)}

    def says_nothing(self, name: str, found: Tensor) -> bool:
        """Symmetric weights have no zeros, but some checkpoints hold them: all 0, as plain integers or packed, each
        with 8 added."""
        if name != self.names[2] or self.has_zeros:
            return False
        if not ((found == 0).all() or (found == _ZEROS).all()):
            raise ValueError("must hold zeros alone, for config.json says symmetric")
        return True


class AwqInt4(StoredInt4):
    """AutoAWQ's version "gemm"."""

    names = ("qweight", "scales", "qzeros")
    packings = (
        Int32s(transposed=True, order=(0, 2, 4, 6, 1, 3, 5, 7)),
        Int32s(transposed=True, dim=None),
        Int32s(transposed=True, order=(0, 2, 4, 6, 1, 3, 5, 7)),
    )

    @classmethod
    def declared(cls, method: str, settings: Settings) -> "WeightFormat | None":
        if method != "awq":
            return None
        _require("bits", settings.get("bits", settings.get("w_bit")), (4,))
        names = ("version", "checkpoint_format", "format")
        version = next((settings[name] for name in names if settings.get(name)), "gemm")
        _require("version", str(version).lower(), ("gemm",))
        _require("zero_point", settings.get("zero_point", True), (True,))
        return cls(_group_size(settings.get("group_size", settings.get("q_group_size", 128))), True)


class GptqInt4(StoredInt4):
    """AutoGPTQ's and GPTQModel's, whose zeros are stored less one."""

    names = ("qweight", "scales", "qzeros")
    packings = (
        Int32s(transposed=True, dim=0),
        Int32s(transposed=True, dim=None),
        Int32s(transposed=True, are_less_one=True),
    )

    @classmethod
    def declared(cls, method: str, settings: Settings) -> "WeightFormat | None":
        if method != "gptq":
            return None
        _require("bits", settings.get("bits"), (4,))
        version = settings.get("checkpoint_format") or settings.get("format") or "gptq"
        _require("checkpoint_format", version, ("gptq", "gptq_v2"))
        _require("lm_head", settings.get("lm_head", False), (False,))
        # Names of modules that are left out begin with "-:", and others have settings of their own.
        others = [name for name in settings.get("dynamic") or () if not str(name).startswith("-:")]
        _require("dynamic", others, ([],))
        found = GptqInt4 if version == "gptq" else Gptq2Int4
        return found(_group_size(settings.get("group_size", -1)), not settings.get("sym", True))

    def checks(self, shards: Shards) -> dict[str, tuple[Shards, Check]]:
        def order_fault(found: Tensor, shard_id: Hashable) -> str | None:
            columns = torch.arange(len(found))
            if torch.equal(found.long(), columns // (self.group or len(found))):
                return None
            return (
                "groups columns that are not side by side (desc_act), which is not supported; use a checkpoint that "
                "was made with desc_act=False, or the unquantized one with quantization='int4'"
            )

        def zero_fault(found: Tensor, shard_id: Hashable) -> str | None:
            # Of symmetric weights all are 8. Some tools store them so, whichever version config.json names.
            if (found == _ZEROS).all() or (found == _ZEROS_LESS_ONE).all():
                return None
            return f"must hold zeros of {ZERO}, for config.json says sym"

        found: dict[str, tuple[Shards, Check]] = {"g_idx": ({key: (K,) for key, (_, K) in shards.items()}, order_fault)}
        if not self.has_zeros:
            of_groups = {key: (N, K // (self.group or K)) for key, (N, K) in shards.items()}
            found["qzeros"] = ({key: self.packings[2].shape(each) for key, each in of_groups.items()}, zero_fault)
        return found


class Gptq2Int4(GptqInt4):
    """The same with zeros as they are: checkpoint_format "gptq_v2"."""

    packings = (*GptqInt4.packings[:2], Int32s(transposed=True))


def _require(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        names = " or ".join(map(repr, allowed))
        raise ValueError(
            f"{name}={quoted(value)}: must be {names}; use the unquantized checkpoint with quantization='int4'"
        )


def _group_size(value: Any) -> int | None:
    if value in (-1, None):
        return None
    is_right = isinstance(value, int) and value >= UNIT and value & (value - 1) == 0
    if not is_right:
        raise ValueError(
            f"group_size={quoted(value)}: must be -1, or {UNIT}, {2 * UNIT}, {4 * UNIT} or a larger power of two; "
            "use the unquantized checkpoint with quantization='int4'"
        )
    return value
