"""How many blocks the layers with a window get, beside those of the other layers."""

import sys
from typing import NamedTuple

from nanovllm.layers.stores.store import StoreLimits


def num_blocks_before(window: int, block_size: int) -> int:
    """The most blocks before its own that a token sees through a window, which counts the token too."""
    return -(-(window - 1) // block_size)


class WindowSplit(NamedTuple):
    """How the memory of a KV cache is split between layers that keep all tokens and layers with a window, which give
    blocks back. The number of blocks of the windowed layers follows from that of the others. So it is the same on all
    ranks, and after `wake_up`.

    A sequence of the usual length decides the ratio: half of max_model_len, which a sequence that grows to that limit
    has on average. Shorter ones need as many blocks of either kind. So that they find some, the windowed layers get at
    least half of what they would have without giving back. At most they get what max_num_seqs sequences and the prompts
    of one step can use, and as much again for beginnings that others may share.

    Attributes:
        window: the most keys that a token of such a layer sees, its own included.
        per_sequence: the most blocks that a sequence which decodes holds.
        numerator, denominator: of the blocks for each block of the other layers.
        most, least: blocks. With the fewest a sequence that is alone still fits.
    """

    window: int
    per_sequence: int
    numerator: int
    denominator: int
    most: int
    least: int

    @classmethod
    def of(cls, window: int, block_size: int, other_bytes: int, own_bytes: int, limits: StoreLimits) -> "WindowSplit":
        """other_bytes, own_bytes: of a block of all other layers, which may be 0, and of all layers with a window."""
        per_sequence = 1 + num_blocks_before(window, block_size)
        usual = max(1, -(-limits.max_model_len // (2 * block_size)))
        # Half of what both kinds would have, n = bytes / (other + own), leaves (bytes - own * n / 2) / other for the
        # others, n / 2 * (2 * other + own) / other: the ratio of the two.
        ratio, least = (per_sequence, usual), (other_bytes, 2 * other_bytes + own_bytes)
        if least[0] * ratio[1] > ratio[0] * least[1]:
            ratio = least
        of_a_step = -(-limits.max_num_batched_tokens // block_size)
        most = 2 * (limits.max_num_seqs * per_sequence + of_a_step) if other_bytes else sys.maxsize
        whole = -(-min(limits.whole_tokens, limits.max_num_batched_tokens) // block_size)
        return cls(window, per_sequence, *ratio, most, per_sequence + whole)

    @property
    def gives_back(self) -> bool:
        """Whether a sequence of the usual length ever gives a block back."""
        return self.numerator < self.denominator

    def num_blocks(self, num_other: int) -> int:
        """Of the windowed layers, beside num_other blocks of the others: a sequence that is alone always fits."""
        wanted = -(-num_other * self.numerator // self.denominator)
        return min(num_other, max(self.least, min(wanted, self.most)))
