"""Store: what sequences keep on the device between steps."""

from abc import ABC, abstractmethod


class Store(ABC):
    """Memory on one rank's device that belongs to the sequences: their keys and values, or a state of fixed size each.

    A model says which stores it has (`DecoderForCausalLM.make_stores`). At an engine's start each says how many bytes
    it takes, allocates its part of the budget, and gives it to its layers. Which places a sequence has in it is the
    scheduler's business (`engine.places`).

    Attributes:
        name: for the log and for errors.
        bytes_per_block: of each block of kvcache_block_size tokens.
        bytes_per_sequence: of each sequence that may run at once, however long it is.
    """

    name: str
    bytes_per_block: int = 0
    bytes_per_sequence: int = 0

    @abstractmethod
    def allocate(self, num_blocks: int, num_seqs: int, is_shared: bool = False) -> None:
        """Allocate room for so many blocks and sequences, and give it to the layers.

        is_shared: all layers share one layer's memory, for steps whose results mean nothing.
        """

    @abstractmethod
    def free(self) -> None:
        """Give the memory back, if there is any: the layers forget it too."""
