"""Log-probabilities of prompt tokens, from a prefill's hidden states."""

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.engine.runner.packed_arrays import send_arrays
from nanovllm.engine.sampling.logprobs import LogprobRows
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logprobs import token_logprobs

# Positions that the head works on at a time: the logits of a whole prompt would take more memory than the model.
_POSITIONS_AT_ONCE = 128


def num_prompt_targets(seq: Sequence) -> int:
    """Prompt tokens that the scheduled ones predict and whose log-probabilities are wanted; 0 or less is none. A worker
    finds the same number as rank 0, which may have learnt since that it has them all."""
    if not seq.needs_prompt_logits:
        return 0
    # The last prompt token predicts one of the completion.
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
        compute_logits: hidden states -> logits [.., vocab_size], of all of them.
        is_wanted: False on a rank that only does its part of compute_logits. It has not the tokens that are predicted.
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
