"""SpeculativeScheduler: decode steps that also try tokens which are likely to come next."""

import time
from collections.abc import Iterable
from typing import Any

from nanovllm.config import Config
from nanovllm.engine.features.logits.thinking import num_valid
from nanovllm.engine.features.speculation.budget import Acceptance, Pace, Record, StepTimes, choose_counts
from nanovllm.engine.features.speculation.suffix_index import Proposal, SuffixProposer
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step

# Looking for proposals may take this share of plain steps. So with many sequences it is done once in several steps.
_MAX_LOOKING_SHARE = 0.01


class SpeculativeScheduler(Scheduler):
    """A Scheduler whose decode steps may have further rows, in which the model also computes tokens that its sequences
    are likely to get next: those that followed the same tokens earlier in the same text, or in other samples of the
    prompt (suffix decoding, Oliaro et al. 2024; prompt lookup, Saxena 2023).

    A proposed token is drawn, with its request's own noise, as if the tokens proposed before it were right. As long as
    they are, it is what plain steps would give. So the text does not depend on proposals.

    Steps with proposals do not overlap: the next one begins where the accepted tokens end. Where none pays, steps are
    plain and overlap.

    Attributes:
        proposer: what finds the proposals.
    """

    def __init__(self, config: Config, step_times: StepTimes, **options: Any):
        """options: Scheduler's."""
        self._records: dict[int, Record] = {}  # by seq_id, of sequences that were looked at
        super().__init__(config, **options)
        self._max_tokens = config.max_speculative_tokens
        self._pace, self._acceptance = Pace(step_times), Acceptance()
        self._last_step: tuple[float, int, bool] | None = None  # when it was launched, its rows, whether with proposals
        self._overlaps = config.overlap_steps
        self._wait = 0  # plain steps before the next look

    def reset(self) -> None:
        super().reset()
        self._records.clear()
        self._proposals: list[Proposal | None] = []  # of the step in flight, as its `proposed`
        self.proposer = SuffixProposer()

    # -- the next step -----------------------------------------------------------------------------------------------

    def schedule(self) -> Step:
        step = super().schedule()
        is_plain = step.is_prefill or step.num_prefilled or any(seq.pending_row >= 0 for seq in step.seqs)
        if not is_plain:
            self._propose(step)
        self._learn_pace(step)
        return step

    def _learn_pace(self, step: Step) -> None:
        """Note the time since the last step, if that and this one follow each other as they do in a long run."""
        now, before = time.perf_counter(), self._last_step
        is_decode, is_speculative = not step.is_prefill and not step.num_prefilled, bool(step.proposed)
        overlaps = any(seq.pending_row >= 0 for seq in step.seqs)
        if before is not None and is_decode and (before[2] or not is_speculative):
            start, num_rows, was_speculative = before
            self._pace.learn(num_rows, was_speculative, now - start)
        is_usual = is_decode and (is_speculative or overlaps == self._overlaps)
        num_rows = len(step.seqs) + sum(map(len, step.proposed))
        self._last_step = (now, num_rows, is_speculative) if is_usual else None

    def _propose(self, step: Step) -> None:
        """Give the step rows of proposed tokens, if that pays."""
        proposals = [self._usable(seq, self._look(seq)) for seq in step.seqs]
        chances = [
            [] if proposal is None else self._acceptance.chances(proposal, self._records[seq.seq_id])
            for seq, proposal in zip(step.seqs, proposals, strict=True)
        ]
        counts = choose_counts(chances, len(step.seqs), self._pace)
        self._proposals = []
        for seq, proposal, count in zip(step.seqs, proposals, counts, strict=True):
            tokens = [] if proposal is None else proposal.tokens[: self._fitting(seq, count)]
            self._proposals.append(proposal._replace(tokens=tokens) if proposal is not None and tokens else None)
        if any(self._proposals):
            step.proposed = [[] if proposal is None else proposal.tokens for proposal in self._proposals]

    def _look(self, seq: Sequence) -> Proposal | None:
        """What may follow the tokens of a sequence that the host knows."""
        length = seq.num_known_tokens
        ends = min(seq.num_prompt_tokens + seq.max_tokens, self.max_seq_len)
        num_tokens = min(self._max_tokens, ends - length - 1)
        if num_tokens < 1:
            return None
        record = self._records.setdefault(seq.seq_id, Record())
        if record.guess is not None:
            self._judge(seq, record, record.guess, length)
        return self.proposer.propose(seq, length, num_tokens)

    def _judge(self, seq: Sequence, record: Record, guess: tuple[int, Proposal], length: int) -> None:
        """Learn from a proposal that was not tried, by the tokens that have come since."""
        first, proposal = guess
        record.guess = None
        came = seq.token_ids[first : min(length, first + len(proposal.tokens))].tolist()
        num_right = _num_equal(came, proposal.tokens)
        self._acceptance.learn(proposal, record, num_right, min(num_right + 1, len(came)))

    def _usable(self, seq: Sequence, proposal: Proposal | None) -> Proposal | None:
        """The proposed tokens that its form allows, up to an end. The host must know all tokens of the sequence."""
        if proposal is None:
            return None
        tokens = proposal.tokens
        tokens = tokens[: num_valid(seq, tokens)]
        end = next((i for i, token in enumerate(tokens) if token in seq.request.end_token_ids), len(tokens))
        return proposal._replace(tokens=tokens[: end + 1]) if tokens else None

    def _fitting(self, seq: Sequence, count: int) -> int:
        """As many of `count` tokens as there are free blocks for, and cells for the states after them. Nobody is
        preempted for them."""
        if not count:
            return 0
        manager = self.block_manager
        manager.extend(seq, seq.num_tokens + count)
        count = min(count, len(seq.block_table) * manager.block_size - seq.num_tokens)
        return manager.cells.lend(seq, count)

    # -- after a step ------------------------------------------------------------------------------------------------

    def advance(self, step: Step, seqs: Any = None, rows: Any = None) -> None:
        """Of a step with proposals, what is sure: each sequence gets one token."""
        super().advance(step, step.seqs, step.heads)
        if step.proposed:
            self.awaits_tokens = True
            return
        self._wait -= 1
        if self._wait <= 0:
            self.awaits_tokens = self._may_pay(self.running)

    def _may_pay(self, seqs: Iterable[Sequence]) -> bool:
        """Whether proposals are likely to pay in the step after the one in flight, for which they must wait: the token
        that is on its way has to be right first."""
        start = time.thread_time()  # In which the machine may have been busy with others does not count.
        chances, num_seqs = [], 0
        for seq in seqs:
            num_seqs += 1
            proposal = self._look(seq)
            if proposal is not None:
                self._records[seq.seq_id].guess = seq.num_known_tokens, proposal
                chances.append(self._acceptance.chances(proposal, self._records[seq.seq_id])[1:])
        pays = num_seqs > 0 and any(choose_counts(chances, num_seqs, self._pace))
        if not pays and num_seqs > 0:
            seconds = time.thread_time() - start
            self._wait = int(seconds / (_MAX_LOOKING_SHARE * self._pace.seconds(num_seqs, False))) + 1
        return pays

    def record(self, step: Step, token_ids: list[int], seqs: Any = None, rows: Any = None) -> list[Sequence]:
        """The rows of accepted tokens advance here, one row of each sequence after the other."""
        if not step.proposed:
            return super().record(step, token_ids)
        num_before, heads = self.num_generated_tokens, step.heads
        self.awaits_tokens = False
        num_right = self._judge_all(step, token_ids)
        seqs, index = step.seqs, range(len(step.seqs))
        finished = super().record(step, token_ids, seqs, heads)
        for i in range(1, max(num_right) + 1):
            going_on = [k for k in index if num_right[k] >= i]  # Those that have ended are skipped as ever.
            of_step = [seqs[k] for k in going_on], [heads[k] + i for k in going_on]
            for seq in of_step[0]:
                seq.num_scheduled_tokens = 1
            super().advance(step, *of_step)
            finished += super().record(step, token_ids, *of_step)
        for seq, accepted in zip(seqs, num_right, strict=True):
            if not seq.is_finished:
                self.block_manager.cells.commit(seq, accepted)
        step.num_tokens = num_before - self.num_generated_tokens
        return finished

    def _judge_all(self, step: Step, token_ids: list[int]) -> list[int]:
        """How many of each sequence's proposed tokens are right. Learns from that."""
        found = []
        for seq, proposal, head in zip(step.seqs, self._proposals, step.heads, strict=True):
            num_right = 0
            if proposal is not None and not seq.is_finished:
                tokens = proposal.tokens
                num_right = _num_equal(token_ids[head : head + len(tokens)], tokens)
                self._acceptance.learn(proposal, self._records[seq.seq_id], num_right, min(num_right + 1, len(tokens)))
                self.num_proposed_tokens += len(tokens)
                self.num_accepted_tokens += num_right
            found.append(num_right)
        return found

    def _end(self, seq: Sequence, finish_reason: str) -> None:
        super()._end(seq, finish_reason)
        if finish_reason in ("stop", "length"):
            self.proposer.finish(seq)
        self.proposer.forget(seq)
        self._records.pop(seq.seq_id, None)


def _num_equal(tokens: list[int], others: list[int]) -> int:
    """How many of the first are equal."""
    num_equal = 0
    for token, other in zip(tokens, others, strict=False):
        if token != other:
            break
        num_equal += 1
    return num_equal
