"""How decode attention is cut into pieces of work, once a step on the host for all layers of the same window.

A piece is a run of one sequence's keys. A sequence is cut into as few splits of equal length as a limit allows that
holds for the whole step. The longest pieces come first: a multiprocessor that is free takes the next one, and short
pieces even out the end. A CUDA graph fixes the number of programs, so it must not depend on lengths: the limit is
chosen so that the pieces always fit.

In a speculative step a sequence has several rows: its last token, and tokens that are proposed to follow it. Each row
sees one key more than the row before. Such a group of rows is cut as one, so that the program of a piece computes all
of them and loads their keys once.

Plain Python: importable without Triton.
"""

from typing import NamedTuple

import numpy as np
import torch

SPLIT_UNIT = 64  # keys; a split is a whole multiple, so a kernel may load tiles of 16, 32 or 64 keys
MAX_SPLITS = 64  # of one sequence: its last program adds them up one after the other

# A plan is an int32 array [num_pieces, 5]. The fields of a piece: row of the batch, or -1 = nothing to do; which split,
# of how many of that row; first key, and the one after the last. The pieces of a row are neighbours, in order.
PIECE_FIELDS = 5

# A plan of groups is an int32 array [num_pieces, 9]. The first five fields are those of a plan, of the group instead of
# the row; the row is the group's first one. The others: the group's number of rows; where the results of its splits
# begin in the workspace, in rows; the number of keys of its first row; with a window, the first key that this row sees,
# which is negative if the window is longer. The next row sees one key more, and its window begins one key later.
GROUP_PIECE_FIELDS = 9
MAX_GROUP_ROWS = 8  # Larger groups are cut into several.

# Of all queries of a program. It has as many accumulators, in registers, and needs shared memory in proportion.
_MAX_QUERY_BYTES = 2**14


class DecodeConfig(NamedTuple):
    """Launch constants."""

    tile: int  # keys of one step of the loop, a power of two from 16 to SPLIT_UNIT
    num_warps: int
    num_stages: int  # of the load pipeline; all but one hold a tile of keys and a tile of values in shared memory
    prefetch: bool = False  # request all keys and values into L2 while a dependent launch waits; not with `tma`
    tma: bool = False  # load whole tiles with Hopper's tensor memory accelerator


def num_lanes(num_heads: int, tma: bool) -> int:
    """Columns of a program's products for this many query heads, those of all rows of a group together. Tensor cores
    compute at least 16 at once, with `tma` 8."""
    return max(8 if tma else 16, 1 << (num_heads - 1).bit_length())


def most_group_rows(max_group_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, itemsize: int) -> int:
    """Rows that one program computes, of a sequence that has up to max_group_rows in a step. 1: each row has its own.
    itemsize: bytes of a number of q."""
    rows = min(max_group_rows, MAX_GROUP_ROWS)
    while rows > 1 and num_lanes(rows * num_heads // num_kv_heads, False) * head_dim * itemsize > _MAX_QUERY_BYTES:
        rows //= 2
    return rows


class RowGroups(NamedTuple):
    """A step's rows, in groups of neighbours that belong to one sequence. A row of padding is a group."""

    first_row: np.ndarray  # int64 [num_groups]
    num_rows: np.ndarray  # int64 [num_groups], 1 or more

    @classmethod
    def of(cls, group_rows: np.ndarray, most_rows: int) -> "RowGroups":
        """Groups of at most `most_rows` rows. Larger ones are cut.

        group_rows: `[num_rows]`, how many rows the group has that begins at this row; 0 for the others of the group,
        and for rows of padding, which come last.
        """
        first_row = np.flatnonzero(group_rows)
        num_rows = group_rows[first_row].astype(np.int64)
        padding = np.arange(num_rows.sum(), len(group_rows))
        first_row, num_rows = np.append(first_row, padding), np.append(num_rows, np.ones_like(padding))
        num_parts = -(-num_rows // most_rows)
        group = np.repeat(np.arange(len(num_rows)), num_parts)
        part = np.arange(len(group)) - (np.cumsum(num_parts) - num_parts)[group]
        return cls(first_row[group] + part * most_rows, np.minimum(num_rows[group] - part * most_rows, most_rows))


def plan_decode(context_lens: np.ndarray, plan: np.ndarray, window: int | None = None) -> None:
    """Cut one step.

    Args:
        context_lens: keys of each row [num_rows], 0 = a padding row, which gets a piece to write zeros.
        plan: int32 [num_pieces, PIECE_FIELDS] to fill, num_pieces > num_rows.
        window: the number of last keys that a row attends to; None: all. A row's first piece may then begin at any key.
            The others begin at multiples of SPLIT_UNIT.
    """
    window_start = np.zeros_like(context_lens) if window is None else np.maximum(context_lens - window, 0)
    _cut(window_start, context_lens, plan, len(plan))


def plan_groups(
    context_lens: np.ndarray, groups: RowGroups, plan: np.ndarray, spare: int, window: int | None = None
) -> None:
    """Cut one speculative step.

    Args:
        context_lens, window: as in `plan_decode`. In a group they rise by one from row to row.
        plan: int32 [num_pieces, GROUP_PIECE_FIELDS] to fill.
        spare: how many more pieces than groups there may be, from 1 to num_pieces - num_rows.
    """
    lens = context_lens[groups.first_row].astype(np.int64)
    window_start = np.zeros_like(lens) if window is None else lens - window
    ends = np.where(lens > 0, lens + groups.num_rows - 1, 0)
    used = _cut(np.maximum(window_start, 0), ends, plan, len(lens) + spare)
    group, split, num_splits = plan[:used, :3].T
    num_rows = groups.num_rows[group]
    num_results = np.where(num_splits > 1, num_rows, 0)
    place = np.cumsum(num_results) - num_results
    plan[:used, 5] = num_rows
    plan[:used, 6] = place[np.arange(used) - split]
    plan[:used, 7] = lens[group]
    plan[:used, 8] = window_start[group]
    plan[:used, 0] = groups.first_row[group]


def _cut(starts: np.ndarray, ends: np.ndarray, plan: np.ndarray, num_pieces: int) -> int:
    """Fill the first PIECE_FIELDS fields of a plan for rows that see the keys from `starts` to `ends`, with at most
    num_pieces pieces. Returns how many there are."""
    num_rows = len(ends)
    first_unit = starts // SPLIT_UNIT
    units = -(-ends // SPLIT_UNIT) - first_unit
    # sum(ceil(u / n)) <= num_rows + sum(u) / n, so with this n all pieces fit.
    most_units = max(1, -(-int(units.sum()) // (num_pieces - num_rows)), -(-int(units.max()) // MAX_SPLITS))
    num_splits = np.maximum(-(-units // most_units), 1)
    split_keys = -(-units // num_splits) * SPLIT_UNIT
    longest_first = np.argsort(-split_keys, kind="stable")
    num_splits = num_splits[longest_first]
    first = np.cumsum(num_splits) - num_splits
    order = np.repeat(np.arange(num_rows), num_splits)
    row, used = longest_first[order], len(order)
    split = np.arange(used) - first[order]
    first_key = first_unit[row] * SPLIT_UNIT + split * split_keys[row]
    plan[:used, 0] = row
    plan[:used, 1] = split
    plan[:used, 2] = num_splits[order]
    plan[:used, 3] = np.maximum(first_key, starts[row])
    plan[:used, 4] = np.minimum(first_key + split_keys[row], ends[row])
    plan[used:, 0] = -1
    return used


def is_of_groups(plan: torch.Tensor) -> bool:
    """Whether `plan_groups` has filled it."""
    return plan.shape[-1] == GROUP_PIECE_FIELDS


class DecodeWorkspace:
    """What the splits of a launch pass to each other. Allocate it once, outside any CUDA graph.

    The layers of a model share one. Launches that may run at the same time (on other streams, in other engines) need a
    workspace each. A launch finds the counters at zero and leaves them at zero; nothing else outlives it.
    """

    def __init__(self, max_batch_size, num_heads, num_kv_heads, head_dim, device, num_pieces: int, group_rows: int = 1):
        """Room for every batch size up to `max_batch_size`, for `num_pieces` pieces, and for groups of `group_rows`
        rows."""
        # How many splits have finished, of each row (or the first of each group) and KV head.
        self.arrivals = torch.zeros(max_batch_size * num_kv_heads, dtype=torch.int32, device=device)
        # Of each split and row, and of each query head, the normalised output, and the log2 of its softmax sum.
        results = _most_results(max_batch_size, num_pieces, group_rows)
        self.partial = torch.empty(results * num_heads * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(results * num_heads, dtype=torch.float32, device=device)

    def check_room(
        self, batch_size: int, num_heads: int, num_kv_heads: int, head_dim: int, num_pieces: int, group_rows: int = 1
    ) -> None:
        """Raise ValueError if a launch of these sizes would write past the end."""
        heads = _most_results(batch_size, num_pieces, group_rows) * num_heads
        too_few_rows = batch_size * num_kv_heads > self.arrivals.numel()
        if too_few_rows or heads > self.lse.numel() or heads * head_dim > self.partial.numel():
            raise ValueError(
                f"workspace too small for {batch_size} rows in groups of {group_rows}, {num_heads} heads of {head_dim} "
                f"({num_kv_heads} KV heads) and {num_pieces} pieces of work"
            )


def _most_results(batch_size: int, num_pieces: int, group_rows: int) -> int:
    """Results of a row that the splits of a launch leave: one a row, and beyond that, of each piece more than rows, one
    for each row of its group."""
    return batch_size + group_rows * (num_pieces - batch_size)
