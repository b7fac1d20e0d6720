"""How decode attention is cut into pieces of work: once a step, on the host, for all layers.

A piece is (sequence, split): up to `split_keys` keys of one sequence. All splits of a step are of one length, so a
long sequence becomes more pieces, not larger ones, and the longest pieces come first: whichever multiprocessor is
free takes the next, and short pieces even out the end. The number of programs must not depend on lengths (a CUDA
graph fixes it), so it is bounded instead: split_keys is chosen so that the pieces always fit.
"""

from typing import NamedTuple

import numpy as np
import torch

SPLIT_UNIT = 64  # keys; splits are whole multiples, so that kernels may take tiles of 16, 32 or 64
MAX_SPLITS = 64  # of one sequence: the step that combines them holds one partial result of each
# Programs beyond one a sequence and KV head. More of them balance better, but each pays for its start, and for leaving
# a partial result; measured on an H200 (benchmarks/attention_decode.py --sweep, docs/performance.md).
SPARE_PROGRAMS = 660
SPARE_PROGRAMS_SMALL_BATCH = 330
SMALL_BATCH = 256  # sequences x KV heads


class DecodePlan(NamedTuple):
    """items: int32 [num_items, 2], (row of the batch, split), row -1 = nothing to do; a row's pieces are
    neighbours, in order. split_keys: int32 [1]."""

    items: torch.Tensor
    split_keys: torch.Tensor


def num_work_items(batch_size: int, num_kv_heads: int) -> int:
    """Pieces that a launch has programs for, a KV head."""
    small = batch_size * num_kv_heads <= SMALL_BATCH
    return batch_size + -(-(SPARE_PROGRAMS_SMALL_BATCH if small else SPARE_PROGRAMS) // num_kv_heads)


def plan_decode(context_lens: np.ndarray, items: np.ndarray) -> int:
    """Cut one step.

    Args:
        context_lens: keys of each sequence [batch_size], 0 = a padding row, which gets a piece to write zeros.
        items: int32 [num_items, 2] to fill, num_items >= batch_size + 1.

    Returns:
        split_keys, a multiple of SPLIT_UNIT.
    """
    batch_size, num_items = len(context_lens), len(items)
    units = -(-context_lens // SPLIT_UNIT)
    # sum(ceil(u / n)) <= batch_size + sum(u) / n, so with this n all pieces find a place.
    split_units = max(1, -(-int(units.sum()) // (num_items - batch_size)), -(-int(units.max()) // MAX_SPLITS))
    num_splits = np.maximum(-(-units // split_units), 1)
    longest_first = np.argsort(-units, kind="stable")
    num_splits = num_splits[longest_first]
    first = np.cumsum(num_splits) - num_splits
    used = int(num_splits.sum())
    items[:used, 0] = np.repeat(longest_first, num_splits)
    items[:used, 1] = np.arange(used) - np.repeat(first, num_splits)
    items[used:, 0] = -1
    return split_units * SPLIT_UNIT


def make_plan(context_lens: torch.Tensor, num_kv_heads: int, num_items: int | None = None) -> DecodePlan:
    """The plan of a launch outside the engine, which waits for the device to read the lengths."""
    num_items = num_items or num_work_items(len(context_lens), num_kv_heads)
    items = np.empty((num_items, 2), np.int32)
    split_keys = plan_decode(context_lens.cpu().numpy(), items)
    device = context_lens.device
    return DecodePlan(torch.from_numpy(items).to(device), torch.tensor([split_keys], dtype=torch.int32).to(device))
