"""How decode attention is cut into pieces of work: once a step, on the host, for all layers.

A piece is a run of one sequence's keys. A sequence is cut into as few splits of equal length as a limit allows that
holds for the whole step. The longest pieces come first: a multiprocessor that is free takes the next one, and short
pieces even out the end. A CUDA graph fixes the number of programs, so it must not depend on lengths: the limit is
chosen so that the pieces always fit.

Plain Python: importable without Triton.
"""

import numpy as np
import torch

from nanovllm.kernels.decode_config import SPARE_PROGRAMS, SPLIT_UNIT, look_up

MAX_SPLITS = 64  # of one sequence: its last program adds them up one after the other

# A plan is an int32 array [num_items, 5], one piece a row: row of the batch, or -1 = nothing to do; which split, of how
# many of that row; first key, and the one after the last. A row's pieces are neighbours, in order.
PIECE_FIELDS = 5


def num_work_items(batch_size: int, num_kv_heads: int) -> int:
    """Pieces that a launch has programs for, a KV head; never fewer for a larger batch."""
    return batch_size + -(-look_up(SPARE_PROGRAMS, batch_size * num_kv_heads) // num_kv_heads)


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


def make_plan(context_lens: torch.Tensor, num_kv_heads: int, num_items: int | None = None) -> torch.Tensor:
    """The plan of a launch outside the engine. Waits for the device to read the lengths."""
    items = np.empty((num_items or num_work_items(len(context_lens), num_kv_heads), PIECE_FIELDS), np.int32)
    plan_decode(context_lens.cpu().numpy(), items)
    return torch.from_numpy(items).to(context_lens.device)


class DecodeWorkspace:
    """What the splits of a launch pass to each other. Allocate once, outside any CUDA graph, and pass to every launch.

    Launches that may run at the same time (on other streams, in other engines) need a workspace each. The layers of a
    model share one. A launch finds the counters at zero and leaves them at zero; nothing else outlives it.

    Attributes:
        partial: float32 `[num_items * num_heads * head_dim]`, the normalised output of each piece and query head.
        lse: float32 `[num_items * num_heads]`, the log2 of their softmax sums.
        arrivals: int32 `[max_batch_size * num_kv_heads]`, how many splits have finished.
    """

    def __init__(
        self,
        max_batch_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        device: torch.device | str,
        num_items: int | None = None,
    ):
        """Room for every batch size up to `max_batch_size` and for `num_items` pieces, by default `num_work_items`."""
        num_items = num_items or num_work_items(max_batch_size, num_kv_heads)
        self.arrivals = torch.zeros(max_batch_size * num_kv_heads, dtype=torch.int32, device=device)
        self.partial = torch.empty(num_items * num_heads * head_dim, dtype=torch.float32, device=device)
        self.lse = torch.empty(num_items * num_heads, dtype=torch.float32, device=device)

    def check_room(self, batch_size: int, num_heads: int, num_kv_heads: int, head_dim: int, num_items: int) -> None:
        """Raise ValueError if a launch of these sizes would write past the end."""
        heads = num_items * num_heads
        if (
            batch_size * num_kv_heads > self.arrivals.numel()
            or heads > self.lse.numel()
            or heads * head_dim > self.partial.numel()
        ):
            raise ValueError(
                f"workspace too small for {batch_size} sequences, {num_heads} heads of {head_dim} "
                f"({num_kv_heads} KV heads) and {num_items} pieces of work"
            )
