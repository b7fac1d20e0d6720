"""The three kernels of `sampling_thresholds`, which says what they do for each other."""

import triton
import triton.language as tl

from nanovllm.kernels.dependent_launch import await_previous
from nanovllm.kernels.threshold_search import (
    MAX_FLOAT,
    NEG_INF,
    gather,
    key_of,
    narrow,
    narrow_by_row,
    pivot,
    scale_of,
    search,
    value_of,
    weigh,
    weigh_row,
)


@triton.jit
def _cuts(top_k, vocab_size):
    return (top_k > 0) & (top_k < vocab_size)


@triton.jit
def tiles_kernel(
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
    PDL: tl.constexpr,
):
    await_previous(PDL)
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
            weights = weigh(x, tl.minimum(maximum, MAX_FLOAT)[:, None], scale_of(temperature))
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
    """The bracket that a round of `narrow_kernel` leaves of the one that it stored."""
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
def narrow_kernel(
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
    PDL: tl.constexpr,
):
    await_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    temperature = tl.load(temperatures + row)
    top_p = tl.load(top_ps + row)
    if (temperature > 0) & (top_p < 1.0) & (not _cuts(tl.load(top_ks + row), vocab_size)):
        tile_maxima, peak = _load_maxima(maxima + row * num_tiles, num_tiles, TILES)
        if peak > NEG_INF:
            scale = scale_of(temperature)
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
                for i in tl.range(PIVOTS, loop_unroll_factor=PIVOTS):
                    higher = x > value_of(pivot(low, high, i, PIVOTS), SHIFT)
                    tl.store(partials_split + i, tl.sum(tl.where(higher, weights, 0.0), axis=0))


@triton.jit
def settle_kernel(
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
    PDL: tl.constexpr,
):
    await_previous(PDL)
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
            maxima_row = maxima + row * num_tiles
            live_row = live_tiles + row * num_tiles
            candidates_row = candidates + row * CAPACITY
            top = key_of(peak, SHIFT)
            least = key_of(tl.full([], float("-inf"), tl.float32), SHIFT)
            floor = tl.full([], float("-inf"), tl.float32)
            if min_p > 0:
                floor = peak + tl.log(tl.minimum(min_p, 1.0)) * temperature
            tiles = tl.arange(0, TILES)
            lowest_maximum = tl.min(tl.where(tiles < num_tiles, tile_maxima, MAX_FLOAT), axis=0)
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
                            # At scale 0 each of the k highest maxima weighs 1.
                            low = key_of(lowest_maximum, SHIFT)
                            low = search(maxima_row, num_tiles, peak, scale, target, low, high, SHIFT)
                elif top_p < 1.0:
                    high = top
                    scale = scale_of(temperature)
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
                            total, _, _, _ = weigh_row(
                                candidates_row, count, peak, scale, below, below, below, below, 256
                            )
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
                    low = search(candidates_row, count, peak, scale, target, low, high, SHIFT)
                kept = low
            threshold = tl.maximum(value_of(kept, SHIFT), floor)
    tl.store(thresholds + row, threshold)
