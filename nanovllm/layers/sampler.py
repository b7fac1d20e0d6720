"""Sampler: an exact draw from softmax(logits / temperature), with noise that belongs to the request, not the batch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels import HAS_TRITON, use_kernels
from nanovllm.utils.parallel import TensorParallel

if HAS_TRITON:
    from nanovllm.kernels.sampler import best_of_shard, pick_best, sample

# The "token" of a row without one: its logits hold a NaN or +inf, or are all -inf.
NON_FINITE = -1

# Neighbouring columns race as a group first, and then among themselves. Shards of the vocabulary are whole groups.
GROUP = 16

_WORD = 0xFFFFFFFF
_MAX = torch.finfo(torch.float32).max
_MIN_SCALE, _MAX_SCALE = 1e-30, 1e30
_COLUMNS_AT_ONCE = 2**19


def philox4x32(
    c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: Tensor | int, k1: Tensor | int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").

    Args:
        c0: int64, holding an unsigned 32-bit word of the counter, as c1..c3 do; all broadcast.
        c1: second word.
        c2: third word.
        c3: fourth word.
        k0: first word of the key, likewise unsigned.
        k1: second word.

    Returns:
        Four int64 tensors of unsigned 32-bit words.
    """
    for _ in range(10):
        # The product of two words may set int64's sign bit, but its bits are right. c1 and c3 keep their high halves,
        # because the mask after the next xor removes them. This saves a third of the passes.
        product0, product2 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product2 >> 32) ^ c1 ^ k0) & _WORD, product2
        c2, c3 = ((product0 >> 32) ^ c3 ^ k1) & _WORD, product0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD


def log2_exponential(bits: Tensor) -> Tensor:
    """log2(E) of the Exponential(1) draw E = -log(1 - u), u = (bits + 0.5) / 2^32, in float32.

    Among 150,000 tokens the winner's E is near 1e-5, where 1 - u has lost most of u's digits. So below 1/32 this uses
    the logarithm's series in u (whose fifth term is under 2e-7 of the sum there). u stays below 1, so E is finite.

    Args:
        bits: int64, unsigned 32-bit words.
    """
    u = ((bits.float() + 0.5) * 2.0**-32).clamp_(max=1.0 - 2.0**-24)
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0 + u * 0.25)))
    return torch.where(u < 0.03125, series, torch.log2(1.0 - u).mul_(-math.log(2.0))).log2_()


def race_scores(
    logits: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor, first_column: int | Tensor = 0
) -> Tensor:
    """The scores of columns: (logit / T - log E) / log 2, each with an E of its own.

    Args:
        logits: `[batch, num_columns]`, any float dtype.
        temperatures: float32 `[batch]`, positive.
        seeds: int64 `[batch]`: the Philox keys.
        positions: int64 `[batch]`: words 2 and 3 of the Philox counter. Word 0 is column // 4, word 1 is 0, and
            column % 4 selects one of the four outputs.
        first_column: the first of these columns in the whole vocabulary, of all rows or of each, int64 `[batch]`; a
            multiple of 4.

    Returns:
        float32 `[batch, num_columns]`; NaN for a NaN logit.
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

    The arguments are those of `race_scores`, with first_column a multiple of GROUP. E comes from the first output of
    the Philox block whose counter has the group's number in word 0 and 1 in word 1.

    Returns:
        float32 `[batch, num_groups]`; -inf for a group whose logits are all -inf, NaN for one that holds a NaN.
    """
    exponents = _in_groups(logits.float()) * _scale(temperatures).unsqueeze(2)
    # Finite, so that no infinity is subtracted from another.
    highest = exponents.amax(dim=2).clamp_(-_MAX, _MAX)
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


def _in_groups(logits: Tensor) -> Tensor:
    """`[batch, num_groups, GROUP]`, padded with -inf."""
    missing = -logits.shape[1] % GROUP
    whole = F.pad(logits, (0, missing), value=-math.inf) if missing else logits  # A pad of nothing would copy.
    return whole.unflatten(1, (-1, GROUP))


def sample_torch(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    thresholds: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Twin of `kernels.sampler.sample`."""
    best = best_of_shard_torch(logits, temperatures, seeds, positions, thresholds)
    return pick_best_torch(best.unsqueeze(0), out)


def best_of_shard_torch(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    thresholds: Tensor | None = None,
    first_column: int = 0,
    shard_size: int | None = None,
) -> Tensor:
    """Twin of `kernels.sampler.best_of_shard`, with one split."""
    if shard_size is not None and logits.shape[1] < shard_size:  # There may be none.
        logits = F.pad(logits, (0, shard_size - logits.shape[1]), value=-math.inf)
    if thresholds is not None:
        logits = logits.masked_fill(logits.float() < thresholds.unsqueeze(1), -math.inf)  # A NaN stays.
    highest, columns = logits.max(dim=1)  # NaN, if any is.
    highest = highest.float()
    best = highest.clone()
    # A few rows at a time, so that intermediate results stay in a CPU's cache.
    rows_at_once = max(1, _COLUMNS_AT_ONCE // logits.shape[1])
    for rows in (temperatures > 0).nonzero().squeeze(1).split(rows_at_once):
        chosen, *draw = (x[rows] for x in (logits, temperatures, seeds, positions))
        best[rows], groups = group_scores(chosen, *draw, first_column).max(dim=1)
        members = _in_groups(chosen)[torch.arange(len(rows), device=logits.device), groups]
        within = race_scores(members, *draw, first_column + groups * GROUP).argmax(dim=1)
        columns[rows] = groups * GROUP + within
    # A tiny temperature makes scores infinite where the logits are finite.
    best = best.clamp(-_MAX, _MAX).where(highest > -math.inf, -math.inf)
    best = best.where(highest < math.inf, math.inf)
    return torch.stack((best.view(torch.int32), (first_column + columns).int()), dim=-1).unsqueeze(1)


def pick_best_torch(candidates: Tensor, out: Tensor | None = None) -> Tensor:
    """Twin of `kernels.sampler.pick_best`."""
    bits, columns = candidates.transpose(0, 1).flatten(1, 2).unbind(-1)
    scores, winner = bits.contiguous().view(torch.float32).max(dim=1)  # The first of equals: the lowest column.
    tokens = columns.gather(1, winner.unsqueeze(1)).squeeze(1).where(scores.isfinite(), NON_FINITE).long()
    return tokens if out is None else out.copy_(tokens)


class Sampler(nn.Module):
    """Draws from softmax(logits / T) by an exponential race, on the device, without a softmax.

    With independent E ~ Exponential(1) for every token, argmax(p / E) is distributed as p (the race of exponential
    clocks, known in its logarithm as the Gumbel-max trick). It equals argmax(logit / T - log E), which needs no
    normalization and one pass over the logits.

    An E for each of 150,000 tokens takes longer than reading their logits. The first of several clocks to ring is
    itself a clock, whose rate is the sum of theirs, and which of them rings does not depend on when. So groups of
    GROUP neighbouring tokens race, with the sums of their weights, and then the tokens of the group that won.

    The noise is Philox4x32-10 with the request's seed as key. Word 0 of its counter is column // 4 or the group's
    number, word 1 is 0 for columns and 1 for groups, and the position is the rest. So a request's token at a position
    depends on its logits, temperature and seed alone, never on the batch, its order, or a preemption in between.

    With several ranks each finds the best of its columns, only these are gathered, and every rank picks the same
    winner. Scores do not depend on how the columns are divided.

    Args:
        tp: this rank's place.
        first_column: the first column of this rank's logits, in the whole vocabulary.
        shard_size: the most columns that a rank has; needed with several ranks.
    """

    def __init__(self, tp: TensorParallel | None = None, first_column: int = 0, shard_size: int | None = None):
        super().__init__()
        self.tp = tp or TensorParallel()
        self.first_column = first_column
        self.shard_size = shard_size

    def forward(
        self,
        logits: Tensor,
        temperatures: Tensor,
        seeds: Tensor,
        positions: Tensor,
        thresholds: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Draws one token a row.

        A logit of -inf is never drawn. A row has no token if a logit is NaN or +inf, whatever the threshold, or if all
        logits that the threshold leaves are -inf.

        Args:
            logits: `[batch, vocab_size]`, any float dtype, rows contiguous; with several ranks this rank's columns,
                of which there may be none.
            temperatures: float32 `[batch]`; 0 is greedy: the highest logit, the lowest token id on ties.
            seeds: int64 `[batch]`, all 64 bits used.
            positions: int64 `[batch]`: the token's position (or any number that the seed was not used with).
            thresholds: float32 `[batch]`: lower logits are never drawn, see `sampling_thresholds`; None for -inf.
            out: int64 `[batch]`, contiguous, to write the tokens to.

        Returns:
            int64 `[batch]`, on the logits' device; `out`, if that is given. NON_FINITE for a row that has no token.
        """
        on_gpu = use_kernels(logits)
        if self.tp.size == 1:
            return (sample if on_gpu else sample_torch)(logits, temperatures, seeds, positions, thresholds, out)
        reduce, pick = (best_of_shard, pick_best) if on_gpu else (best_of_shard_torch, pick_best_torch)
        draw = logits, temperatures, seeds, positions, thresholds
        return pick(self.tp.all_gather(reduce(*draw, self.first_column, self.shard_size)), out)
