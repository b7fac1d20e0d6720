"""Scheduler: which sequences the next step computes, and what its tokens mean for them."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as AbstractSequence
from typing import TYPE_CHECKING

from nanovllm.engine.admission import Admission
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.cells import NoCells
from nanovllm.engine.ends import end_token_ids, note_end_token, note_failure
from nanovllm.engine.features.mixed import MixedAdmission
from nanovllm.engine.length_limit import LengthLimit
from nanovllm.engine.prefix_cache import forget_blocks
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import Step
from nanovllm.kernels.sampling.sampler import NON_FINITE

if TYPE_CHECKING:
    from types import SimpleNamespace

    from nanovllm.config import Config

# No prompt is cut to fill the last max_num_batched_tokens // MIN_CHUNK_SHARE tokens of a step. The next step would
# continue it from the cache, which makes attention slower for all sequences of that step.
MIN_CHUNK_SHARE = 8


class Scheduler:
    """Waiting and running sequences over one BlockManager.

    Prefill comes first, if `Admission` lets sequences begin. Prompts that `MixedAdmission` admits are computed in spare
    rows of a decode step instead. When the cache is full, the sequence that began last is preempted.

    Args:
        config: an engine's Config, whose num_kvcache_blocks ModelRunner has set; or anything with max_num_seqs,
            max_num_batched_tokens, kvcache_block_size, num_kvcache_blocks and eos, a token or several.
        mixed_step_rows: most tokens of a mixed step; 0 for no such steps.
        make_cells: makes the cells in the model's stores beside the KV cache.
        make_manager: makes the BlockManager, of its arguments.

    Attributes:
        waiting, running: the sequences, in order.
        max_seq_len: tokens of the longest sequence that the engine can hold, prompt and completion.
        num_preemptions, num_prompt_tokens, num_prefix_queries, num_prefix_hits, num_generated_tokens,
            num_proposed_tokens, num_accepted_tokens: counters for `EngineStats`, which survive `reset`.
        awaits_tokens: nothing may be scheduled before the tokens of the step in flight are known.
    """

    def __init__(
        self,
        config: "Config | SimpleNamespace",
        mixed_step_rows: int = 0,
        make_cells: Callable[[], NoCells] = NoCells,
        make_manager: Callable[..., BlockManager] = BlockManager,
    ):
        self.max_num_seqs: int = config.max_num_seqs
        self.max_num_batched_tokens: int = config.max_num_batched_tokens
        self.eos = frozenset([config.eos] if isinstance(config.eos, int) else config.eos)
        self._ends = self.eos | {NON_FINITE}
        self.block_size: int = config.kvcache_block_size
        self.mixed_step_rows = mixed_step_rows
        self.length_limit = LengthLimit(config)
        self.max_seq_len = self.length_limit.max_seq_len
        self.num_preemptions = self.num_prompt_tokens = self.num_generated_tokens = 0
        self.num_prefix_queries = self.num_prefix_hits = 0
        self.num_proposed_tokens = self.num_accepted_tokens = 0  # with speculation
        self._has_failed = False  # a sequence, because the sampler found no token
        is_sharing = getattr(config, "enable_prefix_caching", True)
        self._cache = config.num_kvcache_blocks, config.kvcache_block_size, is_sharing
        self._make_cells, self._make_manager = make_cells, make_manager
        self.reset()

    def reset(self) -> None:
        """Drop all sequences and blocks. After an exception: Ctrl-C may have struck between any two lines."""
        self.block_manager = self._make_manager(*self._cache, self._make_cells())
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self._has_finished = False  # a sequence of `running`
        self._watches_text = False  # a sequence has a text_stream
        self.awaits_tokens = False

    def is_finished(self) -> bool:
        return not self.waiting and not self.running

    # -- the next step ---------------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises ValueError if it is too long."""
        if seq.num_tokens >= self.max_seq_len:
            self.length_limit.check(seq.num_tokens)
        seq.block_size = self.block_size
        is_usual = not (seq.ignore_eos or seq.request.params.stop_token_ids)
        seq.request.end_token_ids = self._ends if is_usual else end_token_ids(seq, self.eos)
        self._watches_text = self._watches_text or seq.completion.text_stream is not None
        self.waiting.append(seq)

    def schedule(self) -> Step:
        """The next step's sequences, and whether they are prefilled; never empty while work is left.

        Each sequence's num_scheduled_tokens says how many tokens the step computes for it, and its block_table has
        slots for them. In a mixed step, which counts as a decode step, the last sequences are prefilled.
        """
        mixed = None
        if self.waiting and self.running and self.mixed_step_rows:
            limits = self.mixed_step_rows, self.max_num_seqs, self.max_seq_len
            mixed = MixedAdmission(self.running, self.waiting, *limits)
            mixed = mixed if mixed.admits(self.waiting[0]) else None
        if self.waiting and mixed is None:
            seqs = self._schedule_prefill(self.max_num_batched_tokens)
            if seqs:
                return Step(seqs, True, len(seqs), sum(seq.num_scheduled_tokens for seq in seqs))
        num_preemptions = self.num_preemptions
        seqs, prompts = self._schedule_decode(), list[Sequence]()
        # Nothing begins in the step that preempts: the cache is full, and the victim's last token may still be pending.
        if mixed is not None and self.num_preemptions == num_preemptions:
            prompts = self._schedule_prefill(self.mixed_step_rows - len(seqs), mixed)
        return Step(seqs + prompts, False, len(prompts), -len(seqs))

    def _schedule_prefill(self, budget: int, mixed: MixedAdmission | None = None) -> list[Sequence]:
        """Waiting sequences, of which up to `budget` tokens are computed. mixed: beside a decode step."""
        cells = self.block_manager.cells
        cells.begin_step(self.block_manager, takes_snapshots=mixed is None)
        min_chunk = 0 if mixed else min(max(budget // MIN_CHUNK_SHARE, cells.chunk), budget)
        admission = Admission(self.block_manager, self.running, self.max_num_seqs, self.max_seq_len, min_chunk)
        seqs: list[Sequence] = []
        deferred: list[Sequence] = []
        while self.waiting and len(seqs) < self.max_num_seqs and budget > 0:
            seq = self.waiting[0]
            if not seq.block_table:  # A prompt that goes on after a chunk has all of its blocks already.
                if mixed and not mixed.admits(seq):
                    break
                num_shared = admission.decide(seq, budget, len(deferred))
                if num_shared == "stop":
                    break
                if num_shared == "defer":
                    deferred.append(self.waiting.popleft())
                    continue
                self._begin(seq, num_shared)
            seqs.append(self.waiting.popleft())
            num_left = seq.num_tokens - seq.num_cached_tokens
            seq.num_scheduled_tokens = min(num_left, budget)
            budget -= seq.num_scheduled_tokens
            if seq.num_scheduled_tokens < num_left:
                cells.align_chunk(seq)
                # A chunk, which ends the budget. The sequence keeps its blocks, so it goes to the very head of the
                # queue: behind a sequence that finds no free block it would wait for ever.
                deferred.insert(0, seq)
                break
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)
            admission.add_running(seq)
            if mixed:
                mixed.add_running(seq)
        self.waiting.extendleft(reversed(deferred))
        cells.request_snapshots(self.block_manager, seqs)
        return seqs

    def _begin(self, seq: Sequence, num_shared: int) -> None:
        """Allocate, and count the prompt if it is the sequence's first time."""
        is_new = seq.completion.num_shared_tokens < 0
        self.block_manager.allocate(seq, num_shared)
        if is_new:
            seq.completion.scheduled_time = time.perf_counter()
            self.num_prompt_tokens += seq.num_prompt_tokens
            if self.block_manager.enable_prefix_caching and seq.completion.first_needed_logits > 0:
                self.num_prefix_queries += seq.num_prompt_tokens
                self.num_prefix_hits += seq.num_cached_tokens

    def _schedule_decode(self) -> list[Sequence]:
        seqs: list[Sequence] = []
        block_size = self.block_size
        while self.running and len(seqs) < self.max_num_seqs:
            seq = self.running.popleft()
            # The common case needs no call: between two steps, this loop runs over up to 512 sequences.
            if seq.num_tokens > len(seq.block_table) * block_size and not self._make_room(seq):
                continue
            seq.num_scheduled_tokens = 1
            seqs.append(seq)
        self.running.extendleft(reversed(seqs))
        return seqs

    def _make_room(self, seq: Sequence) -> bool:
        """Give the sequence a block for its last token. If none is free, preempt: first a prompt that is computed in
        chunks, then the sequence that began last, and finally this one (returns False). A sequence that is alone always
        fits, because none grows past max_seq_len."""
        while not self.block_manager.can_append(seq):
            if self.waiting and self.waiting[0].block_table:
                victim = self.waiting.popleft()
            else:
                victim = self.running.pop() if self.running else seq
            self.preempt(victim)
            if victim is seq:
                return False
        self.block_manager.may_append(seq)
        return True

    def preempt(self, seq: Sequence) -> None:
        """Take the blocks of a sequence that is in no queue, and queue it to be prefilled again with its completion."""
        self.num_preemptions += 1
        seq.status = SequenceStatus.WAITING
        seq.is_prefill = True
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)

    # -- after a step ----------------------------------------------------------------------------------------------

    def postprocess(self, seqs: list[Sequence], token_ids: list[int], is_prefill: bool) -> list[Sequence]:
        """Record a step that was computed by hand, from schedule to its tokens, with no other step in between.

        Args:
            seqs, is_prefill: what schedule() returned.
            token_ids: one for each sequence. Those of prefills that go on are ignored.

        Returns:
            The sequences that finished.
        """
        if len(token_ids) != len(seqs):
            raise ValueError(f"token_ids: {len(token_ids)} tokens for {len(seqs)} sequences")
        step = Step(seqs, is_prefill)
        self.advance(step)
        return self.record(step, token_ids)

    def advance(
        self, step: Step, seqs: list[Sequence] | None = None, rows: AbstractSequence[int] | None = None
    ) -> None:
        """Record a launched step before its tokens are known, so that the next one can be scheduled: register full
        blocks, append a placeholder for each new token, end what reaches its length.

        The step may still read blocks that are freed here. Their next owner writes to them in a later step, after it.

        seqs, rows: some of the step's sequences, and for each the sampled row whose token follows; by default all, in
        order.
        """
        block_size, max_seq_len = self.block_size, self.max_seq_len
        seqs = step.seqs if seqs is None else seqs
        for row, seq in enumerate(seqs) if rows is None else zip(rows, seqs, strict=True):
            if seq.status is SequenceStatus.FINISHED:
                continue  # A token of the step before ended it after this step was launched.
            before, num_tokens = seq.num_cached_tokens, seq.num_tokens
            after = before + seq.num_scheduled_tokens
            if before // block_size != after // block_size:
                self.block_manager.hash_blocks(seq)
            seq.num_cached_tokens = after
            seq.num_scheduled_tokens = 0
            if after < num_tokens:
                continue
            seq.is_prefill = False
            seq.append_pending(row)
            if num_tokens >= min(seq.num_prompt_tokens + seq.max_tokens, max_seq_len) - 1:
                self._end(seq, "length")
        if self._has_finished:
            self._drop_finished()

    def record(
        self,
        step: Step,
        token_ids: list[int],
        seqs: list[Sequence] | None = None,
        rows: AbstractSequence[int] | None = None,
    ) -> list[Sequence]:
        """Record the tokens of a step after `advance`: replace the placeholders, end sequences at stop tokens. A step
        that was launched meanwhile still computes a token for such a sequence, which is ignored later.

        Args:
            step: what schedule() returned. The log-probabilities of its tokens are on the host by now.
            token_ids: one for each row that was sampled from. Those of unfinished prefills are ignored; NON_FINITE
                ends a sequence with finish reason "error".
            seqs, rows: as for `advance`.

        Returns:
            The sequences that finished.
        """
        finished = []
        num_new = 0
        logprobs = None if step.logprobs is None else step.logprobs.of_samples
        seqs = step.seqs if seqs is None else seqs
        for row, seq in enumerate(seqs) if rows is None else zip(rows, seqs, strict=True):
            if seq.pending_row != row:  # Its prefill goes on, or it had ended before.
                continue
            token_id = token_ids[row]
            is_end = token_id in seq.request.end_token_ids
            if is_end and token_id == NON_FINITE:
                seq.completion.error = step.errors.get(row)
                self._fail(seq)
            else:
                num_new += seq.resolve_pending(token_id)
                if logprobs is not None and seq.completion.logprobs is not None and row in logprobs:
                    seq.completion.logprobs.append(logprobs[row])
                if is_end:
                    self._end_at(seq, token_id)
            if seq.status is SequenceStatus.FINISHED:
                finished.append(seq)
        if self._watches_text:
            finished += self._stop_at_texts(seqs)
        if self._has_finished:
            self._drop_finished()
        self._watches_text = self._watches_text and not self.is_finished()
        self.num_generated_tokens += num_new
        return finished

    def _stop_at_texts(self, seqs: list[Sequence]) -> list[Sequence]:
        """End the sequences whose newest token completes a stop string. Returns those that had not ended anyway."""
        streams = [(seq, seq.completion.text_stream) for seq in seqs]
        stopped = [seq for seq, stream in streams if stream is not None and stream.read(seq)]
        ended = [seq for seq in stopped if not seq.is_finished]
        self.stop(ended)
        return ended

    def stop(self, seqs: list[Sequence]) -> None:
        """End sequences whose text has reached a stop string, at the token that has just been recorded."""
        for seq in seqs:
            self._end(seq, "stop")
        self._drop_finished()

    def abort(self, request_ids: Iterable[int] | None = None) -> list[Sequence]:
        """Drop the sequences of these requests, or all, and return them. A token in flight is dropped as well."""
        ids = None if request_ids is None else set(request_ids)
        aborted = [seq for seq in (*self.waiting, *self.running) if ids is None or seq.request.request_id in ids]
        for seq in aborted:
            seq.drop_pending()
            self._end(seq, "abort")
        self._drop_finished()
        return aborted

    def _fail(self, seq: Sequence) -> None:
        """End a sequence for which the sampler found no token."""
        seq.drop_pending()
        if not seq.is_finished:
            self._end(seq, "error")
        if note_failure(seq, is_first=not self._has_failed):
            self._has_failed = True
            forget_blocks(self.block_manager, seq)

    def _end_at(self, seq: Sequence, token_id: int) -> None:
        if not seq.is_finished:  # Its length may have ended it before.
            self._end(seq, "stop")
        note_end_token(seq, token_id, self.eos)

    def _end(self, seq: Sequence, finish_reason: str) -> None:
        if seq.status is SequenceStatus.WAITING:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.completion.finish_reason = finish_reason
        seq.completion.grammar = None  # It takes more memory than the tokens, and results wait for the whole batch.
        self.block_manager.deallocate(seq)
        self._has_finished = True

    def _drop_finished(self) -> None:
        """Remove the finished sequences from `running`, all at once: one by one would take quadratic time."""
        self.running = deque(seq for seq in self.running if seq.status is not SequenceStatus.FINISHED)
        self._has_finished = False
