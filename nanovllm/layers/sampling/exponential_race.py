"""The exponential race of tokens in plain torch: its noise, and the scores of columns and of groups of columns.

`layers.sampler.Sampler` says what the race is for.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Neighbouring columns race as a group first, and then among themselves. Shards of the vocabulary are whole groups.
GROUP = 16

_WORD = 0xFFFFFFFF
MAX_FLOAT = torch.finfo(torch.float32).max
_MIN_SCALE, _MAX_SCALE = 1e-30, 1e30


def philox4x32(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor, k1: Tensor) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): four words for the counter
    c0..c3 under the key k0, k1. A word is an int64 that holds an unsigned 32-bit number; all broadcast."""
    for _ in range(10):
        # The product of two words may set int64's sign bit, but its bits are right. c1 and c3 keep their high halves,
        # because the mask after the next xor removes them. This saves a third of the passes.
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product2 >> 32) ^ c1 ^ k0) & _WORD, product2
        c2, c3 = ((product0 >> 32) ^ c3 ^ k1) & _WORD, product0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def log2_exponential(bits: Tensor) -> Tensor:
    """log2(E) of the Exponential(1) draw E = -log(1 - u), u = (bits + 0.5) / 2^32, in float32, for 32-bit words.

    Among 150,000 tokens the winner's E is near 1e-5, where 1 - u has lost most of u's digits. So below 1/32 this uses
    the logarithm's series in u (whose fifth term is under 2e-7 of the sum there). u stays below 1, so E is finite.
    """
    u = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return torch.where(u < 0.03125, series, torch.log2(1.0 - u).mul_(-math.log(2.0))).log2_()


def race_scores(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, first_column: int | Tensor = 0
) -> Tensor:
    """The scores of columns: (logit / T - log E) / log 2, each with an E of its own. float32 `[batch, num_columns]`;
    NaN for a NaN logit. Word 0 of E's Philox counter is column // 4, and column % 4 selects one of the outputs.

    logits: `[batch, num_columns]`, any float dtype. temperatures: float32 `[batch]`, positive. seeds, positions: int64
    `[batch]`. first_column: of all rows or of each, int64 `[batch]`; in the whole vocabulary, a multiple of 4.
    """
    num_columns = logits.shape[1]
    first = torch.as_tensor(first_column, device=logits.device).reshape(-1, 1)
    quads = first // 4 + torch.arange((num_columns + 3) // 4, device=logits.device)
    bits = torch.stack(_random_words(quads, 0, seeds, positions), dim=-1).flatten(1)[:, :num_columns]
    return logits.float() * _scale(temperatures) - log2_exponential(bits)


def group_scores(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, first_column: int = 0
) -> Tensor:
    """The scores of groups of GROUP columns: log2 of the sum of their weights 2^(logit / T * log2 e), less log2 E.
    float32 `[batch, num_groups]`; -inf for a group whose logits are all -inf, NaN for one that holds a NaN.

    The arguments are those of `race_scores`, with first_column a multiple of GROUP. E comes from the first output of
    the Philox block whose counter has the group's number in word 0.
    """
    exponents = in_groups(logits.float()) * _scale(temperatures).unsqueeze(2)
    # Finite, so that no infinity is subtracted from another.
    highest = exponents.amax(dim=2).clamp_(-MAX_FLOAT, MAX_FLOAT)
    scores = (exponents - highest.unsqueeze(2)).exp2_().sum(dim=2).log2_() + highest
    groups = first_column // GROUP + torch.arange(exponents.shape[1], device=logits.device).unsqueeze(0)
    return scores - log2_exponential(_random_words(groups, 1, seeds, positions)[0])


def _random_words(index: Tensor, purpose: int, seeds: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    """The Philox blocks whose counters begin with `index` `[1 or batch, n]` and `purpose`: four words `[batch, n]`."""
    seeds, positions = seeds.unsqueeze(1), positions.unsqueeze(1)
    counter = (index, torch.full_like(index, purpose), positions & _WORD, positions >> 32 & _WORD)
    return philox4x32(*counter, seeds & _WORD, seeds >> 32 & _WORD)


def _scale(temperatures: Tensor) -> Tensor:
    # Neither infinite nor 0, because 0 * inf is NaN.
    return (math.log2(math.e) / temperatures).clamp(_MIN_SCALE, _MAX_SCALE).unsqueeze(1)


def in_groups(logits: Tensor) -> Tensor:
    """`[batch, num_groups, GROUP]`, padded with -inf."""
    missing = -logits.shape[1] % GROUP
    whole = F.pad(logits, (0, missing), value=-math.inf) if missing else logits  # A pad of nothing would copy.
    return whole.unflatten(1, (-1, GROUP))
