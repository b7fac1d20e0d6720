"""Parts in Parquet: one schema for all parts of a job."""

from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.jobs.columns import column_name
from nanovllm.jobs.inputs import Inputs, Scan, open_file, require_pyarrow
from nanovllm.jobs.lines import Answered, from_json
from nanovllm.jobs.task import Task
from nanovllm.utils.file_errors import names_file
from nanovllm.utils.text_json import to_json

if TYPE_CHECKING:
    import pyarrow as pa


class ParquetFormat:
    """The schema: what an answer has, and the columns of the input.

    A column of numbers, truth values or texts of a Parquet input keeps its type. Any other becomes text, which for a
    value that is none is its JSON.
    """

    def __init__(self, inputs: Inputs, task: Task, found: Scan):
        """Raises ImportError without pyarrow."""
        require_pyarrow()
        import pyarrow as pa

        kept = _plain_types(inputs) if inputs.are_parquet else {}
        columns, line_format = task.columns(), task.line_format
        if found.ids_are_integers:
            columns["id"] = pa.int64()
        for name in filter(line_format.copies, found.columns):
            columns[column_name(name, found.columns, line_format.added_keys)] = kept.get(name, pa.string())
        columns |= task.last_columns()
        self._vectors = {name: kind for name, kind in columns.items() if isinstance(kind, np.dtype)}
        self._schema = pa.schema({name: kind for name, kind in columns.items() if name not in self._vectors})
        self._texts = {name for name, kind in columns.items() if kind == pa.string()}

    def write(self, rows: Path, path: Path) -> None:
        """Write a Parquet file. rows: a file with its rows in JSON lines."""
        import pyarrow as pa
        from pyarrow.parquet import write_table

        with names_file(rows), open(rows, "rb") as file:
            typed = [self._as_typed(from_json(raw)) for raw in file]
        table = pa.Table.from_pylist(typed, self._schema)
        for name, kind in self._vectors.items():
            table = table.append_column(name, _fixed_size_lists([row[name] for row in typed], kind))
        with open(path, "wb") as file:
            write_table(table, file)

    def _as_typed(self, row: dict[str, Any]) -> dict[str, Any]:
        return {name: as_text(value) if name in self._texts else value for name, value in row.items()}


def _fixed_size_lists(packed: list[str], kind: np.dtype) -> "pa.Array":
    """packed: `packed` vectors, all of one size."""
    import pyarrow as pa

    numbers = np.frombuffer(b"".join(map(b64decode, packed)), kind)
    return pa.FixedSizeListArray.from_arrays(pa.array(numbers), len(numbers) // len(packed))


def as_text(value: Any) -> str | None:
    """A value in a column of texts. Half of a surrogate pair, which Parquet cannot hold, becomes a question mark."""
    if value is None:
        return None
    text = value if isinstance(value, str) else to_json(value)
    return text.encode("utf-8", "replace").decode()


def _plain_types(inputs: Inputs) -> dict[str, Any]:
    """Types of the plain columns, which do not differ between files."""
    from pyarrow import types
    from pyarrow.parquet import read_schema

    are_plain = (types.is_string, types.is_integer, types.is_boolean, types.is_float32, types.is_float64)
    found: dict[str, set[Any]] = {}
    for path in inputs.paths:
        with open_file(path) as file:
            for column in read_schema(file):
                found.setdefault(column.name, set()).add(column.type)
    kept = {name: next(iter(kinds)) for name, kinds in found.items() if len(kinds) == 1}
    return {name: kind for name, kind in kept.items() if any(is_plain(kind) for is_plain in are_plain)}


def read_parquet_answers(path: Path) -> Iterator[Answered]:
    """Raises ValueError if the part is damaged."""
    require_pyarrow()
    from pyarrow.parquet import ParquetFile

    try:
        with names_file(path), open(path, "rb") as file, ParquetFile(file) as rows:
            for batch in rows.iter_batches(columns=list(Answered._fields)):
                yield from (Answered(**row) for row in batch.to_pylist())
    except (OSError, TypeError, ValueError) as error:
        if getattr(error, "errno", None) is not None:  # The disk's, and none of pyarrow's.
            raise
        raise ValueError(f"{path}: is damaged: {error}") from error


def join_parquet(parts: list[Path], path: Path) -> None:
    """Write the rows of all parts, which have one schema, to one file."""
    from pyarrow.parquet import ParquetFile, ParquetWriter, read_schema

    with open(path, "wb") as file, ParquetWriter(file, read_schema(parts[0])) as joined:
        for part in parts:
            with names_file(part), open(part, "rb") as source, ParquetFile(source) as rows:
                for group in range(rows.num_row_groups):
                    table = rows.read_row_group(group)
                    with names_file(path):
                        joined.write_table(table)
