"""Sampler: an exact draw from softmax(logits / temperature), with noise that belongs to the request, not the batch."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanovllm.kernels import use_kernels
from nanovllm.kernels.sampling.sampler import best_of_shard, pick_best
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.sampling.exponential_race import GROUP, MAX_FLOAT, group_scores, in_groups, race_scores

# The "token" of a row without one: its logits hold a NaN or +inf, or are all -inf.
NON_FINITE = -1

_COLUMNS_AT_ONCE = 2**19  # logits of all rows together, of the twin on a CPU


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
        reduce, pick = (best_of_shard, pick_best) if use_kernels(logits) else (best_of_shard_torch, pick_best_torch)
        best = reduce(logits, temperatures, seeds, positions, thresholds, self.first_column, self.shard_size)
        return pick(best.unsqueeze(0) if self.tp.size == 1 else self.tp.all_gather(best), out)


def best_of_shard_torch(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    thresholds: Tensor | None = None,
    first_column: int = 0,
    shard_size: int | None = None,
) -> Tensor:
    """Twin of `kernels.sampler.best_of_shard`, which cuts the columns into splits. Here there is one."""
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
        chosen = logits[rows]
        draw = temperatures[rows], seeds[rows], positions[rows]
        best[rows], groups = group_scores(chosen, *draw, first_column).max(dim=1)
        members = in_groups(chosen)[torch.arange(len(rows), device=logits.device), groups]
        within = race_scores(members, *draw, first_column + groups * GROUP).argmax(dim=1)
        columns[rows] = groups * GROUP + within
    # A tiny temperature makes scores infinite where the logits are finite.
    best = best.clamp(-MAX_FLOAT, MAX_FLOAT).where(highest > -math.inf, -math.inf)
    best = best.where(highest < math.inf, math.inf)
    return torch.stack((best.view(torch.int32), (first_column + columns).int()), dim=-1).unsqueeze(1)


def pick_best_torch(candidates: Tensor, out: Tensor | None = None) -> Tensor:
    """Twin of `kernels.sampler.pick_best`."""
    bits, columns = candidates.transpose(0, 1).flatten(1, 2).unbind(-1)
    scores, winner = bits.contiguous().view(torch.float32).max(dim=1)  # The first of equals: the lowest column.
    tokens = columns.gather(1, winner.unsqueeze(1)).squeeze(1).where(scores.isfinite(), NON_FINITE).long()
    return tokens if out is None else out.copy_(tokens)
