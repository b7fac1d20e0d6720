"""Which prompts are computed beside a decode step, in the rows that no sequence fills.

A decode step of a wide model spends its time on reading weights, so a few hundred rows cost little more than one. A
prompt's token is cheaper in such a row than in a prefill step, but the prompt enters slowly, and all that wait behind
it begin later. So a prompt goes beside a decode step only if, by max_tokens, it ends no later than the longest running
sequence: then the batch is over no later.

Batches of decode steps and pieces of prompts are those of Sarathi (Agrawal et al. 2023).
"""

from collections.abc import Collection

from nanovllm.engine.sequence import Sequence

# In a mixed step attention loads a prompt's keys for each of its tokens, in a prefill step once for many of them.
_MAX_PROMPT_TOKENS = 2048


class MixedSteps:
    """Decides for one call of `Scheduler.schedule` which waiting sequences go beside the running ones.

    None does while sequences wait that have no place in the batch: then the batch should be full soon.
    """

    def __init__(
        self,
        running: Collection[Sequence],
        waiting: Collection[Sequence],
        num_rows: int,
        max_num_seqs: int,
        max_seq_len: int,
    ):
        """num_rows: tokens that a mixed step computes; 0 for no such steps."""
        self._num_rows, self._max_seq_len = num_rows, max_seq_len
        self._is_open = num_rows > 0 and len(waiting) > 0 and len(waiting) + len(running) <= max_num_seqs
        self._num_running = self._longest = 0
        if self._is_open:
            for seq in running:
                self.began(seq)

    def began(self, seq: Sequence) -> None:
        """Count the sequence among those that run."""
        self._num_running += 1
        self._longest = max(self._longest, self._num_left(seq))
        # A request that samples from its logits needs a step without prompts beside it.
        self._is_open &= seq.is_plain

    def takes(self, seq: Sequence) -> bool:
        """Whether the waiting sequence goes beside. Cached prefixes are not looked up for it."""
        num_free = self._num_rows - self._num_running
        if not self._is_open or not self._num_running or num_free <= 0:
            return False
        if not seq.is_plain or seq.num_tokens > _MAX_PROMPT_TOKENS:
            return False
        num_steps = -(-(seq.num_tokens - seq.num_cached_tokens) // num_free)
        return num_steps + self._num_left(seq) <= self._longest

    def _num_left(self, seq: Sequence) -> int:
        """Tokens that the sequence may still generate."""
        return min(seq.max_tokens - seq.num_completion_tokens, self._max_seq_len - seq.num_tokens)
