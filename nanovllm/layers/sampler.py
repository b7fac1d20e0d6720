"""Sampler: an exact draw from softmax(logits / temperature), with noise that belongs to the request, not the batch."""

import torch
from torch import Tensor, nn

from nanovllm.kernels.sampling.sampler import best_of_shard, pick_best
from nanovllm.layers.parallel.tensor_parallel import TensorParallel


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

    With several ranks each finds the best of its columns. Only these are gathered, and all ranks pick the best of them.
    Scores do not depend on how the columns are divided.

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
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
        thresholds: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Draws one token a row.

        A logit of -inf is never drawn. A row has no token if a logit is NaN or +inf, whatever the threshold, or if all
        logits that the threshold leaves are -inf.

        Args:
            logits: `[batch, vocab_size]`, any float dtype, rows contiguous; with several ranks this rank's columns,
                perhaps none.
            temperatures: float32 `[batch]`; 0 is greedy: the highest logit, the lowest token id on ties.
            seeds: int64 `[batch]`, all 64 bits used; None draws them from torch's generator, so that
                torch.manual_seed repeats them.
            positions: int64 `[batch]`: the token's position (or any number that the seed was not used with); None: 0.
            thresholds: float32 `[batch]`: lower logits are never drawn, see `sampling_thresholds`; None for -inf.
            out: int64 `[batch]`, contiguous, to write the tokens to.

        Returns:
            int64 `[batch]`, on the logits' device; `out`, if that is given. NON_FINITE for a row that has no token.
        """
        if seeds is None:
            seeds = torch.empty(len(logits), dtype=torch.int64, device=logits.device).random_()
        if positions is None:
            positions = torch.zeros_like(seeds)
        best = best_of_shard(logits, temperatures, seeds, positions, thresholds, self.first_column, self.shard_size)
        return pick_best(best.unsqueeze(0) if self.tp.size == 1 else self.tp.all_gather(best), out)


class NoSampler(nn.Module):
    """In the place of a Sampler where nothing is drawn: an engine that only makes vectors."""

    def forward(self, logits: Tensor, *args: Tensor, out: Tensor) -> Tensor:
        """`out`, int64 `[batch]`, all 0."""
        return out.zero_()
