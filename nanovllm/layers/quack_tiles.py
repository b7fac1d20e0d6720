"""Which products quack-kernels had better compute, and in which tiles.

Measured on an H200 in whole layers of Qwen3-0.6B, 1.7B, 4B and 8B, by benchmarks/quack_products.py and, since launches
are early (`quack_early`), by another sweep (docs/performance.md); other models follow the same rule. In decode steps
what wins is one tile for each multiprocessor, all of them at once, and tiles of which no token is missing: by so much
that steps of 65 to 127 sequences take less time as 128, see `padded_batch`. A tile takes two seconds to compile the
first time, so one rule picks among few.
"""

from enum import Enum

from nanovllm.layers import decode_linear
from nanovllm.layers.quack import Tile


class Kind(Enum):
    """What is done with a product."""

    LINEAR = "linear"
    SILU = "silu"  # the activation of its two halves
    ADD = "add"  # added to the residual


# Of ten the best at the card's power limit, where long prefills are, for q, k, v, gate and up of 0.6B and 8B. The
# residual's sums are as fast by cuBLAS.
PREFILL_TILE = Tile(128, 128, (1, 2), pingpong=True)
# For 8B's at that limit: gate and up take 1 to 3 % less with it, q, k and v 2 to 5 %. 0.6B's lose; nothing between them
# was measured.
LARGE_PREFILL_TILE = Tile(256, 192, (1, 2))
_LARGE_PREFILL_WEIGHT = 1 << 24  # elements
# Of 16,000 tokens every product gains. Fewer were not measured; but a launch costs the host up to 0.1 ms, which a
# product of 2 * 2^35 operations lasts, so that the GPU need not wait for it.
_MIN_PREFILL_TOKENS = 2048
_MIN_PREFILL_WORK = 1 << 35

_MIN_DECODE_TOKENS = 17  # fewer are for `skinny_linear` or for cuBLAS
_MAX_DECODE_TOKENS = 512  # more are not captured in a graph
TOKENS_OF_THREE = 192  # the most of one tile, 64 for each of three warp groups; more than that takes several
# Of a tile, by its tokens. For 64 tokens ones of 32 columns lose: 0.4 us of a layer of 0.6B, 0.3 of 1.7B.
_COLUMNS = {
    (Kind.LINEAR, 64): (48, 64, 96, 128),
    (Kind.LINEAR, 128): (32, 48, 64, 96, 128),
    (Kind.LINEAR, 192): (32, 64, 96, 128),
    (Kind.SILU, 64): (64, 96, 128, 192),
    (Kind.SILU, 128): (64, 96, 128, 192),
    (Kind.SILU, 192): (64, 96, 128),  # of more the package gets 192 tokens wrong
}
# Weights for `decode_linear`, which splits long rows where there are few of them: the down projection of 0.6B, of which
# a layer of 64 tokens takes 0.8 us less with it. Its others, and o of 1.7B, gain here: a step of 64 sequences of 0.6B
# takes 2.5 % less, one of 40 as 64 1.5 %; fewer were not measured.
_MAX_SHORT_ROW = 2048  # elements
_MIN_SMALL_BATCH = 33  # sequences, from which on they had better be padded to 64 where weights are that small
# Gate and up of 8B, of which tiles of 128 tokens are more than there are multiprocessors: at the power limit a layer of
# 256 tokens takes 183 us with it and 191 without, one of 224 as it is 192, one of 208 167. Of 4B it gains nothing.
_LARGE_SILU_TILE = Tile(256, 192)
_MIN_LARGE_WEIGHT = 1 << 26  # elements
_MIN_LARGE_BATCH = 209  # sequences, from which on they had better be padded to 256 for it
# Of q, k and v: a layer of 0.6B takes 2 to 5 % less with it at 256, 384 and 512 tokens, one of 1.7B 3 % at 256 (more
# were not measured), one of 4B as long, one of 8B longer.
_MAX_LINEAR_WEIGHT = 1 << 22  # elements, for more than 256 tokens
_MAX_MIDDLE_LINEAR_WEIGHT = 1 << 23  # for 129 to 256
# Of sums, by the rows of their weight. 0.6B: a layer of 384 tokens takes 4 % less with it, one of 512 more. 1.7B: a
# step of 128 sequences takes 1.2 % less where two tiles of tokens share what they load of the weights, one of 256 with
# o by it 0.6 %, with down more. 8B: one of 128 2.9 % less, of 80 3.8 %, of 192 and 256 no less. 4B's down loses.
_FEW_ADD_ROWS = 1024
_SOME_ADD_ROWS = 2048
_MANY_ADD_ROWS = 4096
_SHARED_WEIGHTS = (2, 1)


def prefill_tile(kind: Kind, num_tokens: int, N: int, K: int) -> Tile | None:
    """The tile for a product `[num_tokens, K] x [N, K]^T` of a prefill; None where it is another's."""
    is_long = num_tokens >= _MIN_PREFILL_TOKENS and num_tokens * N * K >= _MIN_PREFILL_WORK
    if not is_long or kind is Kind.ADD:
        return None
    return LARGE_PREFILL_TILE if N * K >= _LARGE_PREFILL_WEIGHT else PREFILL_TILE


def decode_tile(kind: Kind, num_tokens: int, N: int, K: int, num_multiprocessors: int) -> Tile | None:
    """The tile for such a product of a decode step; None where it is another's."""
    if not _MIN_DECODE_TOKENS <= num_tokens <= _MAX_DECODE_TOKENS:
        return None
    if kind is Kind.ADD and num_tokens <= 64 and _is_small(N, K) and K > _MAX_SHORT_ROW:
        return None
    if kind is Kind.ADD:
        tile = _add_tile(num_tokens, N, K, num_multiprocessors)
    else:
        tile = _one_round(kind, num_tokens, N, K, num_multiprocessors)
    is_whole = tile is not None and num_tokens % tile.tokens == 0
    return tile if is_whole else None


def _add_tile(num_tokens: int, N: int, K: int, num_multiprocessors: int) -> Tile | None:
    if num_tokens <= 64:
        return Tile(64, 32)
    if N <= _FEW_ADD_ROWS:
        return Tile(64, 32 if num_tokens <= TOKENS_OF_THREE else 64) if num_tokens <= 384 else None
    if N <= _SOME_ADD_ROWS:
        if num_tokens <= 128:
            return Tile(64, 32, _SHARED_WEIGHTS)
        return Tile(64, 64, _SHARED_WEIGHTS) if num_tokens == 256 and K <= _MAX_SHORT_ROW else None
    is_one_round = num_tokens <= 128 and N >= _MANY_ADD_ROWS and num_multiprocessors >= 2 * -(-N // 64)
    return Tile(64, 64, _SHARED_WEIGHTS) if is_one_round else None


def _one_round(kind: Kind, num_tokens: int, N: int, K: int, num_multiprocessors: int) -> Tile | None:
    """With the fewest columns with which there are no more tiles than multiprocessors, or with half as many."""
    max_linear_weight = _MAX_MIDDLE_LINEAR_WEIGHT if num_tokens <= 256 else _MAX_LINEAR_WEIGHT
    if kind is Kind.LINEAR and num_tokens > 128 and max_linear_weight < N * K:
        return None
    if num_tokens <= TOKENS_OF_THREE:
        tokens, token_tiles = _round_up(num_tokens, 64), 1
    else:
        # 384 tokens as 512, by the same tiles, which are compiled at the start.
        tokens, token_tiles = 128, 2 if num_tokens <= 256 else 4
    # Two tiles of tokens share what they load of gate and up: at 256 tokens a layer of 0.6B takes 0.3 us less, one of
    # 1.7B 1.0, by the first sweep.
    cluster = _SHARED_WEIGHTS if kind is Kind.SILU and token_tiles > 1 else (1, 1)
    for columns in _COLUMNS[kind, tokens]:
        count = token_tiles * -(-N // columns)
        if count > num_multiprocessors:
            continue
        if tokens == 64 and columns == 192 and 5 * count < 4 * num_multiprocessors:
            # Of 4B: half as many columns, so that all multiprocessors load; a step of 64 sequences takes 1.4 % less.
            columns = 96
        return Tile(tokens, columns, cluster)
    large = _LARGE_SILU_TILE
    is_large = kind is Kind.SILU and num_tokens == large.tokens and N * K >= _MIN_LARGE_WEIGHT
    return large if is_large and -(-N // large.columns) <= num_multiprocessors else None


def padded_batch(num_seqs: int, N: int, K: int, num_multiprocessors: int) -> int:
    """How many rows a decode step of num_seqs sequences had better have, the last of them padding, in a model whose
    gate and up are a weight `[N, K]`: whole tiles of 64, 128 or 192 where gate and up have such. A layer of Qwen3-0.6B
    took 29.1 us for 80 sequences and 26.4 for 128, by the first sweep."""
    whole = _round_up(num_seqs, 64 if num_seqs <= TOKENS_OF_THREE else 128)
    tile = decode_tile(Kind.SILU, whole, N, K, num_multiprocessors)
    fewest = _MIN_SMALL_BATCH if _is_small(N, K) else _MIN_DECODE_TOKENS
    if tile == _LARGE_SILU_TILE:
        fewest = _MIN_LARGE_BATCH
    return whole if tile is not None and num_seqs >= fewest else num_seqs


def _is_small(N: int, K: int) -> bool:
    """Whether `decode_linear` takes the weight for up to 64 tokens."""
    return N * K < decode_linear.MAX_WEIGHTS


def _round_up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
