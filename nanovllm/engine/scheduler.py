"""Scheduler: which sequences the next step computes."""

from collections.abc import Iterable

from nanovllm.engine.admission import Admission
from nanovllm.engine.mixed_steps import MixedSteps
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.sequence_queues import SequenceQueues

# Prompts that one step looks past because they had better wait for it. Looking hashes them, and the device waits for
# the first step of a batch.
MAX_DEFERRED = 32

# No prompt is cut to fill the last max_num_batched_tokens // MIN_CHUNK_SHARE tokens of a step. The step that goes on
# with a chunk reads the cache, and then attention takes its paged kernel for all of its sequences: 308 us a layer
# instead of 271 for prompts of 2,000 tokens (H200, flash-attn-4).
MIN_CHUNK_SHARE = 8


class Scheduler(SequenceQueues):
    """Prefill first, as far as `Admission` lets sequences begin, or beside decode steps, where `mixed_steps` says so,
    in the rows of sequences that can spare the step; preemption last in, first out.

    Args:
        max_num_seqs: sequences a step at most.
        max_num_batched_tokens: tokens that one prefill step computes at most.
        max_model_len, num_kvcache_blocks, kvcache_block_size, eos, enable_prefix_caching: see `SequenceQueues`.
        mixed_step_rows: tokens that a decode step may compute, its sequences' and those of prompts; 0 takes no prompts
            along.
        supported_model_len: see `SequenceQueues`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_kvcache_blocks: int,
        kvcache_block_size: int,
        eos: Iterable[int] = (),
        enable_prefix_caching: bool = True,
        mixed_step_rows: int = 0,
        supported_model_len: int | None = None,
    ):
        sizes = (max_model_len, num_kvcache_blocks, kvcache_block_size)
        super().__init__(*sizes, eos, enable_prefix_caching, supported_model_len)
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.mixed_step_rows = mixed_step_rows
        self._min_chunk = max_num_batched_tokens // MIN_CHUNK_SHARE

    def schedule(self) -> tuple[list[Sequence], bool]:
        """The next step's sequences, and whether they are prefilled; never empty while work is left.

        Each sequence's num_scheduled_tokens says how many tokens the step computes for it, and its block_table has
        slots for them. Of a step that is no prefill the last ones may be prefilled beside the others: a mixed step,
        which may leave out running sequences.
        """
        limits = (self.mixed_step_rows, self.max_num_seqs, self.max_seq_len)
        mixed = MixedSteps(self.running, self.waiting, self.block_manager, *limits)
        is_mixed = bool(self.waiting) and mixed.takes(self.waiting[0])
        if not is_mixed:
            seqs = self._schedule_prefill(self.max_num_batched_tokens, mixed)
            if seqs:
                return seqs, True
        num_preemptions = self.num_preemptions
        seqs, resting = self._schedule_decode(mixed if is_mixed else None)
        # Nothing begins in the step that preempts: the cache is full, and a token of the victim's may still be pending.
        if is_mixed and self.num_preemptions == num_preemptions:
            num_free = self.mixed_step_rows - len(seqs)
            prompts = self._schedule_prefill(num_free, mixed, beside=True)
            num_free -= sum(seq.num_scheduled_tokens for seq in prompts)
            seqs += self._schedule_resting(resting, num_free if prompts else len(resting))
            seqs += prompts
        return seqs, False

    def _schedule_prefill(self, budget: int, mixed: MixedSteps, beside: bool = False) -> list[Sequence]:
        """Sequences that wait, with up to `budget` tokens: those to compute beside a decode step, or for a step of
        their own, which leaves the others to mixed steps once it has some tokens."""
        if not self.waiting:
            return []
        manager = self.block_manager
        admission = Admission(manager, self.running, self.max_num_seqs, self.max_seq_len)
        seqs: list[Sequence] = []
        scheduled: set[int] = set()  # hashes of the blocks that this step computes
        deferred: list[Sequence] = []
        min_chunk = 0 if beside else self._min_chunk
        enough = budget - min_chunk  # A step with no more than this left has tokens enough.
        while self.waiting and len(seqs) < self.max_num_seqs and budget > 0:
            seq = self.waiting[0]
            if not seq.block_table:  # Of one that has blocks a chunk is computed, and nobody else gets these.
                if not admission.is_open or (budget <= enough and mixed.takes(seq) != beside):
                    break
                if manager.is_worth_waiting(seq, scheduled):
                    if len(deferred) == MAX_DEFERRED:
                        break
                    deferred.append(self.waiting.popleft())
                    continue
                if budget < min_chunk and self._exceeds(seq, budget):
                    break  # Never an empty step: the first sequence has the whole budget.
                if not manager.can_allocate(seq, admission.num_spare):
                    break
                self._allocate(seq)
            seq.num_scheduled_tokens = min(seq.num_tokens - seq.num_cached_tokens, budget)
            budget -= seq.num_scheduled_tokens
            scheduled.update(manager.hashes_scheduled(seq))
            seqs.append(seq)
            if seq.num_cached_tokens + seq.num_scheduled_tokens < seq.num_tokens:
                # A chunk: it stays at the head of the queue, with its blocks, for the next step. At the very head,
                # because whoever came before it and found no free block would wait for those that it holds.
                self.waiting.popleft()
                deferred.insert(0, seq)
                break
            seq.status = SequenceStatus.RUNNING
            self.running.append(self.waiting.popleft())
            admission.began(seq)
            mixed.began(seq)
        self.waiting.extendleft(reversed(deferred))
        return seqs

    def _exceeds(self, seq: Sequence, budget: int) -> bool:
        """Whether a waiting sequence has more tokens to compute than these; most answers need no look at the cache."""
        return seq.num_tokens > budget and seq.num_tokens - self.block_manager.num_findable_tokens(seq) > budget

    def _allocate(self, seq: Sequence) -> None:
        is_new = seq.num_shared_tokens < 0
        self.block_manager.allocate(seq)
        if is_new:
            self.num_prompt_tokens += seq.num_prompt_tokens
            if self.block_manager.enable_prefix_caching and not seq.needs_prompt_logits:
                self.num_prefix_queries += seq.num_prompt_tokens
                self.num_prefix_hits += seq.num_shared_tokens

    def _schedule_decode(self, mixed: MixedSteps | None) -> tuple[list[Sequence], list[Sequence]]:
        """The running sequences; of a mixed step those that do not rest, and those that do."""
        seqs: list[Sequence] = []
        resting: list[Sequence] = []
        seen: list[Sequence] = []
        block_size = self.block_manager.block_size
        while self.running and len(seqs) < self.max_num_seqs:
            seq = self.running.popleft()
            if mixed is not None and mixed.rests(seq):
                resting.append(seq)
                seen.append(seq)
                continue
            # The common case without a call: at batch 512 this loop is what the host does between two steps.
            if seq.num_tokens > len(seq.block_table) * block_size and not self._make_room(seq):
                continue
            seq.num_scheduled_tokens = 1
            seqs.append(seq)
            seen.append(seq)
        self.running.extendleft(reversed(seen))
        return seqs, resting

    def _schedule_resting(self, resting: list[Sequence], num_free: int) -> list[Sequence]:
        """The first of them, as many as the prompts have left rows for. There are blocks, or nobody would rest."""
        seqs = resting[:num_free]
        for seq in seqs:
            self.block_manager.may_append(seq)
            seq.num_scheduled_tokens = 1
        return seqs

    def _make_room(self, seq: Sequence) -> bool:
        """Give the sequence the block that its last token opens. Where none is free, preempt: last in, first out,
        beginning with the prompt that is computed in chunks, and the sequence itself where nobody younger is left
        (False). Once alone it always fits, because no sequence grows past max_seq_len."""
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
        """Take the blocks back of a sequence that is out of its queue; it is prefilled again, completion and all."""
        self.num_preemptions += 1
        seq.status = SequenceStatus.WAITING
        seq.is_prefilling = True
        self.block_manager.deallocate(seq)
        self.waiting.appendleft(seq)
