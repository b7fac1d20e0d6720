"""When a prompt is computed beside a decode step, in the rows that none of its sequences takes.

A decode step of a wide model reads weights for as long as it multiplies some 256 rows by them, so rows that no sequence
fills are to be had for less than a prefill step takes for them: on an H200 a prompt's token costs a layer of Qwen3-8B
0.4 us there and 0.6 us in a prefill step. But a prompt enters slowly that way, and all that wait behind it begin later.
So it goes beside only where, by max_tokens, that makes the batch no longer (benchmarks/mixed_steps.py,
docs/performance.md). Running sequences that have time until the batch ends leave it their rows, and go on when they
have no more to spare, or when no prompt wants them.

Mixed batches of decode steps and pieces of prompts are Sarathi's (Agrawal et al. 2023).
"""

from collections.abc import Collection
from itertools import chain

from nanovllm.config import Config
from nanovllm.engine.admission import num_blocks_to_come
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence
from nanovllm.tuning.table import Table

# Of longer ones attention alone would take more than is gained: it loads a prompt's keys anew for every few of its
# tokens (four of Qwen3-8B's), where a prefill step loads them once for a hundred. By arithmetic, not measured.
_MAX_PROMPT_TOKENS = 2048


def choose_num_rows(config: Config, has_graphs: bool, num_layer_params: int, table: Table) -> int:
    """Rows of a mixed step, 0 for none: config.mixed_step_rows, or if that is None, the table's number where mixed
    steps pay. One has two sequences at least."""
    num_rows = config.mixed_step_rows
    if num_rows is None:
        pays = (
            has_graphs
            and config.tensor_parallel_size == 1
            and num_layer_params >= table.setting("mixed_steps", "min_layer_params")
        )
        num_rows = min(table.setting("mixed_steps", "rows"), config.max_num_batched_tokens) if pays else 0
    return num_rows if min(num_rows, config.max_num_seqs) > 1 else 0


class MixedSteps:
    """Which waiting sequences had better be computed beside the running ones than in a prefill step, and which running
    ones leave them their rows. One scheduling's: it is told of the sequences that begin in it.

    Beside go those that, by max_tokens, would end no later than the longest of the running ones, were all steps equally
    long; and none while not all that wait have a place in the batch, for then what counts is that the batch is full
    soon. A running sequence that would end before the longest one rests in a mixed step whose rows prompts fill, if the
    cache has room for all that run and wait, up to their ends: the batch takes no step more for it, more of the prompts
    go beside, and its last steps are fuller. Where there is less room it goes on, and gives its blocks back the sooner.
    """

    def __init__(
        self,
        running: Collection[Sequence],
        waiting: Collection[Sequence],
        manager: BlockManager,
        num_rows: int,
        max_num_seqs: int,
        max_seq_len: int,
    ):
        """num_rows: tokens that a mixed step computes; 0 for no such steps."""
        self._num_rows, self._max_seq_len = num_rows, max_seq_len
        self._is_open = num_rows > 0 and len(waiting) > 0 and len(waiting) + len(running) <= max_num_seqs
        self._may_rest = False
        self._num_busy = self._longest = 0
        if self._is_open:
            num_blocks = sum(num_blocks_to_come(seq, max_seq_len) for seq in chain(running, waiting))
            self._may_rest = num_blocks <= len(manager.free_block_ids)
            for seq in running:
                self.began(seq)

    def began(self, seq: Sequence) -> None:
        """Count the sequence among those that run."""
        num_left = self._num_left(seq)
        if num_left > self._longest:
            self._longest = num_left
            self._num_busy = 0 if self._may_rest else self._num_busy
        self._num_busy += not self.rests(seq)
        # What is drawn from logits of its own wants a step that takes no prompts along.
        self._is_open &= seq.is_plain

    def takes(self, seq: Sequence) -> bool:
        """Whether the waiting sequence goes beside. Tokens that the prefix cache has for it are not looked up."""
        num_free = self._num_rows - self._num_busy
        if not self._is_open or not self._num_busy or num_free <= 0:
            return False
        if not seq.is_plain or seq.num_tokens > _MAX_PROMPT_TOKENS:
            return False
        num_steps = -(-(seq.num_tokens - seq.num_cached_tokens) // num_free)
        return num_steps + self._num_left(seq) <= self._longest

    def rests(self, seq: Sequence) -> bool:
        """Whether the running sequence leaves its row to prompts, if they want it; the longest one never does."""
        return self._may_rest and self._num_left(seq) < self._longest

    def _num_left(self, seq: Sequence) -> int:
        """Tokens that the sequence may still generate."""
        return min(seq.max_tokens - seq.num_completion_tokens, self._max_seq_len - seq.num_tokens)
