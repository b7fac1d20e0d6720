"""What top-k, top-p and min-p leave of every row, as one number: the lowest logit that may still be drawn.

Top-k and top-p both ask for the lowest value v such that the logits strictly above v weigh less than a target: top-k
weighs every logit 1 and has k for its target, top-p weighs it exp(logit / T) and has p of the mass. `threshold_search`
says how that is found. The kernels:

1. `_tiles_kernel` reads all logits once, for the maximum of every tile of a row (and its mass, for top-p alone).
2. `_narrow_kernel`, for rows with top-p alone in a small batch, weighs above many pivots with each row spread over
   the GPU. The next launch adds up, in a fixed order, what the programs of this one found: nothing is atomic, so equal
   inputs give equal bits on every run and rank.
3. `_settle_kernel`, one program a row, finishes. The k-th highest maximum of a tile bounds the k-th highest logit from
   below, and (1 - p) / V of the mass bounds what top-p keeps. Mostly that leaves a few hundred candidates in a few
   tiles, which are gathered and searched in registers. Where it leaves more, the whole row is weighed until what
   remains fits.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.threshold_search import (
    MAX_FLOAT,
    NEG_INF,
    gather,
    key_of,
    narrow,
    narrow_by_row,
    pivot,
    search,
    value_of,
    weigh,
    weigh_row,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
# Low bits of a float32 that are 0 whatever value of the dtype it holds.
_SHIFTS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}


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
    tiles_at_once: int = 32
    narrow_rounds: int = 0
    narrow_columns: int = 2048
    narrow_pivots: int = 16
    settle_columns: int = 4096
    capacity: int = 1024
    tiles_warps: int = 4
    narrow_warps: int = 4
    settle_warps: int = 16


def default_config(batch: int, dtype: torch.dtype) -> ThresholdConfig:
    """The constants for a batch of `batch` rows."""
    # With a program a row, half the SMs are busy from here on, and no row has to wait for the launches of others.
    if batch > 64:
        return ThresholdConfig()
    # 17^4 > 2^16 and 17^8 > 2^32: no row has to be read by one program alone.
    return ThresholdConfig(tiles_at_once=4 if batch <= 8 else 16, narrow_rounds=8 if dtype == torch.float32 else 4)


@triton.jit
def _scale(temperature):
    return tl.minimum(_LOG2_E / temperature, 1e30)


@triton.jit
def _cuts(top_k, vocab_size):
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def _tiles_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    maxima,
    masses,
    vocab_size,
    row_stride,
    num_tiles,
    TILE: tl.constexpr,
    TILES_AT_ONCE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    use_k = _cuts(tl.load(top_ks + row), vocab_size)
    use_p = tl.load(top_ps + row) < 1.0
    if (temperature > 0) & (use_k | use_p | (tl.load(min_ps + row) > 0)):
        tiles = tl.program_id(1) * TILES_AT_ONCE + tl.arange(0, TILES_AT_ONCE)
        columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        x = tl.load(logits + row * row_stride + columns, mask=columns < vocab_size, other=NEG_INF).to(tl.float32)
        x = tl.where(x > NEG_INF, x, NEG_INF)  # no NaN
        maximum = tl.max(x, axis=1)
        tl.store(maxima + row * num_tiles + tiles, maximum, mask=tiles < num_tiles)
        if use_p & (not use_k):
            weights = weigh(x, tl.minimum(maximum, MAX_FLOAT)[:, None], _scale(temperature))
            mass = tl.sum(tl.where(x > NEG_INF, weights, 0.0), axis=1)
            tl.store(masses + row * num_tiles + tiles, mass, mask=tiles < num_tiles)


@triton.jit
def _load_maxima(maxima_row, num_tiles, TILES: tl.constexpr):
    """The maxima of a row's tiles and, no more than a finite one, of the row."""
    tiles = tl.arange(0, TILES)
    maxima = tl.load(maxima_row + tiles, mask=tiles < num_tiles, other=NEG_INF)
    return maxima, tl.minimum(tl.max(maxima, axis=0), MAX_FLOAT)


@triton.jit
def _start_top_p(
    masses_row, maxima, peak, scale, top_p, vocab_size, num_tiles, SHIFT: tl.constexpr, TILES: tl.constexpr
):
    """The target of top-p over a whole row and the lowest key that its threshold can have."""
    tiles = tl.arange(0, TILES)
    masses = tl.load(masses_row + tiles, mask=tiles < num_tiles, other=0.0)
    total = tl.sum(tl.where(maxima > NEG_INF, masses * weigh(maxima, peak, scale), 0.0), axis=0)
    # Were every logit at most this high, all of them together would weigh less than what may be left out; 0.999 is
    # more than all rounding.
    share = tl.maximum(1.0 - top_p, 0.0) * total / vocab_size * 0.999
    low = tl.minimum(key_of(peak + tl.log2(share) / scale, SHIFT), key_of(peak, SHIFT))
    return top_p * total, low


@triton.jit
def _next_bracket(bracket, partials, target, num_splits, SPLITS: tl.constexpr, PIVOTS: tl.constexpr):
    """The bracket that a round of `_narrow_kernel` leaves of the one that it stored."""
    low = tl.load(bracket)
    high = tl.load(bracket + 1)
    if low < high:
        splits = tl.arange(0, SPLITS)
        i = tl.arange(0, PIVOTS)
        at = splits[:, None] * PIVOTS + i[None, :]
        above = tl.sum(tl.load(partials + at, mask=(splits < num_splits)[:, None], other=0.0), axis=0)
        low, high = narrow(low, high, pivot(low, high, i.to(tl.int64), PIVOTS), above, target)
    return low, high


@triton.jit
def _narrow_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    maxima,
    masses,
    last_brackets,
    last_partials,
    brackets,
    partials,
    vocab_size,
    row_stride,
    num_tiles,
    num_splits,
    SHIFT: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIVOTS: tl.constexpr,
    FIRST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    top_p = tl.load(top_ps + row)
    if (temperature > 0) & (top_p < 1.0) & (not _cuts(tl.load(top_ks + row), vocab_size)):
        tile_maxima, peak = _load_maxima(maxima + row * num_tiles, num_tiles, TILES)
        if peak > NEG_INF:
            scale = _scale(temperature)
            target, low = _start_top_p(
                masses + row * num_tiles, tile_maxima, peak, scale, top_p, vocab_size, num_tiles, SHIFT, TILES
            )
            high = key_of(peak, SHIFT)
            if not FIRST:
                low, high = _next_bracket(
                    last_brackets + row * 2,
                    last_partials + row * num_splits * PIVOTS,
                    target,
                    num_splits,
                    SPLITS,
                    PIVOTS,
                )
            if split == 0:
                tl.store(brackets + row * 2, low)
                tl.store(brackets + row * 2 + 1, high)
            if low < high:
                columns = split * COLUMNS + tl.arange(0, COLUMNS)
                mask = columns < vocab_size
                x = tl.load(logits + row * row_stride + columns, mask=mask, other=NEG_INF).to(tl.float32)
                weights = weigh(x, peak, scale)
                partials_split = partials + (row * num_splits + split) * PIVOTS
                for i in tl.static_range(PIVOTS):
                    higher = x > value_of(pivot(low, high, i, PIVOTS), SHIFT)
                    tl.store(partials_split + i, tl.sum(tl.where(higher, weights, 0.0), axis=0))


@triton.jit
def _settle_kernel(
    logits,
    temperatures,
    top_ks,
    top_ps,
    min_ps,
    maxima,
    masses,
    last_brackets,
    last_partials,
    live_tiles,
    candidates,
    thresholds,
    vocab_size,
    row_stride,
    num_tiles,
    num_splits,
    SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    SPLITS: tl.constexpr,
    PIVOTS: tl.constexpr,
    NARROWED: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    top_k = tl.load(top_ks + row)
    top_p = tl.load(top_ps + row)
    min_p = tl.load(min_ps + row)
    use_k = _cuts(top_k, vocab_size)
    threshold = NEG_INF
    if (temperature > 0) & (use_k | (top_p < 1.0) | (min_p > 0)):
        tile_maxima, peak = _load_maxima(maxima + row * num_tiles, num_tiles, TILES)
        if peak > NEG_INF:
            logits_row = logits + row * row_stride
            live_row = live_tiles + row * num_tiles
            candidates_row = candidates + row * CAPACITY
            top = key_of(peak, SHIFT)
            least = key_of(tl.full([], float("-inf"), tl.float32), SHIFT)
            floor = tl.full([], float("-inf"), tl.float32)
            if min_p > 0:
                floor = peak + tl.log(tl.minimum(min_p, 1.0)) * temperature
            # Candidates gathered so far; more than CAPACITY means none.
            count = CAPACITY + 1
            kept = least
            for phase in range(2):  # top-k, then top-p of what it has kept
                low = kept
                high = kept
                target = 0.0
                scale = 0.0
                if phase == 0:
                    if use_k:
                        high = top
                        target = top_k.to(tl.float32)
                        if top_k <= num_tiles:
                            low = search(tile_maxima, tl.zeros([TILES], tl.float32) + 1.0, target, low, high, SHIFT)
                elif top_p < 1.0:
                    high = top
                    scale = _scale(temperature)
                    if not use_k:
                        target, low = _start_top_p(
                            masses + row * num_tiles,
                            tile_maxima,
                            peak,
                            scale,
                            top_p,
                            vocab_size,
                            num_tiles,
                            SHIFT,
                            TILES,
                        )
                        if NARROWED:
                            low, high = _next_bracket(
                                last_brackets + row * 2,
                                last_partials + row * num_splits * PIVOTS,
                                target,
                                num_splits,
                                SPLITS,
                                PIVOTS,
                            )
                    else:
                        below = value_of(tl.maximum(kept - 1, least), SHIFT)
                        if count <= CAPACITY:
                            x = _load_candidates(candidates_row, count, CAPACITY)
                            total = tl.sum(tl.where(x > below, weigh(x, peak, scale), 0.0), axis=0)
                        else:
                            total, _, _, _ = weigh_row(
                                logits_row, vocab_size, peak, scale, below, below, below, below, COLUMNS
                            )
                        target = top_p * total
                    low = tl.maximum(low, key_of(floor, SHIFT))
                while (low < high) & (count > CAPACITY):
                    count = gather(
                        logits_row,
                        vocab_size,
                        value_of(low, SHIFT),
                        tile_maxima,
                        live_row,
                        candidates_row,
                        TILE,
                        TILES,
                        COLUMNS,
                        CAPACITY,
                    )
                    if count > CAPACITY:
                        low, high = narrow_by_row(
                            logits_row, vocab_size, peak, scale, target, low, high, SHIFT, COLUMNS
                        )
                if low < high:
                    x = _load_candidates(candidates_row, count, CAPACITY)
                    low = search(x, weigh(x, peak, scale), target, low, high, SHIFT)
                kept = low
            threshold = tl.maximum(value_of(kept, SHIFT), floor)
    tl.store(thresholds + row, threshold)


@triton.jit
def _load_candidates(candidates_row, count, CAPACITY: tl.constexpr):
    at = tl.arange(0, CAPACITY)
    return tl.load(candidates_row + at, mask=at < count, other=NEG_INF)


def sampling_thresholds(
    logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
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
    num_tiles = triton.cdiv(vocab_size, config.tile)
    num_splits = triton.cdiv(vocab_size, config.narrow_columns)
    maxima, masses = torch.empty(2, batch, num_tiles, device=logits.device)
    live_tiles = torch.empty(batch, num_tiles, dtype=torch.int32, device=logits.device)
    candidates = torch.empty(batch, config.capacity, device=logits.device)
    brackets = torch.empty(config.narrow_rounds, batch, 2, dtype=torch.int64, device=logits.device)
    partials = torch.empty(config.narrow_rounds, batch, num_splits, config.narrow_pivots, device=logits.device)
    thresholds = torch.empty(batch, device=logits.device)
    shift = _SHIFTS[logits.dtype]
    padded = {"TILES": triton.next_power_of_2(num_tiles), "SPLITS": triton.next_power_of_2(num_splits)}
    _tiles_kernel[(batch, triton.cdiv(num_tiles, config.tiles_at_once))](
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
        _narrow_kernel[(batch, num_splits)](
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
    _settle_kernel[(batch,)](
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
    )
    return thresholds
