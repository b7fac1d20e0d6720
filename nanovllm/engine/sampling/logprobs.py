"""Log-probabilities on their way from a step to the sequences that asked for them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from nanovllm.engine.sequence import Sequence


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
