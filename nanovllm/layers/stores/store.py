"""Store: what sequences keep on the device between steps."""

from abc import ABC, abstractmethod

# Cells beyond those of a decode step's rows, for snapshots of states.
NUM_SNAPSHOTS = 64
# At most one part in this many of the stores' memory is cells. A sequence that waits for a cell is one that would be
# preempted soon if the keys and values of others had no room.
_CELLS_SHARE = 2


def count_cells(bytes_per_cell: int, max_rows: int, num_bytes: int | None = None) -> int:
    """How many cells there are, in a budget of num_bytes for all stores, or None for no limit; 0 if they have no size.
    At least one, whatever the budget.

    max_rows: of a decode step. The row of each sequence writes a state to one cell, and with speculation also the row
    of each proposed token, so no step uses more.
    """
    if not bytes_per_cell:
        return 0
    wanted = max_rows + NUM_SNAPSHOTS
    return wanted if num_bytes is None else max(1, min(wanted, num_bytes // _CELLS_SHARE // bytes_per_cell))


class Store(ABC):
    """Memory on one rank's device that belongs to the sequences: their keys and values, or a state of fixed size each.

    A model says which stores it has (`DecoderForCausalLM.make_stores`). At an engine's start each says how many bytes
    it takes, allocates its part of the budget, and gives it to its layers. Which places a sequence has in it is the
    scheduler's business (`engine.features.states.cells`).

    Attributes:
        name: for the log and for errors.
        bytes_per_block: of each block of kvcache_block_size tokens.
        bytes_per_cell: of each cell; there is one for each sequence that runs, however long it is.
    """

    name: str
    bytes_per_block: int = 0
    bytes_per_cell: int = 0

    @abstractmethod
    def allocate(self, num_blocks: int, num_cells: int, is_shared: bool = False) -> None:
        """Allocate the blocks and cells, and give them to the layers.

        is_shared: all layers share one layer's memory, for steps whose results mean nothing.
        """

    @abstractmethod
    def free(self) -> None:
        """Give the memory back, if there is any: the layers forget it too."""

    def copy(self, source: int, target: int) -> None:
        """Copy the content of a cell to another one, in stream order."""
        return None
