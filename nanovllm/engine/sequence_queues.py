"""SequenceQueues: the sequences that wait and those that run, and what becomes of them after a step."""

import logging
from collections import deque
from collections.abc import Iterable
from functools import partial

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sampling.logprobs import StepLogprobs
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.layers.sampler import NON_FINITE

logger = logging.getLogger(__name__)

_NO_TOKEN = frozenset({NON_FINITE})  # Ends every sequence, so that collect looks for it at no cost.


class SequenceQueues:
    """Waiting and running sequences over one BlockManager: what a scheduler chooses from, and its books.

    Args:
        max_model_len: longest sequence, prompt and completion, that the model may see.
        supported_model_len: longest sequence that the model supports, for messages; None where it is unknown.
        num_kvcache_blocks, kvcache_block_size: the KV cache's blocks, and token slots a block.
        eos: end-of-sequence token ids.
        enable_prefix_caching: whether equal beginnings share blocks.

    Attributes, counted since the beginning, resets included:
        num_preemptions: sequences that had to give their blocks back.
        num_prompt_tokens: prompt tokens of the sequences that were started.
        num_prefix_queries, num_prefix_hits: those of them that the prefix cache was asked for, and that it had.
        num_generated_tokens: completion tokens.
    """

    def __init__(
        self,
        max_model_len: int,
        num_kvcache_blocks: int,
        kvcache_block_size: int,
        eos: Iterable[int],
        enable_prefix_caching: bool,
        supported_model_len: int | None = None,
    ):
        self.max_seq_len = min(max_model_len, num_kvcache_blocks * kvcache_block_size)
        self._max_model_len, self._supported_model_len = max_model_len, supported_model_len
        self.eos = frozenset(eos)
        self._ends = self.eos | _NO_TOKEN
        self._has_warned = False
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_generated_tokens = 0
        self._make_block_manager = partial(BlockManager, num_kvcache_blocks, kvcache_block_size, enable_prefix_caching)
        self.reset()

    def reset(self) -> None:
        """Drop every sequence and start over with free blocks. For after an exception: Ctrl-C can strike between
        any two lines, so no half-way state is worth mending."""
        self.block_manager = self._make_block_manager()
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    def check(self, num_prompt_tokens: int) -> None:
        """Raises ValueError where a prompt of this length leaves no room for one completion token."""
        if num_prompt_tokens >= self.max_seq_len:
            raise ValueError(
                f"the prompt has {num_prompt_tokens} tokens, and with one token of completion it is longer than the "
                f"longest sequence of {self.max_seq_len} tokens, {self._explain_limit()}"
            )

    def _explain_limit(self) -> str:
        """What sets max_seq_len, and how to raise it."""
        blocks, size = len(self.block_manager.blocks), self.block_manager.block_size
        if self.max_seq_len < self._max_model_len:
            return (
                f"which is all that the KV cache holds ({blocks} blocks x {size} tokens): shorten the prompt, or raise "
                "num_kvcache_blocks, kvcache_gib or gpu_memory_utilization"
            )
        if self._max_model_len == self._supported_model_len:
            return "which is all that the model supports (max_position_embeddings): shorten the prompt"
        most = f", to at most {self._supported_model_len}" if self._supported_model_len is not None else ""
        return f"which is max_model_len: shorten the prompt, or raise max_model_len{most}"

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises ValueError where it could never run."""
        self.check(seq.num_tokens)
        stop = seq.params.stop_token_ids
        ends = _NO_TOKEN if seq.ignore_eos else self._ends
        seq.end_token_ids = ends.union(stop) if stop else ends
        self.waiting.append(seq)

    def postprocess(self, seqs: list[Sequence], token_ids: list[int]) -> list[Sequence]:
        """Book one step: `advance`, then `collect`.

        Args:
            seqs: what schedule() returned.
            token_ids: one sampled token a sequence; that of a sequence whose prefill goes on is ignored.

        Returns:
            The sequences that finished, their blocks given back.
        """
        self.advance(seqs)
        return self.collect(seqs, token_ids)

    def advance(self, seqs: list[Sequence]) -> None:
        """Book what is known of a step once it is launched, so that the next one can be scheduled without its
        tokens: register full blocks, append a placeholder, end what reaches its length.

        Blocks given back here may still be read by the step in flight; whoever gets them next writes them in a
        later step of the same stream.
        """
        block_size, max_seq_len = self.block_manager.block_size, self.max_seq_len
        ended = False
        for row, seq in enumerate(seqs):
            if seq.is_finished:
                continue  # An end-of-sequence token came to light after this step was launched.
            before = seq.num_cached_tokens
            seq.num_cached_tokens = after = before + seq.num_scheduled_tokens
            seq.num_scheduled_tokens = 0
            if before // block_size != after // block_size:
                self.block_manager.hash_blocks(seq, before)
            if after < seq.num_tokens:
                continue
            seq.is_prefilling = False
            seq.append_pending(row)
            if seq.num_completion_tokens >= seq.max_tokens or seq.num_tokens >= max_seq_len:
                self._end(seq, "length")
                ended = True
        if ended:
            self._drop_finished()

    def collect(
        self, seqs: list[Sequence], token_ids: list[int], logprobs: StepLogprobs | None = None
    ) -> list[Sequence]:
        """Book the tokens of a step that advance() has booked, with their log-probabilities: fill the placeholders,
        find the ends of sequence. A sequence whose row has no token (NON_FINITE) ends with finish reason "error".

        Returns the sequences that are complete. With another step in flight, that one's surplus token of a
        sequence that ends here is never looked at.
        """
        finished = []
        dropped = False
        num_ignored = 0
        for row, (seq, token_id) in enumerate(zip(seqs, token_ids, strict=True)):
            if seq.pending_row != row:
                num_ignored += 1
                continue  # Its prefill goes on, or it had ended before.
            is_end = token_id in seq.end_token_ids
            if is_end and token_id == NON_FINITE:
                self._fail_without_token(seq)
                finished.append(seq)
                dropped = True
                num_ignored += 1
                continue
            seq.resolve_pending(token_id)
            if logprobs is not None:
                logprobs.book(row, seq)
            if is_end:
                if not seq.is_finished:
                    self._end(seq, "stop")
                    dropped = True
                seq.finish_reason = "stop"
                seq.stop_reason = token_id if seq.ignore_eos or token_id not in self.eos else None
            if seq.is_finished:
                finished.append(seq)
        if dropped:
            self._drop_finished()
        self.num_generated_tokens += len(seqs) - num_ignored
        return finished

    def stop(self, seqs: list[Sequence]) -> None:
        """End sequences at the token that collect() has just booked, for a reason that their text gave. With another
        step in flight, that one's surplus tokens are never looked at."""
        for seq in seqs:
            self._end(seq, "stop")
        self._drop_finished()

    def fail(self, seqs: list[Sequence], error: str) -> None:
        """End sequences with finish reason "error", wherever they are. What they have so far stays; the token that a
        step in flight samples for one of them is dropped."""
        for seq in seqs:
            self._fail(seq, error)
        self._drop_finished()

    def _fail(self, seq: Sequence, error: str) -> None:
        seq.drop_pending()
        if not seq.is_finished:
            self._end(seq, "error")
        seq.finish_reason, seq.stop_reason, seq.error = "error", None, error

    def _fail_without_token(self, seq: Sequence) -> None:
        """End a sequence that has no token to draw."""
        if seq.error is not None:  # Masks have left none.
            self._fail(seq, seq.error)
            return
        error = (
            f"the model's logits for the token at position {seq.num_tokens - 1} hold NaN or infinity: its weights are "
            "damaged, or overflow in this dtype; check the checkpoint's files, or try dtype='float32'"
        )
        self._fail(seq, error)
        self.block_manager.forget_blocks(seq)  # Their keys and values are likely to be NaN too.
        if not self._has_warned:
            self._has_warned = True
            logger.warning("request %d: %s (results say so; this is logged once)", seq.request_id, error)

    def _end(self, seq: Sequence, finish_reason: str) -> None:
        was_preempted = seq.status is SequenceStatus.WAITING
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = finish_reason
        seq.grammar = None  # Its state takes more memory than its tokens, and results wait for the whole batch.
        self.block_manager.deallocate(seq)
        if was_preempted:
            self.waiting.remove(seq)

    def _drop_finished(self) -> None:
        self.running = deque(seq for seq in self.running if seq.status is not SequenceStatus.FINISHED)

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Sequence]:
        """Drop these requests' sequences, or all, wherever they are, and give their blocks back; they are returned.
        The token that a step in flight samples for one of them is dropped as well."""
        request_ids = None if request_ids is None else set(request_ids)
        aborted = [
            seq
            for queue in (self.waiting, self.running)
            for seq in queue
            if request_ids is None or seq.request_id in request_ids
        ]
        for seq in aborted:
            seq.status = SequenceStatus.FINISHED
            seq.finish_reason = "abort"
            seq.grammar = None
            seq.drop_pending()
            self.block_manager.deallocate(seq)
        self.waiting = deque(seq for seq in self.waiting if not seq.is_finished)
        self._drop_finished()
        return aborted
