"""Log-probabilities on their way from a step to the sequences that asked for them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from nanovllm.engine.runner.inputs import Batch
from nanovllm.engine.runner.packed_arrays import send_arrays
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logprobs import token_logprobs

# Positions for which logits are computed at a time: those of a whole prompt would take more memory than the model.
_POSITIONS_AT_ONCE = 128


@dataclass(frozen=True)
class LogprobRows:
    """The result of `layers.logprobs.token_logprobs` for some tokens of a step."""

    owners: dict[int, tuple[int, int]]  # row of the step -> (first, end): its entries are first..end - 1
    ids: torch.Tensor  # [entries, 1 + num_top], as values
    values: torch.Tensor

    @cached_property
    def _lists(self) -> tuple[list[list[int]], list[list[float]]]:
        return self.ids.tolist(), self.values.tolist()

    def of(self, row: int, num_top: int) -> list[dict[int, float]]:
        """{token id: log-probability} for each of a row's tokens: itself first, then the num_top likeliest."""
        ids, values = self._lists
        end = 1 + num_top
        # A token that is also among the likeliest keeps its first place; both its values are the same.
        return [dict(zip(ids[i][:end], values[i][:end], strict=True)) for i in range(*self.owners[row])]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "LogprobRows":
        return replace(self, ids=function(self.ids), values=function(self.values))


@dataclass(frozen=True)
class StepLogprobs:
    """One step's log-probabilities, on the device or, after `map`, on the host."""

    sampled: LogprobRows | None = None  # of sampled tokens, one entry for each owner
    prompts: LogprobRows | None = None  # of prompt tokens, each owner's in order

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "StepLogprobs":
        """The same with other tensors."""
        return StepLogprobs(*(rows and rows.map(function) for rows in (self.sampled, self.prompts)))

    def record(self, row: int, seq: Sequence) -> None:
        """Give a sequence those of the token that was sampled in its row."""
        if seq.logprobs is not None and self.sampled is not None:
            seq.logprobs += self.sampled.of(row, seq.params.logprobs)

    def record_prompts(self, seqs: list[Sequence]) -> None:
        """Give the step's sequences those of the prompt tokens that it has computed."""
        if self.prompts is None:
            return
        for row in self.prompts.owners:
            seq = seqs[row]
            seq.prompt_logprobs += self.prompts.of(row, seq.params.prompt_logprobs)
            seq.needs_prompt_logits = len(seq.prompt_logprobs) < seq.num_prompt_tokens


def prompt_rows(seqs: list[Sequence]) -> list[tuple[int, int, int]]:
    """The tokens of a prefill that predict prompt tokens whose log-probabilities are wanted: (index of the sequence,
    first of the batch, number)."""
    rows, start = [], 0
    for i, seq in enumerate(seqs):
        if seq.needs_prompt_logits:
            # The last prompt token predicts the first one of the completion.
            count = min(seq.num_scheduled_tokens, seq.num_prompt_tokens - 1 - seq.num_cached_tokens)
            if count > 0:
                rows.append((i, start, count))
        start += seq.num_scheduled_tokens
    return rows


def prompt_logprobs(
    batch: Batch, hidden_states: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
) -> LogprobRows | None:
    """Log-probabilities of the prompt tokens that batch.prompt_rows predict. All ranks compute the logits; rank 0
    has the sequences and gets the result.

    Args:
        hidden_states: [num_tokens, hidden_size] of all the prefill's tokens.
        compute_logits: hidden states -> logits [.., vocab_size], with every rank's part.
    """
    wanted = torch.cat([hidden_states[start : start + count] for _, start, count in batch.prompt_rows])
    logits = map(compute_logits, wanted.split(_POSITIONS_AT_ONCE))
    if batch.seqs is None:
        for _ in logits:
            pass
        return None
    owners: dict[int, tuple[int, int]] = {}
    targets = []
    num_entries = num_top = 0
    for row, _, count in batch.prompt_rows:
        seq = batch.seqs[row]
        owners[row] = num_entries, num_entries + count
        num_entries += count
        first = seq.num_cached_tokens + 1
        targets.append(np.frombuffer(seq.tokens, np.int32)[first : first + count])
        num_top = max(num_top, seq.params.prompt_logprobs)
    arrays = {"targets": np.concatenate(targets).astype(np.int64)}
    tokens = send_arrays(arrays, hidden_states.device)["targets"].split(_POSITIONS_AT_ONCE)
    found = [token_logprobs(some, token, num_top) for some, token in zip(logits, tokens, strict=True)]
    return LogprobRows(owners, *(torch.cat(parts) for parts in zip(*found, strict=True)))
