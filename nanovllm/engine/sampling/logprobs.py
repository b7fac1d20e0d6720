"""Log-probabilities of sampled tokens and of prompt tokens, from a step to the sequences that asked for them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from nanovllm.engine.runner.packed_arrays import send_arrays
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logprobs import token_logprobs

# Positions for which logits are computed at a time: those of a whole prompt would take more memory than the model.
_POSITIONS_AT_ONCE = 128


@dataclass(frozen=True)
class LogprobRows:
    """The result of `layers.logprobs.token_logprobs` for some tokens of a step.

    Attributes:
        owners: row of the step -> (first, end): its entries are first..end - 1.
        ids, values: [entries, 1 + num_top].
    """

    owners: dict[int, tuple[int, int]]
    ids: torch.Tensor
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


@dataclass(frozen=True)
class StepLogprobs:
    """One step's log-probabilities, on the device or, after `map`, on the host.

    Attributes:
        sampled: those of sampled tokens, one entry for each owner; None if no sequence asked.
        prompts: those of prompt tokens, each owner's in order.
    """

    sampled: LogprobRows | None = None
    prompts: LogprobRows | None = None

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "StepLogprobs":
        """The same with other tensors."""

        def mapped(rows: LogprobRows | None) -> LogprobRows | None:
            return rows and replace(rows, ids=function(rows.ids), values=function(rows.values))

        return StepLogprobs(mapped(self.sampled), mapped(self.prompts))

    def book(self, row: int, seq: Sequence) -> None:
        """Give a sequence those of the token that was sampled in its row."""
        if seq.logprobs is not None and self.sampled is not None:
            seq.logprobs += self.sampled.of(row, seq.params.logprobs)

    def book_prompts(self, seqs: list[Sequence]) -> None:
        """Give the step's sequences those of the prompt tokens that it has computed."""
        if self.prompts is None:
            return
        for row in self.prompts.owners:
            seq = seqs[row]
            seq.prompt_logprobs += self.prompts.of(row, seq.params.prompt_logprobs)
            seq.needs_prompt_logits = len(seq.prompt_logprobs) < seq.num_prompt_tokens


def num_prompt_targets(seq: Sequence) -> int:
    """Prompt tokens that the scheduled tokens predict and whose log-probabilities are wanted; 0 or less is none. All
    ranks find the same number, even where rank 0 has all of them by now."""
    if not seq.needs_prompt_logits:
        return 0
    # The last prompt token predicts the first one of the completion.
    return min(seq.num_scheduled_tokens, seq.num_prompt_tokens - 1 - seq.num_cached_tokens)


def prompt_logprobs(
    seqs: list[Sequence],
    hidden_states: torch.Tensor,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    is_wanted: bool = True,
) -> LogprobRows | None:
    """Log-probabilities of the prompt tokens that a prefill's hidden states predict, for the sequences that ask.

    Args:
        seqs: the step's sequences.
        hidden_states: [num_tokens, hidden_size] of their scheduled tokens.
        compute_logits: hidden states -> logits [.., vocab_size]. A collective: all ranks call it equally often.
        is_wanted: False on a rank other than 0, which does not know the predicted tokens.
    """
    owners: dict[int, tuple[int, int]] = {}
    pieces = []
    start = num_entries = 0
    for row, seq in enumerate(seqs):
        count = num_prompt_targets(seq)
        if count > 0:
            owners[row] = num_entries, num_entries + count
            num_entries += count
            pieces.append(hidden_states[start : start + count])
        start += seq.num_scheduled_tokens
    if not owners:
        return None
    logits = map(compute_logits, torch.cat(pieces).split(_POSITIONS_AT_ONCE))
    if not is_wanted:
        for _ in logits:
            pass
        return None
    num_top = max(seqs[row].params.prompt_logprobs for row in owners)
    targets = np.concatenate([_targets(seqs[row]) for row in owners]).astype(np.int64)
    tokens = send_arrays({"targets": targets}, hidden_states.device)["targets"]
    found = [
        token_logprobs(some, token, num_top)
        for some, token in zip(logits, tokens.split(_POSITIONS_AT_ONCE), strict=True)
    ]
    return LogprobRows(owners, *(torch.cat(parts) for parts in zip(*found, strict=True)))


def _targets(seq: Sequence) -> np.ndarray:
    first = seq.num_cached_tokens + 1
    return np.frombuffer(seq.tokens, np.int32)[first : first + num_prompt_targets(seq)]
