"""How many blocks the layers with a window get, where they give blocks back."""

from typing import NamedTuple


def num_blocks_before(window: int, block_size: int) -> int:
    """The most blocks before its own that a token sees of a window, which has its own token too."""
    return -(-(window - 1) // block_size)
