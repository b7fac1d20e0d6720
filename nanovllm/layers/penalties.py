"""Penalties on tokens that a request holds already."""

import torch
from torch import Tensor

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.layers.logprobs import rows_at_once

if HAS_TRITON:
    from nanovllm.kernels import penalties as kernels

# A token's state is one int32: how often the completion holds it, and a bit for whether the prompt does.
IN_PROMPT = 1 << 30

# Penalized logits stay within this: more would be infinite once divided by a low temperature, and of two infinite
# logits no draw tells which is likelier.
MAX_LOGIT = 1e8


def apply_penalties(
    logits: Tensor,
    rows: Tensor,
    state: Tensor,
    state_rows: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Penalize tokens, in place, by what came before them.

    Repetition first: it divides the positive logits of tokens of prompt and completion, and multiplies the negative
    ones (Keskar et al. 2019, arXiv:1909.05858). Then, for the completion's tokens, logit - frequency * count -
    presence. A finite logit stays finite, within MAX_LOGIT.

    Args:
        logits: float32 `[batch, vocab_size]`, contiguous in its last dimension.
        rows: int64 `[penalized]`: the rows of logits to work on, all distinct.
        state: int32 `[states, vocab_size]`, contiguous: a completion's count of each token, plus IN_PROMPT where
            the prompt holds it.
        state_rows: int64 `[penalized]`: the row of `state` that belongs to each.
        presence: float32 `[penalized]`; 0 is none.
        frequency: float32 `[penalized]`; 0 is none.
        repetition: float32 `[penalized]`, positive; 1 is none.
    """
    if use_kernels(logits):
        strengths = (presence, frequency, repetition)
        kernels.apply_penalties(logits, rows, state, state_rows, *strengths, IN_PROMPT, MAX_LOGIT)
    else:
        apply_penalties_torch(logits, rows, state, state_rows, presence, frequency, repetition)


def apply_penalties_torch(
    logits: Tensor,
    rows: Tensor,
    state: Tensor,
    state_rows: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    """Twin of `kernels.penalties.apply_penalties`."""
    strengths = (x.unsqueeze(1) for x in (presence, frequency, repetition))
    pieces = (x.split(rows_at_once(logits.shape[1])) for x in (rows, state_rows, *strengths))
    for row, state_row, presence, frequency, repetition in zip(*pieces, strict=True):
        before, held = logits[row], state[state_row]
        repeated = torch.where(before > 0, before / repetition, before * repetition)
        count = held & (IN_PROMPT - 1)
        after = repeated - count * frequency - (count > 0) * presence
        after = torch.where(before.isfinite(), after.clamp(-MAX_LOGIT, MAX_LOGIT), before)
        logits[row] = torch.where(held != 0, after, before)
