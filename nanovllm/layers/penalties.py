"""Penalties on tokens that a request holds already."""

import torch
from torch import Tensor

# A token's state is one int32: how often the completion holds it, and a bit for whether the prompt does.
IN_PROMPT = 1 << 30


def apply_penalties(logits: Tensor, state: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor) -> Tensor:
    """Penalize tokens by what came before them.

    Repetition first: it divides the positive logits of tokens of prompt and completion, and multiplies the negative
    ones (Keskar et al. 2019, arXiv:1909.05858). Then, for the completion's tokens, logit - frequency * count -
    presence.

    Args:
        logits: `[batch, vocab_size]`, any float dtype.
        state: int32 `[batch, vocab_size]`: the completion's count of each token, plus IN_PROMPT where the prompt
            holds it.
        presence: float32 `[batch]`; 0 is none.
        frequency: float32 `[batch]`; 0 is none.
        repetition: float32 `[batch]`, positive; 1 is none.

    Returns:
        float32 `[batch, vocab_size]`.
    """
    presence, frequency, repetition = presence.unsqueeze(1), frequency.unsqueeze(1), repetition.unsqueeze(1)
    logits = logits.float()
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    count = state & (IN_PROMPT - 1)
    penalized = torch.where(state != 0, repeated, logits) - count * frequency
    return penalized - (count > 0) * presence
