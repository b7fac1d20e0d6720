"""Store: what sequences keep on the device between steps."""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

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


def count_blocks(stores: "Sequence[Store]", num_bytes: int, num_cells: int, most: int) -> int:
    """How many blocks of tokens stores have room for in num_bytes, beside num_cells cells: at most `most`, and -1 if
    there is not even room for the cells."""
    return bisect_right(range(most + 1), num_bytes, key=lambda num: total_bytes(stores, num, num_cells)) - 1


def total_bytes(stores: "Sequence[Store]", num_blocks: int, num_cells: int) -> int:
    return sum(store.num_bytes(num_blocks, num_cells) for store in stores)


class StoreLimits(NamedTuple):
    """What an engine's options say of the sequences in the stores: the fields of a `Config`.

    Attributes:
        whole_tokens: that a step computes together, or not at all: of the largest image, where images attend in both
            directions.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    whole_tokens: int = 0


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

    def num_bytes(self, num_blocks: int, num_cells: int) -> int:
        """That it takes of so many blocks and cells; no fewer for more of them."""
        return num_blocks * self.bytes_per_block + num_cells * self.bytes_per_cell

    def num_sequences(self, num_blocks: int, blocks_each: int) -> int:
        """How many sequences with blocks_each blocks fit, each of which may still decode."""
        return num_blocks // blocks_each

    def description(self, num_blocks: int) -> str:
        """What the log says of it beside the numbers of blocks and cells, if anything."""
        return ""

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
