"""TensorParallel: this rank's place among the processes that share one model, and what they do together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions, Store

from nanovllm.layers.parallel.peer_memory import Peers
from nanovllm.layers.parallel.residual_reducer import ResidualReducer


class CollectiveError(RuntimeError):
    """A collective failed: another rank has gone, or the connection to it has. Never the cause of a failure."""


@dataclass(frozen=True)
class TensorParallel:
    """Handed to every layer that is sharded, so that no layer asks a process-wide default for its rank.

    All ranks must call the collectives in the same order with the same shapes. On a GPU each is in stream order and can
    be captured in a CUDA graph; on a CPU it is done when it returns. They raise CollectiveError.
    """

    rank: int = 0
    size: int = 1  # ranks that share the model
    group: Any = None  # the engine's own ProcessGroupNCCL or ProcessGroupGloo
    store: Store | None = None  # where the ranks met; gone once they have started
    peers: Peers | None = None  # memory that the GPUs map of each other; None if they cannot
    reducer: ResidualReducer | None = None  # adds to the residual stream over such memory

    def shard(self, size: int, what: str) -> int:
        """This rank's part of `size`, which config.json calls `what`. Raises ValueError if there is a remainder."""
        if size % self.size:
            raise ValueError(f"tensor_parallel_size={self.size}: must divide the model's {what} ({size})")
        return size // self.size

    def shard_kv_heads(self, num_kv_heads: int, what: str = "num_key_value_heads") -> tuple[int, int]:
        """First KV head and number of KV heads of this rank: its share, or with fewer heads than ranks the one that
        its query heads read. Raises ValueError if neither works out."""
        if num_kv_heads % self.size and self.size % num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size={self.size}: must divide the model's {what} ({num_kv_heads}), or be a multiple "
                "of it"
            )
        num_heads = max(1, num_kv_heads // self.size)
        return self.rank * num_kv_heads // self.size, num_heads

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        if self.size > 1:
            _run(self.group.allreduce, [x], _in_stream_order(AllreduceOptions()))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank: [size, *x.shape]."""
        out = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        if self.size == 1:
            out[0] = x
        else:
            # Flat, because gloo accepts few shapes for a stack.
            args = out.view(-1), x.contiguous().view(-1), _in_stream_order(AllgatherOptions())
            _run(self.group._allgather_base, *args)
        return out

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """x of rank 0, in place."""
        if self.size > 1:
            _run(self.group.broadcast, [x], _in_stream_order(BroadcastOptions()))
        return x


@dataclass(frozen=True)
class RankOrderParallel(TensorParallel):
    """Sums are in the order of the ranks. How gloo and NCCL divide a tensor, and so the order, depends on its size."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            total, *others = self.all_gather(x)
            for part in others:
                total += part
            x.copy_(total)
        return x


def _in_stream_order(options):
    """NCCL then uses the current stream instead of one of its own, which saves two events between them."""
    options.asyncOp = False
    return options


def _run(collective: Callable, *args) -> None:
    try:
        work = collective(*args)
        if work is not None:
            work.wait()
    except RuntimeError as error:
        raise CollectiveError(f"{collective.__name__} among the tensor-parallel ranks failed: {error}") from error
