"""The table of measured choices: which candidate computes a product, with which constants.

A table is a JSON file for one GPU. A row belongs to a `Key`. It maps numbers of tokens to candidates in order of
preference, each with its constants. A key of `tokens` is the largest number that it is for; the last key is for all
larger numbers too. Other numbers are settings. The code that reads a setting explains it. What a GPU's file lacks is
taken from the H200's.
"""

import json
import math
import os
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.matmul.row import Row
from nanovllm.utils.optional_packages import kernel_cache

_TABLES = Path(__file__).parent / "tables"
_DEFAULT_GPU = "NVIDIA H200"  # Its table is under those of all other GPUs.
_SETTINGS_ON_CPUS = ("flash_attn4", "decode_attention")  # The others are about products.
_SAME_SPEED = {"float16": "bfloat16"}


def speed_name(dtype: torch.dtype | str) -> str:
    """What the table calls a dtype: dtypes of equal speed share a name."""
    name = str(dtype).removeprefix("torch.")
    return _SAME_SPEED.get(name, name)


class KeyedWeight(Protocol):
    """What a key says of a `Weight`."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def table_name(self) -> str: ...


class Key(NamedTuple):
    """What a product is, apart from its tensors and their number of tokens: what a row of the table is for."""

    operation: str  # one of `problem.OPERATIONS`
    phase: str  # "decode" or "prefill"
    N: int
    K: int  # of a weight [N, K]
    format: str  # the weight's `table_name`
    experts: int = 1  # which have such a weight each

    @classmethod
    def of(cls, operation: str, is_prefill: bool, weight: KeyedWeight) -> "Key":
        """weight: a `Weight` `[N, K]` or `[num_experts, N, K]`."""
        *experts, N, K = weight.shape
        return cls(operation, "prefill" if is_prefill else "decode", N, K, weight.table_name, *experts)

    @property
    def shape_name(self) -> str:
        """The name of its weight's shape, in settings: "12288x2048 bfloat16", with experts "128x1536x2048 bfloat16"."""
        experts = f"{self.experts}x" if self.experts > 1 else ""
        return f"{experts}{self.N}x{self.K} {self.format}"

    def with_shape(self, name: str) -> "Key":
        """This key with the shape and the format of a `shape_name`."""
        sizes, format = name.split(" ")
        *experts, N, K = map(int, sizes.split("x"))
        return self._replace(N=N, K=K, format=format, experts=experts[0] if experts else 1)


class Choice(NamedTuple):
    """A candidate's name, and its constants, in the order that it defines."""

    candidate: str
    constants: tuple = ()


class Table:
    """The rows of one GPU, and other measured numbers."""

    def __init__(
        self,
        rows: Mapping[Key, Row[Choice]] | None = None,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        versions: Mapping[str, str] | None = None,
    ):
        """settings: {name: {key: value}}. versions: of the packages with which they were measured."""
        self.rows = dict(rows or {})
        self.settings = dict(settings or {})
        self.versions = dict(versions or {})

    def find(self, key: Key) -> Row[Choice] | None:
        """The row of this key, otherwise of the nearest shape; None if this operation has none in this phase. A
        linear_sum reads what a linear_add does, so it may have that one's row."""
        found = nearest(key, self.rows)
        if found is None and key.operation == "linear_sum":
            found = nearest(key._replace(operation="linear_add"), self.rows)
        return None if found is None else self.rows[found]

    def setting(self, name: str, key: str) -> Any:
        """Raises KeyError if the table does not have it."""
        return self.settings[name][key]

    def updated(self, other: "Table") -> "Table":
        """This table with the other's rows and the keys of its settings, which take precedence."""
        settings = {
            name: {**self.settings.get(name, {}), **other.settings.get(name, {})}
            for name in self.settings | other.settings
        }
        return Table(self.rows | other.rows, settings, self.versions | other.versions)


def nearest(key: Key, others: Collection[Key]) -> Key | None:
    """The key itself if it is among the others, else the one with the nearest shape of those that differ by nothing
    else; None if there is none."""
    if key in others:
        return key

    def distance(other: Key) -> float:
        sizes = zip((key.N, key.K, key.experts), (other.N, other.K, other.experts), strict=True)
        return sum(abs(math.log2(size / other_size)) for size, other_size in sizes)

    alike = (each for each in others if each[:2] == key[:2] and each.format == key.format)
    return min(alike, key=distance, default=None)


def load_table(device: torch.device) -> Table:
    """The package's table for this GPU, updated with the user's own from `nanovllm tune`. A CPU has no rows."""
    if device.type != "cuda":
        return Table(settings={name: package_table(_DEFAULT_GPU).settings[name] for name in _SETTINGS_ON_CPUS})
    gpu = GpuFacts.of(device).name
    table = package_table(gpu)
    path = user_path(gpu)
    return table.updated(read_table(path)) if path.is_file() else table


@cache
def package_table(gpu: str) -> Table:
    """The default GPU's table with this GPU's rows and settings, if it has any. gpu: `GpuFacts.name`."""
    path = package_path(gpu)
    if gpu == _DEFAULT_GPU:
        return read_table(path)
    table = package_table(_DEFAULT_GPU)
    return table.updated(read_table(path)) if path.is_file() else table


def package_path(gpu: str) -> Path:
    return _TABLES / f"{gpu.replace(' ', '_')}.json"


def user_path(gpu: str) -> Path:
    return Path(kernel_cache("tuned"), package_path(gpu).name)


def read_table(path: Path) -> Table:
    """Raises ValueError, naming the file, if it is no table."""
    try:
        content = json.loads(path.read_text())
        rows = {}
        for row in content["rows"]:
            if "dtype" in row:
                raise ValueError("an older release wrote it; remove it, and run the command again")
            key = Key(**{field: row[field] for field in Key._fields if field in row})
            rows[key] = Row({int(bound): map(choice_of, choices) for bound, choices in row["tokens"].items()})
            if not rows[key].bounds:
                raise ValueError(f"no tokens in the row of {key}")
        return Table(rows, content.get("settings"), content.get("versions"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no table of `nanovllm tune`: {type(error).__name__}: {error}") from error


def choice_of(items: list) -> Choice:
    """Read a JSON list of a name and constants. Raises ValueError."""
    if not isinstance(items, list) or not items or not isinstance(items[0], str):
        raise ValueError(f"a choice must be a list of a candidate's name and its constants, not {items!r}")
    name, *constants = items
    return Choice(name, _tuple(constants))


def _tuple(values: Iterable) -> tuple:
    """Also of the lists within."""
    return tuple(_tuple(value) if isinstance(value, list) else value for value in values)


def listed(choice: Choice) -> list:
    """What `choice_of` reads."""
    return [choice.candidate, *choice.constants]


def write_table(path: Path, gpu: str, table: Table) -> None:
    """Write one line for each row, and for each key of a setting. A reader, or a run that is killed, finds the old
    table or the new one."""
    rows = []
    for key, row in sorted(table.rows.items()):
        tokens = {
            str(bound): list(map(listed, choices)) for bound, choices in zip(row.bounds, row.choices, strict=True)
        }
        fields = {name: value for name, value in key._asdict().items() if value != Key._field_defaults.get(name)}
        rows.append(json.dumps({**fields, "tokens": tokens}))
    settings = []
    for name, values in table.settings.items():
        entries = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items())
        settings.append(f"{json.dumps(name)}: {{\n{entries}}}")
    lines = [
        "{",
        f'"gpu": {json.dumps(gpu)},',
        f'"versions": {json.dumps(table.versions)},',
        '"settings": {',
        ",\n".join(settings),
        "},",
        '"rows": [',
        ",\n".join(rows),
        "]",
        "}",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text("\n".join(lines) + "\n")
    temporary.replace(path)
