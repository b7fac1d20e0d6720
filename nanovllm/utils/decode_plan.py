"""How decode attention is cut into pieces of work: once a step, on the host, for all layers.

A piece is a run of one sequence's keys. A sequence is cut into splits of equal length, as few as keep them within a
limit that holds for the whole step, and the longest pieces come first: whichever multiprocessor is free takes the next,
and short pieces even out the end. The number of programs must not depend on lengths (a CUDA graph fixes it), so it is
bounded instead: the limit is chosen so that the pieces always fit.

Rows of a mixed step that are consecutive tokens of one prompt may share pieces: their keys are loaded once for all of
them.
"""

import numpy as np
import torch

SPLIT_UNIT = 64  # keys; splits are whole multiples, so that kernels may take tiles of 16, 32 or 64
MAX_SPLITS = 64  # of one sequence: its last program adds them up, one after the other
# Programs beyond one a sequence and KV head: (for up to so many sequences x KV heads, so many). More of them balance
# better, but each pays for its start, and for leaving a partial result; measured on an H200
# (benchmarks/attention_decode.py --sweep, docs/performance.md).
SPARE_PROGRAMS = ((256, 165), (1536, 264), (float("inf"), 660))

# A plan is an int32 array [num_items, 7], one piece a row: first row of the batch, or -1 = nothing to do; which split
# of how many of that sequence; first key and the one after the last; how many rows, which follow each other, and how
# many keys the first of them has in all, each of the others one more. A sequence's pieces are neighbours, in order.
PIECE_FIELDS = 7
# Tokens whose rows share pieces stand in one of a prompt's runs of so many, so that the keys which are not all of
# theirs lie in one tile, whatever its size.
SHARED_RUN = 16


def num_work_items(batch_size: int, num_kv_heads: int) -> int:
    """Pieces that a launch has programs for, a KV head; never fewer for a larger batch."""
    spare = next(spare for most_rows, spare in SPARE_PROGRAMS if batch_size * num_kv_heads <= most_rows)
    return batch_size + -(-spare // num_kv_heads)


def rows_a_piece(num_heads: int, num_kv_heads: int) -> int:
    """Up to how many rows a piece may have: tensor cores take 16 pairs of a row and a query head as fast as one, or
    nearly so."""
    return max(1, 16 // (num_heads // num_kv_heads))


def first_shared_rows(owners: np.ndarray, positions: np.ndarray, most_rows: int) -> np.ndarray:
    """Which of consecutive rows begin a piece, where up to most_rows share one: their indices, ascending.

    owners, positions: of each row, whose token it is and which; a prompt's are neighbours, and follow each other.
    """
    is_first = positions % SHARED_RUN % most_rows == 0
    is_first[:1] = True
    is_first[1:] |= owners[1:] != owners[:-1]
    return np.flatnonzero(is_first)


def plan_decode(context_lens: np.ndarray, items: np.ndarray, first_rows: np.ndarray | None = None) -> None:
    """Cut one step.

    Args:
        context_lens: keys of each row [num_rows], 0 = a padding row, which gets a piece to write zeros.
        items: int32 [num_items, PIECE_FIELDS] to fill, num_items >= num_rows + 1.
        first_rows: the rows that begin a piece, ascending, the first of them 0; those up to the next one share its
            pieces. None: each row.
    """
    if first_rows is None:
        first_rows = np.arange(len(context_lens))
    num_rows = np.diff(first_rows, append=len(context_lens))
    first_lens, lens = context_lens[first_rows], context_lens[first_rows + num_rows - 1]
    num_runs, num_items = len(lens), len(items)
    units = -(-lens // SPLIT_UNIT)
    # sum(ceil(u / n)) <= num_runs + sum(u) / n, so with this n all pieces find a place.
    most_units = max(1, -(-int(units.sum()) // (num_items - num_runs)), -(-int(units.max()) // MAX_SPLITS))
    num_splits = np.maximum(-(-units // most_units), 1)
    split_keys = -(-units // num_splits) * SPLIT_UNIT
    longest_first = np.argsort(-split_keys, kind="stable")
    num_splits = num_splits[longest_first]
    first = np.cumsum(num_splits) - num_splits
    order = np.repeat(np.arange(num_runs), num_splits)
    owner, used = longest_first[order], len(order)
    split = np.arange(used) - first[order]
    first_key = split * split_keys[owner]
    items[:used, 0] = first_rows[owner]
    items[:used, 1] = split
    items[:used, 2] = num_splits[order]
    items[:used, 3] = first_key
    items[:used, 4] = np.minimum(first_key + split_keys[owner], lens[owner])
    items[:used, 5] = num_rows[owner]
    items[:used, 6] = first_lens[owner]
    items[used:, 0] = -1


def make_plan(
    context_lens: torch.Tensor, num_kv_heads: int, num_items: int | None = None, first_rows: np.ndarray | None = None
) -> torch.Tensor:
    """The plan of a launch outside the engine, which waits for the device to read the lengths."""
    num_items = num_items or num_work_items(len(context_lens), num_kv_heads)
    items = np.empty((num_items, PIECE_FIELDS), np.int32)
    plan_decode(context_lens.cpu().numpy(), items, first_rows)
    return torch.from_numpy(items).to(context_lens.device)
