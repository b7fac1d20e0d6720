"""Bit masks of allowed tokens: token t is bit t % 32 of word t // 32."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from nanovllm.layers.sampling.logprobs import rows_at_once

WORD_BITS = 32


def num_mask_words(vocab_size: int) -> int:
    """int32 words of one bit mask."""
    return -(-vocab_size // WORD_BITS)


def pack_mask(is_allowed: np.ndarray) -> np.ndarray:
    """bool `[vocab_size]` as a bit mask, int32 `[num_mask_words]`."""
    bits = np.zeros(num_mask_words(len(is_allowed)) * WORD_BITS, bool)
    bits[: len(is_allowed)] = is_allowed
    return np.packbits(bits, bitorder="little").view(np.int32)


def unpack_mask(mask: np.ndarray, vocab_size: int) -> np.ndarray:
    """bool `[vocab_size]` of a bit mask: pack_mask's inverse."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little", count=vocab_size).astype(bool)


def allow(mask: np.ndarray, token: int) -> None:
    """Add a token to a bit mask, in place."""
    mask.view(np.uint32)[token // WORD_BITS] |= np.uint32(1 << token % WORD_BITS)


def forbid(mask: np.ndarray, tokens: Iterable[int]) -> None:
    """Remove tokens from a bit mask, in place."""
    words = mask.view(np.uint32)
    for token in tokens:
        words[token // WORD_BITS] &= np.uint32(~(1 << token % WORD_BITS) & 0xFFFFFFFF)


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Set logits to -inf, in place, where a bit is not set.

    Args:
        logits: `[batch, vocab_size]`, any float dtype.
        rows: int64 `[masks]`: the row of logits for each mask, all distinct.
        bitmask: int32 `[masks, num_mask_words]`.
    """
    vocab_size = logits.shape[1]
    bits = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    size = rows_at_once(vocab_size)
    for some, words in zip(rows.split(size), bitmask.split(size), strict=True):
        is_forbidden = ((words.unsqueeze(2) >> bits) & 1).flatten(1)[:, :vocab_size] == 0
        logits.index_copy_(0, some, logits.index_select(0, some).masked_fill_(is_forbidden, -torch.inf))
