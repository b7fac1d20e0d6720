"""Corrected lines: an error repeats the line that failed, so that it can be changed and given again.

A job's folder keeps them in a file of their own, and they stand for the lines of the input with their ids, also when
the job is interrupted and goes on.
"""

import os
from typing import Any

import numpy as np

from nanovllm.jobs.folder import CORRECTED, JobFolder
from nanovllm.jobs.inputs import Inputs, RawLine, Scan, find_files, hash_id
from nanovllm.jobs.lines import LineId, Row
from nanovllm.openai_format.openai_batch import is_request
from nanovllm.utils.text_json import to_json

_ERROR_KEYS = {"id", "file", "line", "error", "row"}


class Corrections:
    """The corrected lines of a job.

    Attributes:
        rows: by the `hash_id` of their ids.
    """

    def __init__(self, folder: JobFolder, id_column: str):
        self._folder, self._id_column = folder, id_column
        self._path = folder.path / CORRECTED
        is_there = self._path.exists()
        lines = [raw for _, raw in self.inputs().lines()] if is_there else []
        self.rows = {hash_id(raw.id): raw.row for raw in lines if raw.row is not None}

    def add(self, path: str | os.PathLike[str], found: Scan) -> None:
        """Keep the lines of a copy of _errors.jsonl whose rows have been changed, or of a file of lines with ids.

        Raises ValueError for a line that is no JSON object, that no line of the job has the id of, or that comes twice.
        """
        new = dict[bytes, Row]()
        for _, raw in Inputs(find_files(path, "retry_errors"), id_column=self._id_column).lines():
            where = f"retry_errors={os.fspath(path)!r}: line {raw.number}"
            if raw.row is None:
                raise ValueError(f"{where}: {raw.error}")
            line_id, row = _corrected(raw)
            if not isinstance(row, dict):
                continue  # an error whose line is no JSON object yet
            key = hash_id(line_id)
            if key in new:
                raise ValueError(f"{where}: the id {line_id!r} comes twice")
            if found.find(key)[0] < 0:
                raise ValueError(f"{where}: no line of the job has the id {line_id!r}")
            new[key] = row | {"custom_id" if is_request(row) else self._id_column: line_id}
        self.rows |= new
        self._folder.write_lines(CORRECTED, map(to_json, self.rows.values()))
        self._folder.forget_errors(new)

    def places(self, found: Scan) -> np.ndarray:
        """int64: of the corrected lines in the input."""
        return found.find(b"".join(self.rows))

    def inputs(self) -> Inputs:
        """Makes the `Inputs` that read them, in this order."""
        return Inputs([str(self._path)], id_column=self._id_column)

    def repeat_rows(self, inputs: Inputs, found: Scan) -> None:
        """Give each error the row that failed, if it has none yet."""
        errors = [hash_id(error["id"]) for error in self._folder.errors() if "row" not in error]
        if not errors:
            return
        is_other = np.ones(found.num_lines, bool)
        is_other[found.find(b"".join(errors))] = False
        rows: dict[bytes, Any] = {hash_id(line_id): row for line_id, row in inputs.texts(is_other)} | self.rows
        self._folder.change_errors(lambda error: error | {"row": error.get("row", rows.get(hash_id(error["id"])))})


def _corrected(raw: RawLine) -> tuple[LineId, Any]:
    """The id of a line of the job, and what it shall be."""
    row: Any = raw.row
    is_error = row.keys() >= {"id", "error", "row"} and row.keys() <= _ERROR_KEYS
    return (row["id"], row["row"]) if is_error else (raw.id, row)
