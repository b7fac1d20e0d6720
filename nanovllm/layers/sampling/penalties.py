"""Penalties on tokens that a request holds already."""

import torch
from torch import Tensor

from nanovllm.layers.sampling.logprobs import rows_at_once

# A token's state is one int32: how often the completion holds it, and a bit for whether the prompt does.
IN_PROMPT = 1 << 30

# Penalized logits stay within this. More would be infinite once divided by a low temperature, and of two infinite
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

    Repetition comes first: it divides the positive logits of tokens of prompt and completion, and multiplies the
    negative ones (Keskar et al. 2019, arXiv:1909.05858). Then, for the completion's tokens, logit - frequency * count -
    presence. A finite logit stays finite, within MAX_LOGIT. Works without a synchronization.

    Args:
        logits: float32 `[batch, vocab_size]`.
        rows: int64 `[penalized]`: the rows of logits to work on, all distinct.
        state: int32 `[states, vocab_size]`: the count of each token in a completion, plus IN_PROMPT if the prompt holds
            it.
        state_rows: int64 `[penalized]`: the row of `state` that belongs to each.
        presence: float32 `[penalized]`; 0 is none.
        frequency: float32 `[penalized]`; 0 is none.
        repetition: float32 `[penalized]`, positive; 1 is none.
    """
    strengths = (x.unsqueeze(1) for x in (presence, frequency, repetition))
    pieces = (x.split(rows_at_once(logits.shape[1])) for x in (rows, state_rows, *strengths))
    for row, state_row, presence, frequency, repetition in zip(*pieces, strict=True):
        before, held = logits[row], state[state_row]
        after = torch.where(before > 0, before / repetition, before * repetition)
        count = held & (IN_PROMPT - 1)
        after -= count * frequency + (count > 0) * presence
        after.clamp_(-MAX_LOGIT, MAX_LOGIT)
        logits[row] = torch.where((held != 0) & before.isfinite(), after, before)
