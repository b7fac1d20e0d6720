"""Which waiting sequences may begin, in a prefill step or beside a decode step."""

from collections.abc import Collection, Sized
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

# Longer prompts are prefilled: a mixed step reads a prompt's keys once for each token, a prefill once for many tokens.
_MAX_MIXED_PROMPT_TOKENS = 2048


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


class MixedAdmission:
    """Decides for one step which prompts are computed in spare rows of a decode step (Sarathi, Agrawal et al. 2023).

    A decode step of a wide model spends its time reading weights, so a few hundred rows take little longer than one. A
    prompt's token is cheaper there than in a prefill step, but the prompt starts slowly. So if all sequences generate
    their max_tokens, it must end no later than the longest running one. And all waiting sequences must find a place in
    the batch; otherwise a prefill fills it sooner.
    """

    def __init__(
        self, running: Collection[Sequence], waiting: Sized, num_rows: int, max_num_seqs: int, max_seq_len: int
    ):
        """num_rows: of a mixed step; 0 for no such steps."""
        self._num_rows, self._max_seq_len = num_rows, max_seq_len
        self._is_open = num_rows > 0 and len(waiting) > 0 and len(waiting) + len(running) <= max_num_seqs
        self._num_running = self._longest = 0
        if self._is_open:
            for seq in running:
                self.add_running(seq)

    def add_running(self, seq: Sequence) -> None:
        self._num_running += 1
        self._longest = max(self._longest, self._num_tokens_left(seq))

    def admits(self, seq: Sequence) -> bool:
        num_free = self._num_rows - self._num_running
        if not self._is_open or not self._num_running or num_free <= 0:
            return False
        # Log-probabilities of a prompt are a prefill's.
        if seq.completion.first_needed_logits < seq.num_tokens or seq.num_tokens > _MAX_MIXED_PROMPT_TOKENS:
            return False
        num_steps = -(-(seq.num_tokens - seq.num_cached_tokens) // num_free)
        return num_steps + self._num_tokens_left(seq) <= self._longest

    def _num_tokens_left(self, seq: Sequence) -> int:
        """Tokens that the sequence may still generate."""
        return min(seq.max_tokens - seq.num_completion_tokens, self._max_seq_len - seq.num_tokens)
