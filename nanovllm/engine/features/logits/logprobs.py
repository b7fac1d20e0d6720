"""Log-probabilities on their way from a step to the sequences that asked for them."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import cast

import numpy as np
import torch

from nanovllm.engine.runner.packed_arrays import send_arrays
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import Step
from nanovllm.layers.sampling.logprobs import token_logprobs

# Positions for which logits are computed at a time: those of a whole prompt would take more memory than the model.
_POSITIONS_AT_ONCE = 128


@dataclass(frozen=True)
class LogprobRows:
    """The result of `layers.sampling.logprobs.token_logprobs` for some tokens of a step, on the device or the host."""

    owners: dict[int, tuple[int, int]]  # row of the step, in order -> (its entries, how many of the likeliest it wants)
    ids: torch.Tensor  # [entries, 1 + num_top + num_others], as values
    values: torch.Tensor
    may_exclude: bool = False  # Tokens that cannot be drawn have a log-probability of -inf.
    num_others: dict[int, int] = field(default_factory=dict)  # row -> how many other tokens it wants, if any

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "LogprobRows":
        """The same with other tensors."""
        return replace(self, ids=function(self.ids), values=function(self.values))

    @cached_property
    def of_samples(self) -> dict[int, float | dict[int, float]]:
        """What `Sequence.logprobs` records of each row, where rows have one entry each. A speculative step asks for it
        once for each token that its sequences get."""
        if self.ids.shape[1] == 1:  # A dict for each token would cost several times as much, in the middle of a step.
            return dict(zip(self.owners, self.values.flatten().tolist(), strict=True))
        return {row: entry for row, [entry] in self.by_row().items()}

    def by_row(self) -> dict[int, list[dict[int, float]]]:
        """{token id: log-probability} for each token of each row: the token first, then the likeliest, then others. A
        token that comes again keeps its first place; its values are the same. Tokens that cannot be drawn are left
        out."""
        entries = zip(self.ids.tolist(), self.values.tolist(), strict=True)
        found = {
            row: [dict(zip(ids[: 1 + num_top], values, strict=False)) for ids, values in islice(entries, count)]
            for row, (count, num_top) in self.owners.items()
        }
        if self.num_others:
            self._add_others(found)
        if self.may_exclude:
            found = {
                row: [{token: value for token, value in each.items() if value > -math.inf} for each in tokens]
                for row, tokens in found.items()
            }
        return found

    def _add_others(self, found: dict[int, list[dict[int, float]]]) -> None:
        """To what `by_row` has found of sampled tokens, which have one entry each."""
        first = self.ids.shape[1] - max(self.num_others.values())
        for entry, row in enumerate(self.owners):
            if row in self.num_others:
                places = slice(first, first + self.num_others[row])
                ids, values = self.ids[entry, places].tolist(), self.values[entry, places].tolist()
                found[row][0] |= zip(ids, values, strict=True)


def record_prompt_logprobs(found: LogprobRows, seqs: list[Sequence]) -> None:
    """Give a step's sequences the log-probabilities of the prompt tokens that it has computed."""
    for row, logprobs in found.by_row().items():
        seq = seqs[row]
        known = cast(list[dict[int, float] | None], seq.completion.prompt_logprobs)
        known += logprobs
        seq.completion.first_needed_logits = len(known) - 1 if len(known) < seq.num_prompt_tokens else sys.maxsize


def prompt_rows(seqs: list[Sequence]) -> list[tuple[int, int, int, int]]:
    """The tokens of a prefill that predict prompt tokens whose log-probabilities are wanted: (index of the sequence,
    first of the batch, number, first position that is predicted)."""
    rows, start = [], 0
    for i, seq in enumerate(seqs):
        num_cached, num_scheduled = seq.num_cached_tokens, seq.num_scheduled_tokens
        first = max(num_cached, seq.completion.first_needed_logits)
        # The last prompt token predicts the first one of the completion.
        end = min(num_cached + num_scheduled, seq.num_prompt_tokens - 1)
        if first < end:
            rows.append((i, start + first - num_cached, end - first, first + 1))
        start += num_scheduled
    return rows


def prompt_logprobs(
    step: Step, hidden_states: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
) -> LogprobRows | None:
    """Log-probabilities of the prompt tokens that the step's `prompt_rows` predict. All ranks compute the logits; rank
    0 has the sequences and gets the result.

    Args:
        hidden_states: [num_tokens, hidden_size] of all the prefill's tokens.
        compute_logits: hidden states -> logits [.., vocab_size], with every rank's part.
    """
    rows = step.extras["prompt rows"]
    wanted = torch.cat([hidden_states[start : start + count] for _, start, count, _ in rows])
    logits = map(compute_logits, wanted.split(_POSITIONS_AT_ONCE))
    if not step.seqs:  # a worker
        for _ in logits:
            pass
        return None
    owners, targets = {}, []
    for row, _, count, first in rows:
        seq = step.seqs[row]
        owners[row] = count, cast(int, seq.request.params.prompt_logprobs)
        targets.append(np.frombuffer(seq.token_ids, np.int32)[first : first + count])
    num_top = max(num_top for _, num_top in owners.values())
    arrays = {"targets": np.concatenate(targets).astype(np.int64)}
    tokens = send_arrays(arrays, hidden_states.device)["targets"].split(_POSITIONS_AT_ONCE)
    found = [token_logprobs(some, token, num_top) for some, token in zip(logits, tokens, strict=True)]
    ids, values = (torch.cat(parts) for parts in zip(*found, strict=True))
    return LogprobRows(owners, ids, values)
