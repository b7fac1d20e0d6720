"""Which waiting sequences may begin in a prefill step."""

from collections.abc import Collection
from typing import Literal

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.prefix_cache import hashes_scheduled, is_worth_waiting, num_findable_tokens
from nanovllm.engine.sequence import Sequence

# At most one block in RESERVED_SHARE is reserved for the running sequences. Twice the reserve has to be free before
# others begin, so that several do at once: a prefill step of one prompt takes the host as long as one of ten.
RESERVED_SHARE = 16

# How many prompts a step may defer because another of its prompts computes their beginning. Each costs the host a hash
# of the prompt, while the device waits for the batch's first step.
MAX_DEFERRED = 32


class Admission:
    """Decides for one step which waiting sequences begin.

    Once max_num_seqs sequences run or the cache is nearly full, others wait: whoever takes the last blocks is the first
    to be preempted.
    """

    def __init__(
        self, manager: BlockManager, running: Collection[Sequence], max_num_seqs: int, max_seq_len: int, min_chunk: int
    ):
        """min_chunk: no prompt is cut to fill fewer tokens."""
        self._manager, self._max_seq_len, self._min_chunk = manager, max_seq_len, min_chunk
        self._scheduled: dict[int, Sequence] = {}  # hashes of the blocks that this step computes, and for whom
        self._max_reserved = len(manager.blocks) // RESERVED_SHARE
        self._num_reserved = 0  # blocks that stay free, because the running sequences may still need them
        self._is_open = len(running) < max_num_seqs
        if not self._is_open:  # The common case with a long queue.
            return
        for seq in running:
            if self._num_reserved == self._max_reserved:
                break
            self._reserve(seq)
        self._is_open = len(manager.blocks) - len(manager.used_block_ids) >= 2 * self._num_reserved

    def decide(self, seq: Sequence, budget: int, num_deferred: int) -> int | Literal["defer", "stop"]:
        """What becomes of a waiting sequence without blocks, if the step can compute `budget` more tokens.

        A number: it begins, and shares that number of blocks. "defer": it waits for blocks that this step computes;
        others behind it may begin. "stop": no other begins.
        """
        if not self._is_open:
            return "stop"
        if self._scheduled and is_worth_waiting(self._manager, seq, self._scheduled):
            return "defer" if num_deferred < MAX_DEFERRED else "stop"
        # The first one has the whole budget, and passes. Most others need no look at the prefix cache.
        may_be_cut = budget < min(self._min_chunk, seq.num_tokens)
        if may_be_cut and budget < seq.num_tokens - num_findable_tokens(self._manager, seq):
            return "stop"
        num_shared = self._manager.can_allocate(seq, self._num_reserved)
        return num_shared if num_shared >= 0 else "stop"

    def add_running(self, seq: Sequence) -> None:
        """Count a sequence whose prompt this step computes to its end."""
        if seq.num_tokens >= seq.block_size:  # A shorter prompt fills no block that others could share.
            self._scheduled.update(dict.fromkeys(hashes_scheduled(self._manager, seq), seq))
        self._reserve(seq)

    def _reserve(self, seq: Sequence) -> None:
        """Reserve the blocks that the sequence may still need if it generates max_tokens."""
        longest = min(seq.num_prompt_tokens + seq.max_tokens, self._max_seq_len)
        num_blocks = -(-longest // seq.block_size) - len(seq.block_table)
        self._num_reserved = min(self._num_reserved + num_blocks, self._max_reserved)
