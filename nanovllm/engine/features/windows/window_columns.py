"""WindowColumns: where layers with a window write and read, which have block tables of their own."""

from typing import TypeVar

import numpy as np

from nanovllm.engine.features.columns import AttentionColumns, Columns
from nanovllm.engine.features.windows.window_blocks import WindowTable
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.backends.backend import AttentionBackend
from nanovllm.utils.context import WindowFields

T = TypeVar("T")

_OWN = "window "  # The names of the back end's arrays begin so, because the other layers' back end has the same.
_NOTHING: tuple[list[int], int] = [], 0


class WindowColumns(Columns):
    """Slots and block tables of the layers with a window, and what their back end declares. To that back end they are
    the step's only tables."""

    def __init__(self, backend: AttentionBackend, max_blocks: int, block_size: int):
        """backend: of these layers alone, prepared for as many rows as there can be."""
        self._backend, self._attention = backend, AttentionColumns(backend)
        self._max_blocks, self._block_size = max_blocks, block_size
        # Of each host buffer, the table in each row, and its length, as in `DecodeInputs`.
        self._written: dict[int, dict[int, tuple[list[int], int]]] = {}

    def layout(self, max_rows):
        tables = {"window_tables": ((max_rows, self._max_blocks), np.int32), "window_slots": ((max_rows,), np.int32)}
        return tables | {_OWN + name: array for name, array in self._backend.layout().items()}

    def write(self, step, rows, host, num_rows):
        tables, slots, num_tokens = host["window_tables"], host["window_slots"], len(rows.positions)
        written = self._written.setdefault(step.buffer, {})
        for row, seq in zip(rows.heads.tolist(), step.seqs, strict=True):
            blocks, (known, length) = _blocks(seq), written.get(row, _NOTHING)
            start = length if blocks is known else 0  # A table that has given blocks back is a new list.
            if start < len(blocks):
                tables[row, start : len(blocks)] = blocks[start:]
                written[row] = blocks, len(blocks)
        if num_tokens > len(step.seqs):
            others = np.setdiff1d(np.arange(num_tokens), rows.heads)
            tables[others] = tables[rows.heads[rows.owners[others]]]
            for row in others.tolist():
                written.pop(row, None)
        slots[:num_tokens] = self._slots(tables[np.arange(num_tokens), rows.positions // self._block_size], rows)
        slots[num_tokens:num_rows] = -1  # Padding writes nothing.
        arrays = {"window_tables": tables[:num_rows], "window_slots": slots[:num_rows]}
        if self._attention.is_used(step):
            of_backend = self._attention.write(step, rows, _as_only_tables(host), num_rows)
            arrays |= {_OWN + name: array for name, array in of_backend.items()}
        return arrays

    def prefill(self, step, rows):
        of_seqs = [_blocks(seq) for seq in step.seqs]
        tables = np.zeros((len(of_seqs), max(map(len, of_seqs))), np.int32)
        for row, blocks in zip(tables, of_seqs, strict=True):
            row[: len(blocks)] = blocks
        blocks = tables[rows.owners, rows.positions // self._block_size]
        return {"window_tables": tables, "window_slots": self._slots(blocks, rows).astype(np.int32)}

    def pretend(self, step):
        for seq in step.seqs:  # They write to one block, and read it.
            seq.cell = WindowTable([0] * len(seq.block_table))

    def context(self, arrays, num_rows, kind):
        arguments = self._backend.arguments(_as_only_tables(arrays), num_rows, kind.shares_reads)
        tables = arrays["window_slots"][:num_rows], arrays["window_tables"][:num_rows]
        return {"of_windows": WindowFields(*tables, arguments)}

    def prefill_context(self, arrays, step):
        return {"of_windows": WindowFields(arrays["window_slots"], arrays["window_tables"])}

    def _slots(self, blocks: np.ndarray, rows) -> np.ndarray:
        return blocks * self._block_size + rows.positions % self._block_size


def _blocks(seq: Sequence) -> list[int]:
    if seq.cell is None:
        raise ValueError(
            "a sequence has no blocks in the layers with a window, which give blocks back: by hand, schedule with "
            "nanovllm.engine.start.schedulers.make_scheduler(config, model_runner), not with Scheduler(config)"
        )
    return seq.cell.blocks


def _as_only_tables(arrays: dict[str, T]) -> dict[str, T]:
    """A step's arrays as a back end knows them, with these layers' tables and its own arrays under its own names."""
    own = {name.removeprefix(_OWN): array for name, array in arrays.items() if name.startswith(_OWN)}
    return arrays | {"block_tables": arrays["window_tables"]} | own
