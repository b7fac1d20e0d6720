"""Launch constants of decode attention, measured on an H200 (benchmarks/attention_decode.py --sweep, whole workloads).

They are keyed by the number of sequences x KV heads and by the bytes of a key. Plain Python: importable without Triton.
"""

from typing import NamedTuple

SPLIT_UNIT = 64  # keys; a split is a whole multiple, so a kernel may load tiles of 16, 32 or 64 keys


class DecodeConfig(NamedTuple):
    """Launch constants of one kernel.

    Attributes:
        tile: keys of one step of the loop, a power of two from 16 to SPLIT_UNIT.
        num_warps: warps of a program.
        num_stages: of the load pipeline. All but one hold a tile of keys and a tile of values in shared memory.
        prefetch: request all keys and values into L2 while a dependent launch waits. Not with `tma`.
        tma: load whole tiles with Hopper's tensor memory accelerator.
    """

    tile: int
    num_warps: int
    num_stages: int
    prefetch: bool = False
    tma: bool = False


# Each table: (largest number of sequences x KV heads, value).
# Programs beyond one a sequence and KV head. More balance the load better, but each costs its start and a partial
# result.
SPARE_PROGRAMS = ((256, 165), (1536, 264), (float("inf"), 660))
_TMA_CONFIGS = (
    # With more stages this kernel is as fast, but whole steps are slower: shared memory then takes the place of the L1
    # cache that the matrix products of small batches read through.
    (16, DecodeConfig(64, 4, 2, prefetch=True)),
    (32, DecodeConfig(32, 1, 3, tma=True)),
    (512, DecodeConfig(64, 2, 3, tma=True)),
    (1536, DecodeConfig(32, 1, 4, tma=True)),
    (float("inf"), DecodeConfig(32, 1, 3, tma=True)),
)
# For keys of up to 256 bytes; larger ones get smaller tiles.
_CONFIGS = (
    (32, DecodeConfig(64, 4, 2, prefetch=True)),
    (1536, DecodeConfig(64, 4, 3)),
    (float("inf"), DecodeConfig(32, 2, 3)),
)
_TABLE_KEY_BYTES = 256


def look_up(table: tuple, num_rows: int):
    """The value of the first entry whose limit is at least num_rows."""
    return next(value for limit, value in table if num_rows <= limit)


def choose_config(num_rows: int, padded_dim: int, itemsize: int, tma: bool = False) -> DecodeConfig:
    """The constants for `num_rows` = sequences x KV heads, with keys of `padded_dim` elements of `itemsize` bytes.
    tma: whether the tensor memory accelerator may be used."""
    if tma:
        return look_up(_TMA_CONFIGS, num_rows)
    config = look_up(_CONFIGS, num_rows)
    tile = config.tile * _TABLE_KEY_BYTES // max(padded_dim * itemsize, _TABLE_KEY_BYTES)
    return config._replace(tile=max(16, tile))
