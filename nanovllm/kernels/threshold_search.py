"""Searching a row of logits for a threshold: what `sampling_thresholds` is made of.

A threshold is the lowest value v such that the logits strictly above v weigh less than a target. The values that a
dtype can hold are numbered in their order, and a bracket of these keys is narrowed by weighing above several of them at
a time: the number of rounds depends on the dtype alone.
"""

import triton
import triton.language as tl

MAX_FLOAT = tl.constexpr(3.4028234663852886e38)
NEG_INF = tl.constexpr(float("-inf"))
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def key_of(value, SHIFT: tl.constexpr):
    """The key of a float32, as int64; SHIFT counts the low bits that are 0 in any value of the dtype.

    Between two values of the dtype it is either's, but it never puts two float32 in the wrong order.
    """
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # + 0.0 leaves one zero of the two
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT).to(tl.int64)


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """The float32 that a key stands for."""
    bits = (key << SHIFT).to(tl.int32)
    return tl.where(bits < 0, bits ^ (0x7FFFFFFF >> SHIFT << SHIFT), bits).to(tl.float32, bitcast=True)


@triton.jit
def scale_of(temperature):
    """What makes of a logit the exponent of 2 of its weight: log2 e / temperature, neither infinite nor 0."""
    # A tensor at the left: in Triton 3.7's interpreter a constant's quotient is a constant, whatever it is divided by.
    return tl.minimum(tl.maximum(tl.full([], _LOG2_E, tl.float32) / temperature, 1e-30), 1e30)


@triton.jit
def weigh(x, peak, scale):
    """exp2((x - peak) * scale), at most 1; 1 at scale 0. Means nothing for NaN and -inf, which are above no value."""
    return tl.exp2(tl.minimum(x - peak, 0.0) * scale)


@triton.jit
def pivot(low, high, i, PIVOTS: tl.constexpr):
    """The i-th of PIVOTS keys that part a bracket evenly. None is `high`, so each of them narrows it."""
    step = (high - low + PIVOTS) // (PIVOTS + 1)
    return tl.minimum(low + step * (i + 1), high) - 1


@triton.jit
def narrow(low, high, pivots, above, target):
    """The bracket that is left once the weights above ascending pivots are known."""
    under = above < target
    return (
        tl.maximum(low, tl.max(tl.where(under, low, pivots + 1), axis=0)),
        tl.minimum(high, tl.min(tl.where(under, pivots, high), axis=0)),
    )


@triton.jit
def search(values, count, peak, scale, target, low, high, SHIFT: tl.constexpr):
    """The threshold of a short list in memory, its key known to be in [low, high]."""
    CHUNK: tl.constexpr = 256
    while low < high:
        pivots = pivot(low, high, tl.arange(0, 16).to(tl.int64), 16)
        pivot_values = value_of(pivots, SHIFT)
        above = tl.zeros([16], tl.float32)
        for start in range(0, count, CHUNK):
            at = start + tl.arange(0, CHUNK)
            x = tl.load(values + at, mask=at < count, other=NEG_INF)
            higher = x[:, None] > pivot_values[None, :]
            above += tl.sum(tl.where(higher, weigh(x, peak, scale)[:, None], 0.0), axis=0)
        low, high = narrow(low, high, pivots, above, target)
    return low


@triton.jit
def weigh_row(logits_row, vocab_size, peak, scale, v0, v1, v2, v3, COLUMNS: tl.constexpr):
    """The weights above four values in a row, read once, COLUMNS at a time."""
    above0 = tl.zeros([COLUMNS], tl.float32)
    above1 = tl.zeros([COLUMNS], tl.float32)
    above2 = tl.zeros([COLUMNS], tl.float32)
    above3 = tl.zeros([COLUMNS], tl.float32)
    # The next columns are on their way while these are weighed: there are too few warps to hide it otherwise.
    columns = tl.arange(0, COLUMNS)
    ahead = tl.load(logits_row + columns, mask=columns < vocab_size, other=NEG_INF)
    for start in range(0, vocab_size, COLUMNS):
        x = ahead.to(tl.float32)
        columns = start + COLUMNS + tl.arange(0, COLUMNS)
        ahead = tl.load(logits_row + columns, mask=columns < vocab_size, other=NEG_INF)
        weights = weigh(x, peak, scale)
        # Written so, an addition is one predicated instruction; adding a select takes two.
        above0 = tl.where(x > v0, above0 + weights, above0)
        above1 = tl.where(x > v1, above1 + weights, above1)
        above2 = tl.where(x > v2, above2 + weights, above2)
        above3 = tl.where(x > v3, above3 + weights, above3)
    return tl.sum(above0, axis=0), tl.sum(above1, axis=0), tl.sum(above2, axis=0), tl.sum(above3, axis=0)


@triton.jit
def narrow_by_row(logits_row, vocab_size, peak, scale, target, low, high, SHIFT: tl.constexpr, COLUMNS: tl.constexpr):
    """The bracket after one pass over a row.

    Four pivots: a program that reads whole rows is bound by arithmetic, and four narrow the most for each instruction.
    """
    p0 = pivot(low, high, 0, 4)
    p1 = pivot(low, high, 1, 4)
    p2 = pivot(low, high, 2, 4)
    p3 = pivot(low, high, 3, 4)
    above0, above1, above2, above3 = weigh_row(
        logits_row,
        vocab_size,
        peak,
        scale,
        value_of(p0, SHIFT),
        value_of(p1, SHIFT),
        value_of(p2, SHIFT),
        value_of(p3, SHIFT),
        COLUMNS,
    )
    if above0 < target:
        high = p0
    elif above1 < target:
        low = p0 + 1
        high = p1
    elif above2 < target:
        low = p1 + 1
        high = p2
    elif above3 < target:
        low = p2 + 1
        high = p3
    else:
        low = p3 + 1
    return low, high


@triton.jit
def gather(
    logits_row,
    vocab_size,
    lowest,
    maxima,
    live_tiles,
    candidates,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    CAPACITY: tl.constexpr,
):
    """Stores a row's logits that are not under `lowest` to `candidates`; returns how many there are.

    Gives up when they are more than CAPACITY; the number is still over it then. Reads only tiles whose maximum is high
    enough, COLUMNS // TILE of them at a time; `live_tiles` is room for their list.
    """
    TILES_AT_ONCE: tl.constexpr = COLUMNS // TILE
    live = (maxima >= lowest) & (maxima > NEG_INF)
    num_live = tl.sum(live.to(tl.int32), axis=0)
    tl.debug_barrier()  # what other threads still read of an earlier call's list and candidates
    tl.store(live_tiles + tl.cumsum(live.to(tl.int32), axis=0) - 1, tl.arange(0, TILES), mask=live)
    tl.debug_barrier()
    count = 0
    first = 0
    while (first < num_live) & (count <= CAPACITY):
        at = first + tl.arange(0, TILES_AT_ONCE)
        tiles = tl.load(live_tiles + at, mask=at < num_live, other=0)
        columns = tiles[:, None] * TILE + tl.arange(0, TILE)[None, :]
        mask = (at < num_live)[:, None] & (columns < vocab_size)
        x = tl.load(logits_row + columns, mask=mask, other=NEG_INF).to(tl.float32)
        x = tl.reshape(x, [COLUMNS])
        taken = ((x >= lowest) & (x > NEG_INF)).to(tl.int32)
        slots = count + tl.cumsum(taken, axis=0) - 1
        tl.store(candidates + slots, x, mask=(taken > 0) & (slots < CAPACITY))
        count += tl.sum(taken, axis=0)
        first += TILES_AT_ONCE
    tl.debug_barrier()
    return count
