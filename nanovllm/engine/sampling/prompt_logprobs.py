"""Log-probabilities of prompt tokens, from a prefill's hidden states."""

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.engine.runner.inputs import Batch
from nanovllm.engine.runner.packed_arrays import send_arrays
from nanovllm.engine.sampling.logprobs import LogprobRows
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logprobs import token_logprobs

# Positions for which logits are computed at a time: those of a whole prompt would take more memory than the model.
_POSITIONS_AT_ONCE = 128


def prompt_rows(seqs: list[Sequence]) -> list[tuple[int, int]]:
    """(first, number) of the rows of a prefill that predict prompt tokens whose log-probabilities are wanted."""
    rows, start = [], 0
    for seq in seqs:
        count = _num_targets(seq)
        if count > 0:
            rows.append((start, count))
        start += seq.num_scheduled_tokens
    return rows


def _num_targets(seq: Sequence) -> int:
    """Prompt tokens that the scheduled tokens predict and whose log-probabilities are wanted; 0 or less is none."""
    if not seq.needs_prompt_logits:
        return 0
    # The last prompt token predicts the first one of the completion.
    return min(seq.num_scheduled_tokens, seq.num_prompt_tokens - 1 - seq.num_cached_tokens)


def prompt_logprobs(
    batch: Batch, hidden_states: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
) -> LogprobRows | None:
    """Log-probabilities of the prompt tokens that batch.prompt_rows predict. All ranks compute the logits; rank 0
    has the sequences and gets the result.

    Args:
        batch: a prefill that has prompt_rows.
        hidden_states: [num_tokens, hidden_size] of all its tokens.
        compute_logits: hidden states -> logits [.., vocab_size], with every rank's part.
    """
    wanted = torch.cat([hidden_states[start : start + count] for start, count in batch.prompt_rows])
    logits = map(compute_logits, wanted.split(_POSITIONS_AT_ONCE))
    if batch.seqs is None:
        for _ in logits:
            pass
        return None
    owners: dict[int, tuple[int, int]] = {}
    targets = []
    num_entries = num_top = 0
    for row, seq in enumerate(batch.seqs):
        count = _num_targets(seq)
        if count > 0:
            owners[row] = num_entries, num_entries + count
            num_entries += count
            first = seq.num_cached_tokens + 1
            targets.append(np.frombuffer(seq.tokens, np.int32)[first : first + count])
            num_top = max(num_top, seq.params.prompt_logprobs)
    arrays = {"targets": np.concatenate(targets).astype(np.int64)}
    tokens = send_arrays(arrays, hidden_states.device)["targets"].split(_POSITIONS_AT_ONCE)
    found = [token_logprobs(some, token, num_top) for some, token in zip(logits, tokens, strict=True)]
    return LogprobRows(owners, *(torch.cat(parts) for parts in zip(*found, strict=True)))
