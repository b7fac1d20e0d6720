"""When sequences that wait may begin.

Prefill comes first, but only for as long as decode can use what it brings. Once max_num_seqs sequences run, or the
cache is as good as full, those that wait do so without blocks: whoever takes the last ones is the first to be
preempted, and is computed again.
"""

from collections.abc import Collection

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

# One in so many of the cache's blocks, or as many as the running sequences may still open, is left to them when another
# one begins. As many more have to be free before any begins, so that several do together: a prefill step of one prompt
# takes the host as long as one of ten.
SPARE_SHARE = 16


class Admission:
    """One prefill step's.

    Attributes:
        is_open: whether sequences may begin in this step, if there are blocks for them.
        num_spare: blocks that have to stay free when one begins; means nothing where none may.
    """

    def __init__(self, manager: BlockManager, running: Collection[Sequence], max_num_seqs: int, max_seq_len: int):
        self._max_seq_len = max_seq_len
        self._most_spare = len(manager.blocks) // SPARE_SHARE
        self.num_spare = 0
        self.is_open = len(running) < max_num_seqs
        if not self.is_open:  # At each decode step of a full batch with a queue behind it: nobody asks for more then.
            return
        for seq in running:
            if self.num_spare == self._most_spare:
                break
            self.began(seq)
        self.is_open = len(manager.free_block_ids) >= 2 * self.num_spare

    def began(self, seq: Sequence) -> None:
        """Count the blocks that the sequence may still open."""
        self.num_spare = min(self.num_spare + num_blocks_to_come(seq, self._max_seq_len), self._most_spare)


def num_blocks_to_come(seq: Sequence, max_seq_len: int) -> int:
    """Blocks that the sequence has not got and, by max_tokens, may still want."""
    longest = min(seq.num_prompt_tokens + seq.max_tokens, max_seq_len)
    return -(-longest // seq.block_size) - len(seq.block_table)
