"""How decode attention is cut into pieces of work: once a step, on the host, for all layers.

A piece is a run of one sequence's keys. A sequence is cut into splits of equal length, as few as keep them within a
limit that holds for the whole step, and the longest pieces come first: whichever multiprocessor is free takes the next,
and short pieces even out the end. The number of programs must not depend on lengths (a CUDA graph fixes it), so it is
bounded instead: the limit is chosen so that the pieces always fit.
"""

import numpy as np
import torch

SPLIT_UNIT = 64  # keys; splits are whole multiples, so that kernels may take tiles of 16, 32 or 64
MAX_SPLITS = 64  # of one sequence: its last program adds them up, one after the other
# Programs beyond one a sequence and KV head: (for up to so many sequences x KV heads, so many). More of them balance
# better, but each pays for its start, and for leaving a partial result; measured on an H200
# (benchmarks/attention_decode.py --sweep, docs/performance.md).
SPARE_PROGRAMS = ((256, 165), (1536, 264), (float("inf"), 660))

# A plan is an int32 array [num_items, 5], one piece a row: row of the batch, or -1 = nothing to do; which split of how
# many of that sequence; first key and the one after the last. A sequence's pieces are neighbours, in order.
PIECE_FIELDS = 5


def num_work_items(batch_size: int, num_kv_heads: int) -> int:
    """Pieces that a launch has programs for, a KV head."""
    spare = next(spare for most_rows, spare in SPARE_PROGRAMS if batch_size * num_kv_heads <= most_rows)
    return batch_size + -(-spare // num_kv_heads)


def plan_decode(context_lens: np.ndarray, items: np.ndarray) -> None:
    """Cut one step.

    Args:
        context_lens: keys of each sequence [batch_size], 0 = a padding row, which gets a piece to write zeros.
        items: int32 [num_items, PIECE_FIELDS] to fill, num_items >= batch_size + 1.
    """
    batch_size, num_items = len(context_lens), len(items)
    units = -(-context_lens // SPLIT_UNIT)
    # sum(ceil(u / n)) <= batch_size + sum(u) / n, so with this n all pieces find a place.
    most_units = max(1, -(-int(units.sum()) // (num_items - batch_size)), -(-int(units.max()) // MAX_SPLITS))
    num_splits = np.maximum(-(-units // most_units), 1)
    split_keys = -(-units // num_splits) * SPLIT_UNIT
    longest_first = np.argsort(-split_keys, kind="stable")
    context_lens, num_splits, split_keys = (x[longest_first] for x in (context_lens, num_splits, split_keys))
    first = np.cumsum(num_splits) - num_splits
    owner = np.repeat(np.arange(batch_size), num_splits)
    used = len(owner)
    split = np.arange(used) - first[owner]
    first_key = split * split_keys[owner]
    items[:used, 0] = longest_first[owner]
    items[:used, 1] = split
    items[:used, 2] = num_splits[owner]
    items[:used, 3] = first_key
    items[:used, 4] = np.minimum(first_key + split_keys[owner], context_lens[owner])
    items[used:, 0] = -1


def make_plan(context_lens: torch.Tensor, num_kv_heads: int, num_items: int | None = None) -> torch.Tensor:
    """The plan of a launch outside the engine, which waits for the device to read the lengths."""
    num_items = num_items or num_work_items(len(context_lens), num_kv_heads)
    items = np.empty((num_items, PIECE_FIELDS), np.int32)
    plan_decode(context_lens.cpu().numpy(), items)
    return torch.from_numpy(items).to(context_lens.device)
