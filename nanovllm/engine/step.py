"""Step: one forward pass, as a table of rows, from `Scheduler.schedule` to `Scheduler.record`."""

import time
from array import array
from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence

_POLL_SECONDS = 50e-6


class StepKind(NamedTuple):
    """Decode steps of one kind have CUDA graphs of their own."""

    is_mixed: bool = False
    shares_reads: bool = False  # Attention reads the keys of a sequence's rows once for all of them.
    gives_logits: bool = False  # It ends at the logits; else a token is sampled behind them.

    @property
    def text(self) -> str:
        """For the log, behind a noun."""
        return " of mixed steps" if self.is_mixed else " of speculative steps" if self.shares_reads else ""


PLAIN_STEP = StepKind()


class Rows(NamedTuple):
    """A step's rows, without padding. Each is a token of a sequence, for which the layers compute keys and values.

    In a prefill a sequence's rows follow each other. Other steps have first the rows whose logits are sampled, and then
    those of their prompts that are not, each in the order of the sequences and of their positions.

    Attributes:
        owners: int64 [num_rows], the index in `Step.seqs` of each row's sequence.
        positions: int64 [num_rows], in the sequence.
        tokens: int64 [num_rows], the inputs. That of a sequence with a pending_row is in the device's memory.
        heads: int64 [num_seqs], the first row of each sequence whose logits are sampled.
        num_sampled: how many rows' logits are sampled.
    """

    owners: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    heads: np.ndarray
    num_sampled: int

    def of_sequences(self, values: list) -> np.ndarray:
        """The value of each sampled row's sequence, for a step that is no prefill. values: one for each sequence."""
        return np.array(values)[self.owners[: self.num_sampled]]

    @classmethod
    def of(cls, step: "Step") -> "Rows":
        """Expand a step's runs: a sequence, its first position, and how many rows follow each other there."""
        seqs, n = step.seqs, len(step.seqs)
        if not step.num_prefilled and not step.proposed:
            each = np.arange(n)
            positions = np.array([seq.num_tokens for seq in seqs], np.int64) - 1
            return cls(each, positions, np.array([seq.last_token for seq in seqs], np.int64), each, n)
        tokens, first, count, sampled = array("i"), list[int](), list[int](), list[int]()
        for i, seq in enumerate(seqs):  # never a loop over tokens: the device waits for the first step of a batch
            if seq.is_prefill:
                first.append(seq.num_cached_tokens)
                count.append(seq.num_scheduled_tokens)
                sampled.append(1)
                tokens += seq.token_ids[first[i] : first[i] + count[i]]
            else:
                proposed = step.proposed[i] if step.proposed else ()
                first.append(seq.num_tokens - 1)
                count.append(1 + len(proposed))
                sampled.append(count[i])
                tokens.append(seq.last_token)
                tokens.extend(proposed)
        counts, num_sampled = np.array(count), np.array(sampled)
        ends = np.cumsum(counts)
        owners = np.repeat(np.arange(n), counts)
        positions = np.arange(len(tokens)) + np.repeat(np.array(first) + counts - ends, counts)
        inputs = np.frombuffer(tokens, np.int32).astype(np.int64)
        if step.is_prefill:
            return cls(owners, positions, inputs, ends - 1, n)
        if step.num_prefilled:
            is_unsampled = np.arange(len(tokens)) < np.repeat(ends - num_sampled, counts)
            order = np.argsort(is_unsampled, kind="stable")
            owners, positions, inputs = owners[order], positions[order], inputs[order]
        return cls(owners, positions, inputs, np.cumsum(num_sampled) - num_sampled, int(num_sampled.sum()))


class StepLogits(NamedTuple):
    """What rank 0 samples a step's tokens from, on the device until the next step is launched: a row for each token."""

    logits: torch.Tensor  # [num_sampled, vocab_size], any float dtype
    temperatures: torch.Tensor  # float32
    seeds: torch.Tensor  # int64
    positions: torch.Tensor  # int64
    fed_tokens: torch.Tensor | None  # int64, the inputs, which the host may not know yet; None in a prefill
    columns: dict[str, torch.Tensor]  # of features, by name


@dataclass(eq=False)
class Step:
    """What a forward pass computes, its inputs, and what comes of it.

    A row is a token of a sequence. Rows are described by runs: each of `seqs` has its last token, or if it is being
    prefilled its scheduled tokens; and after them the tokens that are proposed to follow. `Rows.of` expands them.

    The scheduler fills the first group, `ModelRunner.prepare` the second, `ModelRunner.launch` and `sample` the last. A
    worker gets it pickled, without the sequences. It unpacks into (seqs, is_prefill), as in nano-vLLM.
    """

    seqs: list[Sequence]  # in the order of their rows; empty on a worker
    is_prefill: bool  # otherwise a decode step, in which prompts may be computed too (a mixed step)
    num_prefilled: int = 0  # how many of seqs are prefilled: all in a prefill, the last ones in a mixed step
    num_tokens: int = 0  # as `LLMEngine.step` returns it
    proposed: list[list[int]] = field(default_factory=list)  # of each sequence; empty in a step without any

    rows: Rows | None = None  # None on a worker
    num_sampled: int = 0  # how many tokens are sampled
    num_rows: int = 0  # rows that the layers compute, padding included
    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # the columns, on the host
    extras: dict[str, Any] = field(default_factory=dict)  # what else a feature tells all ranks of the step, by its name
    kind: StepKind = PLAIN_STEP  # of a decode step
    graph_size: int = 0  # batch size of the CUDA graph that computes it; 0 for none
    buffer: int = -1  # rank 0: which host buffer of `DecodeInputs` holds the arrays
    needs_logits: bool = False  # A request asks for more than a temperature: rank 0 samples from gathered logits.
    waits_for_tokens: bool = False  # The tokens that a request allows depend on the step before.

    logits: StepLogits | None = None  # with needs_logits, until the tokens are sampled
    errors: dict[int, str] = field(default_factory=dict)  # {row: why no token can be sampled from it}
    # On the way to the host; meaningful after `wait`.
    tokens: torch.Tensor = field(init=False)  # int64 [num_sampled]; meaningless where a prefill goes on
    event: torch.cuda.Event | None = None  # recorded behind them; None on a CPU
    logprobs: Any = None  # a LogprobRows of the sampled tokens that ask for them
    prompt_logprobs: Any = None  # likewise, of prompt tokens

    def __iter__(self) -> Iterator[Any]:
        return iter((self.seqs, self.is_prefill))

    @property
    def heads(self) -> AbstractSequence[int]:
        """Of each sequence, which of the sampled tokens is the first of its own."""
        if not self.proposed:
            return range(len(self.seqs))
        return [*accumulate((1 + len(tokens) for tokens in self.proposed), initial=0)][:-1]

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"seqs": [], "proposed": [], "rows": None, "buffer": -1}

    def wait(self, check_workers: Callable[[], None] | None = None) -> list[int]:
        """The sampled tokens, once the device has computed them. check_workers: with several ranks, raises if one of
        them has died, for which the device would wait in vain."""
        if self.event is not None:
            while check_workers is not None and not self.event.query():
                check_workers()
                time.sleep(_POLL_SECONDS)  # The next step is under way already, so sleeping too long costs nothing.
            self.event.synchronize()
        return self.tokens.tolist()
