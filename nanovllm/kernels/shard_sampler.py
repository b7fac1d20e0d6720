"""The draw of `kernels.sampler` in two halves: each rank's best in its shard of the vocabulary, and their best."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.dependent_launch import await_previous, has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.sampler import best_split, check_logits, race_splits, token_of


@triton.jit
def _combine_shard_kernel(
    best_scores, best_columns, best, num_splits, first_column, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK)
    at = row * num_splits + split
    score, column = best_split(best_scores + at, best_columns + at, split < num_splits)
    tl.store(best + row * 2, score.to(tl.int32, bitcast=True))
    tl.store(best + row * 2 + 1, column + first_column)


@triton.jit
def _pick_kernel(candidates, tokens, num_shards, batch, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    shard = tl.arange(0, BLOCK)
    scores = candidates.to(tl.pointer_type(tl.float32))  # of the same bits
    at = (shard * batch + row) * 2
    score, column = best_split(scores + at, candidates + at + 1, shard < num_shards)
    tl.store(tokens + row, token_of(score, column))


def best_of_shard(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    first_column: int,
    thresholds: Tensor | None = None,
) -> Tensor:
    """The first half of `sample` over some of the vocabulary's columns: what each row's winner among them scores.

    Args:
        logits: `[batch, columns > 0]`, as for `sample`.
        temperatures, seeds, positions: as for `sample`.
        first_column: the first of the columns in the whole vocabulary, a multiple of `layers.sampler.GROUP`.
        thresholds: as for `sample`.

    Returns:
        int32 `[batch, 2]`: the bits of the float32 score, and the winner's column in the whole vocabulary. The score is
        +inf for a row with a NaN or +inf, -inf for one of nothing else, and then the column means nothing.

    Raises:
        ValueError: as `sample`.
    """
    batch = check_logits(logits)
    best = torch.empty(batch, 2, dtype=torch.int32, device=logits.device)
    if batch == 0:
        return best
    scores, columns = race_splits(logits, temperatures, seeds, positions, thresholds, first_column)
    num_splits = scores.shape[1]
    block = triton.next_power_of_2(num_splits)
    launch = launcher(_combine_shard_kernel, (batch,), has_pdl(logits.device))
    launch(scores, columns, best, num_splits, first_column, BLOCK=block, num_warps=1)
    return best


def pick_best(candidates: Tensor, out: Tensor | None = None) -> Tensor:
    """The second half: each row's winner.

    Args:
        candidates: int32 `[shards, batch, 2]`, contiguous, in the order of columns: what `best_of_shard` returned for
            each shard of the vocabulary.
        out: int64 `[batch]`, contiguous, to write to.

    Returns:
        int64 `[batch]`, or `out`; the lowest column on a tie. `layers.sampler.NON_FINITE` for a row that has no token.
    """
    num_shards, batch, _ = candidates.shape
    tokens = torch.empty(batch, dtype=torch.int64, device=candidates.device) if out is None else out
    if batch:
        block = triton.next_power_of_2(num_shards)
        launcher(_pick_kernel, (batch,))(candidates, tokens, num_shards, batch, BLOCK=block, num_warps=1)
    return tokens
