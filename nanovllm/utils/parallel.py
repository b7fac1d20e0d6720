"""TensorParallel: this rank's place among the GPUs that share one model, and what they do together."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class TensorParallel:
    """Handed to every layer that is sharded, so that no layer asks a process-wide default for its rank.

    Attributes:
        rank: 0 <= rank < size.
        size: ranks that share the model; 1 needs no group and communicates nothing.
        group: the engine's own process group.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def shard(self, size: int, what: str) -> int:
        """This rank's part of `size`. Raises ValueError where the ranks do not divide it."""
        if size % self.size:
            raise ValueError(f"tensor_parallel_size={self.size} does not divide the model's {what} ({size})")
        return size // self.size

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, n] of each rank -> [rows, size * n], in the order of ranks."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
