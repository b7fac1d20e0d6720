"""BlockTables: a step's block tables, in which only changes are written."""

import numpy as np


class BlockTables:
    """Block tables as rows of an int32 array, right-padded with -1.

    A sequence's table is appended to, or replaced by a new list. So the same list object with the same length has the
    same content, and need not be written again.
    """

    def __init__(self, array: np.ndarray):
        """array: [max_num_seqs, max_blocks], int32."""
        self.array = array
        self._written: list[tuple[list[int], int]] = [([], 0)] * len(array)

    def write(self, row: int, block_table: list[int]) -> None:
        table, length = self._written[row]
        new_length = len(block_table)
        if table is not block_table:
            self.array[row, :new_length] = block_table
            self.array[row, new_length:] = -1
        elif length != new_length:
            self.array[row, length:new_length] = block_table[length:]
        else:
            return
        self._written[row] = (block_table, new_length)

    def repeat(self, rows: slice, sources: np.ndarray) -> None:
        """Copy the tables of the rows `sources` to these rows."""
        self.array[rows] = self.array[sources]
        self._written[rows] = [([], 0)] * len(sources)
