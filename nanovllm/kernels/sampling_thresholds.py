"""What top-k, top-p and min-p leave of every row, as one number: the lowest logit that may still be drawn.

Top-k and top-p both ask for the lowest value v such that the logits strictly above v weigh less than a target: top-k
weighs every logit 1 and has k for its target, top-p weighs it exp(logit / T) and has p of the mass. `threshold_search`
says how that is found. The kernels:

1. `tiles_kernel` reads all logits once, for the maximum of every tile of a row (and its mass, for top-p alone).
2. `narrow_kernel`, for rows with top-p alone in a small batch, weighs above many pivots with each row spread over
   the GPU. The next launch adds up, in a fixed order, what the programs of this one found: nothing is atomic, so equal
   inputs give equal bits on every run and rank.
3. `settle_kernel`, one program a row, finishes. The k-th highest maximum of a tile bounds the k-th highest logit from
   below, and (1 - p) / V of the mass bounds what top-p keeps. Mostly that leaves a few hundred candidates in a few
   tiles, which are gathered and searched in registers. Where it leaves more, the whole row is weighed until what
   remains fits.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from nanovllm.kernels.dependent_launch import has_pdl
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.threshold_kernels import narrow_kernel, settle_kernel, tiles_kernel

# Low bits of a float32 that are 0 whatever value of the dtype it holds.
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
# Rounds of 16 pivots that tell all such values apart: 17^4 > 2^16, 17^5 > 2^19, 17^8 > 2^32.
_ROUNDS = {torch.float32: 8, torch.float16: 5, torch.bfloat16: 4}


class ThresholdConfig(NamedTuple):
    """Launch constants. They change thresholds by no more than the rounding of sums, whose order they set.

    Args:
        tile: columns that share a maximum. 256 16-bit logits are one 16-byte load of each lane of a warp, so that
            their maximum needs no other warp.
        tiles_at_once: tiles of a program of the first kernel.
        narrow_rounds: launches of the second kernel; 0 leaves it out.
        narrow_columns: columns of one of its programs.
        narrow_pivots: pivots of one round of it.
        settle_columns: columns that a program of the third kernel weighs, or looks for candidates, at a time.
        capacity: candidates that it keeps in registers.
        tiles_warps: warps of a program of the first kernel.
        narrow_warps: of the second.
        settle_warps: of the third.
    """

    tile: int = 256
    tiles_at_once: int = 16
    narrow_rounds: int = 0
    narrow_columns: int = 2048
    narrow_pivots: int = 16
    settle_columns: int = 2048
    capacity: int = 1024
    tiles_warps: int = 4
    narrow_warps: int = 4
    settle_warps: int = 8


def default_config(batch: int, dtype: torch.dtype) -> ThresholdConfig:
    """The constants for a batch of `batch` rows."""
    # With a program a row, over half the SMs of an H200 are busy from here on. In fewer rows a program would be alone
    # with flat logits for longer than these launches take.
    if batch > 64:
        return ThresholdConfig()
    return ThresholdConfig(tiles_at_once=4 if batch <= 8 else 16, narrow_rounds=_ROUNDS[dtype])


def sampling_thresholds(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    has_lone_top_p: bool = True,
    config: ThresholdConfig | None = None,
) -> Tensor:
    """The lowest logit of each row that top-k, top-p and min-p, in this order, leave to be drawn.

    Top-k keeps the k highest logits and all that tie with the k-th. Top-p keeps, of the softmax of what is left at the
    row's temperature, every token above which there is less than p of the mass: the one that crosses p stays, and so
    do its equals. Min-p keeps tokens with at least min_p times the highest probability. The highest logit always
    stays. NaN counts as -inf.

    No host synchronization and the same launches whatever the arguments hold: fit for CUDA graph capture. Equal
    arguments give equal bits. Scratch is a few per cent of the logits' size.

    Args:
        logits: `[batch, vocab_size]`, float32, float16 or bfloat16, any row stride, contiguous in its last dimension.
        temperatures: float32 `[batch]`; a row of 0 is greedy, and nothing is cut from it.
        top_k: int32 `[batch]`; 0 is off.
        top_p: float32 `[batch]`; 1 is off.
        min_p: float32 `[batch]`; 0 is off.
        has_lone_top_p: whether a row may have top_p without top_k; where none has, launches are left out that only
            such rows need.
        config: launch constants, for tests and benchmarks.

    Returns:
        float32 `[batch]`, in the logits' own units, before temperature: tokens with logit >= threshold stay. -inf for
        rows that nothing is cut from.

    Raises:
        ValueError: if logits are of another dtype or strided in the vocabulary, or the vocabulary is empty.
    """
    batch, vocab_size = logits.shape
    if vocab_size == 0 or (vocab_size > 1 and logits.stride(1) != 1):
        raise ValueError(f"logits must be [batch, vocab_size > 0] with contiguous rows, not {list(logits.shape)}")
    if logits.dtype not in _SHIFTS:
        raise ValueError(f"logits must be float32, float16 or bfloat16, not {logits.dtype}")
    if batch == 0:
        return torch.empty(0, device=logits.device)
    config = config or default_config(batch, logits.dtype)
    if not has_lone_top_p:
        config = config._replace(narrow_rounds=0)
    num_tiles = triton.cdiv(vocab_size, config.tile)
    num_splits = triton.cdiv(vocab_size, config.narrow_columns)
    # One tensor each: as halves of one, every odd batch would have another alignment, and so other kernels to compile.
    maxima, masses = (torch.empty(batch, num_tiles, device=logits.device) for _ in range(2))
    live_tiles = torch.empty(batch, num_tiles, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(batch, config.capacity, device=logits.device)
    brackets = torch.empty(config.narrow_rounds, batch, 2, dtype=torch.int64, device=logits.device)
    partials = torch.empty(config.narrow_rounds, batch, num_splits, config.narrow_pivots, device=logits.device)
    thresholds = torch.empty(batch, device=logits.device)
    shift = _SHIFTS[logits.dtype]
    padded = {"TILES": triton.next_power_of_2(num_tiles), "SPLITS": triton.next_power_of_2(num_splits)}
    pdl = has_pdl(logits.device)
    launcher(tiles_kernel, (batch, triton.cdiv(num_tiles, config.tiles_at_once)), pdl)(
        logits,
        temperatures,
        top_k,
        top_p,
        min_p,
        maxima,
        masses,
        vocab_size,
        logits.stride(0),
        num_tiles,
        TILE=config.tile,
        TILES_AT_ONCE=config.tiles_at_once,
        num_warps=config.tiles_warps,
    )
    last_brackets = last_partials = None
    for i in range(config.narrow_rounds):
        launcher(narrow_kernel, (batch, num_splits), pdl)(
            logits,
            temperatures,
            top_k,
            top_p,
            maxima,
            masses,
            last_brackets,
            last_partials,
            brackets[i],
            partials[i],
            vocab_size,
            logits.stride(0),
            num_tiles,
            num_splits,
            **padded,
            SHIFT=shift,
            COLUMNS=config.narrow_columns,
            PIVOTS=config.narrow_pivots,
            FIRST=i == 0,
            num_warps=config.narrow_warps,
        )
        last_brackets, last_partials = brackets[i], partials[i]
    launcher(settle_kernel, (batch,), pdl)(
        logits,
        temperatures,
        top_k,
        top_p,
        min_p,
        maxima,
        masses,
        last_brackets,
        last_partials,
        live_tiles,
        candidates,
        thresholds,
        vocab_size,
        logits.stride(0),
        num_tiles,
        num_splits,
        **padded,
        SHIFT=shift,
        TILE=config.tile,
        PIVOTS=config.narrow_pivots,
        NARROWED=config.narrow_rounds > 0,
        COLUMNS=config.settle_columns,
        CAPACITY=config.capacity,
        num_warps=config.settle_warps,
        # Two programs fit an SM, so that 264 rows are served at once; left alone it takes 165.
        maxnreg=128,
    )
    return thresholds
