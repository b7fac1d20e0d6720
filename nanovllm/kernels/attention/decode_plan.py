"""How decode attention is cut into pieces of work, once a step on the host for all layers of the same window.

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

# A plan is an int32 array [num_pieces, 5]. The fields of a piece: row of the batch, or -1 = nothing to do; which split,
# of how many of that row; first key, and the one after the last. The pieces of a row are neighbours, in order.
PIECE_FIELDS = 5


class DecodeConfig(NamedTuple):
    """Launch constants."""

    tile: int  # keys of one step of the loop, a power of two from 16 to SPLIT_UNIT
    num_warps: int
    num_stages: int  # of the load pipeline; all but one hold a tile of keys and a tile of values in shared memory
    prefetch: bool = False  # request all keys and values into L2 while a dependent launch waits; not with `tma`
    tma: bool = False  # load whole tiles with Hopper's tensor memory accelerator


def plan_decode(context_lens: np.ndarray, plan: np.ndarray, window: int | None = None) -> None:
    """Cut one step.

    Args:
        context_lens: keys of each row [num_rows], 0 = a padding row, which gets a piece to write zeros.
        plan: int32 [num_pieces, PIECE_FIELDS] to fill, num_pieces > num_rows.
        window: the number of last keys that a row attends to; None: all. A row's first piece may then begin at any key.
            The others begin at multiples of SPLIT_UNIT.
    """
    num_rows, num_pieces = len(context_lens), len(plan)
    window_start = np.zeros_like(context_lens) if window is None else np.maximum(context_lens - window, 0)
    first_unit = window_start // SPLIT_UNIT
    units = -(-context_lens // SPLIT_UNIT) - first_unit
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
    plan[:used, 3] = np.maximum(first_key, window_start[row])
    plan[:used, 4] = np.minimum(first_key + split_keys[row], context_lens[row])
    plan[used:, 0] = -1


class DecodeWorkspace:
    """What the splits of a launch pass to each other. Allocate it once, outside any CUDA graph.

    The layers of a model share one. Launches that may run at the same time (on other streams, in other engines) need a
    workspace each. A launch finds the counters at zero and leaves them at zero; nothing else outlives it.
    """

    def __init__(self, max_batch_size, num_heads, num_kv_heads, head_dim, device, num_pieces: int):
        """Room for every batch size up to `max_batch_size`, and for `num_pieces` pieces."""
        # How many splits have finished, of each row and KV head.
        self.arrivals = torch.zeros(max_batch_size * num_kv_heads, dtype=torch.int32, device=device)
        # Of each piece and query head the normalised output, and the log2 of its softmax sum.
        self.partial = torch.empty(num_pieces * num_heads * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(num_pieces * num_heads, dtype=torch.float32, device=device)

    def check_room(self, batch_size: int, num_heads: int, num_kv_heads: int, head_dim: int, num_pieces: int) -> None:
        """Raise ValueError if a launch of these sizes would write past the end."""
        heads = num_pieces * num_heads
        too_few_rows = batch_size * num_kv_heads > self.arrivals.numel()
        if too_few_rows or heads > self.lse.numel() or heads * head_dim > self.partial.numel():
            raise ValueError(
                f"workspace too small for {batch_size} sequences, {num_heads} heads of {head_dim} "
                f"({num_kv_heads} KV heads) and {num_pieces} pieces of work"
            )
