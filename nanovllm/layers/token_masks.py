"""Keeping tokens out of the race."""

import torch
from torch import Tensor

from nanovllm.layers.logprobs import rows_at_once

WORD_BITS = 32


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Put -inf, in place, where a bit is not set.

    Args:
        logits: `[batch, vocab_size]`, any float dtype.
        rows: int64 `[masks]`: the row of logits that each mask is for, all distinct.
        bitmask: int32 `[masks, ceil(vocab_size / 32)]`; token t is bit t % 32 of word t // 32.
    """
    vocab_size = logits.shape[1]
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    size = rows_at_once(vocab_size)
    for some, words in zip(rows.split(size), bitmask.split(size), strict=True):
        is_forbidden = ((words.unsqueeze(2) >> bits) & 1).flatten(1)[:, :vocab_size] == 0
        logits.index_copy_(0, some, logits.index_select(0, some).masked_fill_(is_forbidden, -torch.inf))
