"""How decode attention is cut into pieces of work, once a step on the host for all layers; and its launch constants.

A piece is a run of one sequence's keys. A sequence is cut into as few splits of equal length as a limit allows that
holds for the whole step. The longest pieces come first: a multiprocessor that is free takes the next one, and short
pieces even out the end. A CUDA graph fixes the number of programs, so it must not depend on lengths: the limit is
chosen so that the pieces always fit.

Plain Python: importable without Triton.
"""

from typing import NamedTuple

import numpy as np
import torch

SPLIT_UNIT = 64  # keys; a split is a whole multiple, so a kernel may load tiles of 16, 32 or 64 keys
MAX_SPLITS = 64  # of one sequence: its last program adds them up one after the other

# A plan is an int32 array [num_items, 5], one piece a row: row of the batch, or -1 = nothing to do; which split, of how
# many of that row; first key, and the one after the last. A row's pieces are neighbours, in order.
PIECE_FIELDS = 5


class DecodeConfig(NamedTuple):
    """Launch constants of one kernel."""

    tile: int  # keys of one step of the loop, a power of two from 16 to SPLIT_UNIT
    num_warps: int
    num_stages: int  # of the load pipeline; all but one hold a tile of keys and a tile of values in shared memory
    prefetch: bool = False  # request all keys and values into L2 while a dependent launch waits; not with `tma`
    tma: bool = False  # load whole tiles with Hopper's tensor memory accelerator


# Found by benchmarks/attention_decode.py --sweep. Each table: (largest number of sequences x KV heads, value).
# Programs beyond one a sequence and KV head. More balance the load better, but each costs its start and a partial
# result.
_SPARE_PROGRAMS = ((256, 165), (1536, 264), (float("inf"), 660))
_TMA_CONFIGS = (
    # With more stages this kernel is as fast, but whole steps are slower: shared memory then takes the place of the L1
    # cache that the matrix products of small batches read through.
    (16, DecodeConfig(64, 4, 2, prefetch=True)),
    (32, DecodeConfig(32, 1, 3, tma=True)),
    (512, DecodeConfig(64, 2, 3, tma=True)),
    (1536, DecodeConfig(32, 1, 4, tma=True)),
    (float("inf"), DecodeConfig(32, 1, 3, tma=True)),
)
# For keys of up to _TABLE_KEY_BYTES; larger ones get smaller tiles.
_CONFIGS = (
    (32, DecodeConfig(64, 4, 2, prefetch=True)),
    (1536, DecodeConfig(64, 4, 3)),
    (float("inf"), DecodeConfig(32, 2, 3)),
)
_TABLE_KEY_BYTES = 256


def _look_up(table: tuple, num_rows: int):
    """The value of the first entry whose limit is at least num_rows."""
    return next(value for limit, value in table if num_rows <= limit)


def choose_config(num_rows: int, padded_dim: int, itemsize: int, tma: bool = False) -> DecodeConfig:
    """The constants for `num_rows` = sequences x KV heads, with keys of `padded_dim` elements of `itemsize` bytes.
    tma: whether the tensor memory accelerator may be used."""
    if tma:
        return _look_up(_TMA_CONFIGS, num_rows)
    config = _look_up(_CONFIGS, num_rows)
    tile = config.tile * _TABLE_KEY_BYTES // max(padded_dim * itemsize, _TABLE_KEY_BYTES)
    return config._replace(tile=max(16, tile))


def num_work_items(batch_size: int, num_kv_heads: int) -> int:
    """Pieces that a launch has programs for, a KV head; never fewer for a larger batch."""
    return batch_size + -(-_look_up(_SPARE_PROGRAMS, batch_size * num_kv_heads) // num_kv_heads)


def plan_decode(context_lens: np.ndarray, items: np.ndarray) -> None:
    """Cut one step.

    Args:
        context_lens: keys of each row [num_rows], 0 = a padding row, which gets a piece to write zeros.
        items: int32 [num_items, PIECE_FIELDS] to fill, num_items > num_rows.
    """
    num_rows, num_items = len(context_lens), len(items)
    units = -(-context_lens // SPLIT_UNIT)
    # sum(ceil(u / n)) <= num_rows + sum(u) / n, so with this n all pieces fit.
    most_units = max(1, -(-int(units.sum()) // (num_items - num_rows)), -(-int(units.max()) // MAX_SPLITS))
    num_splits = np.maximum(-(-units // most_units), 1)
    split_keys = -(-units // num_splits) * SPLIT_UNIT
    longest_first = np.argsort(-split_keys, kind="stable")
    num_splits = num_splits[longest_first]
    first = np.cumsum(num_splits) - num_splits
    order = np.repeat(np.arange(num_rows), num_splits)
    row, used = longest_first[order], len(order)
    split = np.arange(used) - first[order]
    first_key = split * split_keys[row]
    items[:used, 0] = row
    items[:used, 1] = split
    items[:used, 2] = num_splits[order]
    items[:used, 3] = first_key
    items[:used, 4] = np.minimum(first_key + split_keys[row], context_lens[row])
    items[used:, 0] = -1


class DecodeWorkspace:
    """What the splits of a launch pass to each other. Allocate it once, outside any CUDA graph.

    The layers of a model share one. Launches that may run at the same time (on other streams, in other engines) need a
    workspace each. A launch finds the counters at zero and leaves them at zero; nothing else outlives it.
    """

    def __init__(self, max_batch_size, num_heads, num_kv_heads, head_dim, device, num_items: int | None = None):
        """Room for every batch size up to `max_batch_size` and for `num_items` pieces, by default `num_work_items`."""
        num_items = num_items or num_work_items(max_batch_size, num_kv_heads)
        # How many splits have finished, of each row and KV head.
        self.arrivals = torch.zeros(max_batch_size * num_kv_heads, dtype=torch.int32, device=device)
        # Of each piece and query head the normalised output, and the log2 of its softmax sum.
        self.partial = torch.empty(num_items * num_heads * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(num_items * num_heads, dtype=torch.float32, device=device)

    def check_room(self, batch_size: int, num_heads: int, num_kv_heads: int, head_dim: int, num_items: int) -> None:
        """Raise ValueError if a launch of these sizes would write past the end."""
        heads = num_items * num_heads
        too_few_rows = batch_size * num_kv_heads > self.arrivals.numel()
        if too_few_rows or heads > self.lse.numel() or heads * head_dim > self.partial.numel():
            raise ValueError(
                f"workspace too small for {batch_size} sequences, {num_heads} heads of {head_dim} "
                f"({num_kv_heads} KV heads) and {num_items} pieces of work"
            )
