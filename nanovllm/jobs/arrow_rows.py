"""Rows of Arrow's tables as rows of JSON lines would be."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nanovllm.openai_format.request_names import Row

if TYPE_CHECKING:
    import pyarrow as pa

_Change = Callable[[Any], Any] | None  # of a column's values; None leaves them as they are


def arrow_rows(table: "pa.RecordBatch | pa.Table") -> list[Row]:
    """The rows of a table. A map is a dict. A struct lacks the keys whose value is null: a column has one struct for
    all rows, so that each row has the keys of all others."""
    rows = table.to_pylist()
    changes = {column.name: _change(column.type) for column in table.schema}
    for name, change in changes.items():
        if change is not None:
            for row in rows:
                row[name] = change(row[name])
    return rows


def _change(kind: "pa.DataType") -> _Change:
    from pyarrow import types

    if types.is_map(kind):
        return _of_map(_change(kind.item_type))
    if types.is_struct(kind):
        return _of_struct({field.name: _change(field.type) for field in kind})
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        change = _change(kind.value_type)
        return None if change is None else lambda values: None if values is None else list(map(change, values))
    return None


def _of_map(change: _Change) -> Callable[[Any], Any]:
    def apply(pairs: Any) -> Any:
        values = None if pairs is None else dict(pairs)
        return values if values is None or change is None else {name: change(each) for name, each in values.items()}

    return apply


def _of_struct(changes: dict[str, _Change]) -> Callable[[Any], Any]:
    def apply(values: Any) -> Any:
        if values is None:
            return None
        given = {name: value for name, value in values.items() if value is not None}
        for name, value in given.items():
            if (change := changes[name]) is not None:
                given[name] = change(value)
        return given

    return apply
