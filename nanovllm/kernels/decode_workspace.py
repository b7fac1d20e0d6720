"""What the programs of a decode attention launch share."""

import torch

from nanovllm.utils.decode_plan import num_work_items


class DecodeWorkspace:
    """What the splits of a launch pass to each other. Allocate once, outside any CUDA graph, and pass to every launch.

    Launches that may run at the same time (other streams, other engines) need a workspace each; layers of one model
    share one. A launch leaves the counters at zero, as it needs to find them; nothing else outlives it.

    Attributes:
        partial: float32, per (piece, row of it, query head) the normalised output.
        lse: float32, next to them the log2 of their softmax sums.
        arrivals: int32 `[max_batch_size * num_kv_heads]`, splits that have finished.
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
        """Room for every batch size up to `max_batch_size`, with `num_items` pieces of a row each, or half as many of
        two and so on, or with the default number."""
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
