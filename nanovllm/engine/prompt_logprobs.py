"""Log-probabilities of prompt tokens, from a prefill's hidden states."""

from collections.abc import Callable

import numpy as np
import torch

from nanovllm.engine.inputs import send_arrays
from nanovllm.engine.logprobs import LogprobRows
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.logprobs import token_logprobs

# Positions that the head works on at a time: the logits of a whole prompt would take more memory than the model.
_POSITIONS_AT_ONCE = 128


def prompt_logprobs(
    seqs: list[Sequence], hidden_states: torch.Tensor, compute_logits: Callable[[torch.Tensor], torch.Tensor]
) -> LogprobRows | None:
    """Log-probabilities of the prompt tokens that a prefill's hidden states predict, for the sequences that ask.

    Args:
        seqs: the step's sequences.
        hidden_states: [num_tokens, hidden_size] of their scheduled tokens.
        compute_logits: hidden states -> logits [.., vocab_size], of all of them.
    """
    owners: dict[int, tuple[int, int]] = {}
    pieces, targets = [], []
    start = num_entries = 0
    for row, seq in enumerate(seqs):
        first = seq.num_cached_tokens
        # The last prompt token predicts one of the completion.
        count = min(seq.num_scheduled_tokens, seq.num_prompt_tokens - 1 - first)
        if seq.needs_prompt_logits and count > 0:
            owners[row] = num_entries, num_entries + count
            num_entries += count
            pieces.append(hidden_states[start : start + count])
            targets.append(np.frombuffer(seq.tokens, np.int32)[first + 1 : first + 1 + count])
        start += seq.num_scheduled_tokens
    if not owners:
        return None
    num_top = max(seqs[row].params.prompt_logprobs for row in owners)
    tokens = send_arrays({"targets": np.concatenate(targets).astype(np.int64)}, hidden_states.device)["targets"]
    found = [
        token_logprobs(compute_logits(some), token, num_top)
        for some, token in zip(
            torch.cat(pieces).split(_POSITIONS_AT_ONCE), tokens.split(_POSITIONS_AT_ONCE), strict=True
        )
    ]
    return LogprobRows(owners, *(torch.cat(parts) for parts in zip(*found, strict=True)))
