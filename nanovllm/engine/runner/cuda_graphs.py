"""CUDA graphs of the decode step, one a batch size."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache

import torch

MAX_GRAPH_BATCH_SIZE = 512


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, 32, 48, ... up to min(max_num_seqs, 512), which is always the last."""
    largest = min(max_num_seqs, MAX_GRAPH_BATCH_SIZE)
    sizes = [size for size in (1, 2, 4, 8, *range(16, largest + 1, 16)) if size < largest]
    return [*sizes, largest]


def mixed_batch_sizes(num_rows: int, max_num_seqs: int) -> list[int]:
    """Of the graphs of mixed steps, from how many of the first rows tokens are drawn: 64, 128, 192, ... up to as many
    as a step may have sequences."""
    largest = min(num_rows, max_num_seqs)
    return [*range(64, largest, 64), largest]


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """What graphs of a device are captured on. torch's default is one stream for the whole process, on whichever device
    was the first: an engine on another one would capture nothing. One a device, not one an engine, because cuBLAS
    keeps a workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


class DecodeGraphs:
    """Graphs of one function of the batch size over one memory pool, captured all at once or at their first use."""

    def __init__(
        self,
        decode: Callable[[int], None],
        prepare: Callable[[int], None],
        sizes: list[int],
        device: torch.device,
        pool: tuple[int, int] | None = None,
    ):
        """decode(n) works on the first n rows of buffers that stay where they are. prepare(n) fills them with n rows of
        padding, and launches every kernel that decode(n) does: a capture may neither load nor compile one. pool:
        another DecodeGraphs' memory, whose graphs never run while these do; None takes a new one."""
        self.sizes = sizes
        self.max_batch_size = sizes[-1]
        self.pool = pool or torch.cuda.graph_pool_handle()
        self._decode, self._prepare, self._device = decode, prepare, device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture_all(self, tell: Callable[[int, int], None] | None = None) -> None:
        """Largest first, so that the smaller ones fit into its memory. tell: called with how many are captured, and of
        how many."""
        for i, size in enumerate(reversed(self.sizes)):
            if tell is not None:
                tell(i, len(self.sizes))
            self.capture(size)

    def capture(self, batch_size: int) -> None:
        """Have a graph of this size, one of the sizes. Where there is none yet, this waits for the device and
        overwrites the device's buffers, so it goes before a step's inputs are sent."""
        if batch_size in self._graphs:
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # A step in flight may still read the host's buffers, which `prepare` writes to.
            self._prepare(batch_size)
            torch.cuda.synchronize()
            # Only this thread's calls count: NCCL's own thread may ask how an earlier collective is doing.
            stream = _capture_stream(self._device)
            with torch.cuda.graph(graph, self.pool, stream=stream, capture_error_mode="thread_local"):
                self._decode(batch_size)
        self._graphs[batch_size] = graph

    def padded(self, num_seqs: int) -> int:
        """The captured size that a batch of this size runs at."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def replay(self, batch_size: int) -> None:
        """Decode the buffers' first rows, as many as one of the captured sizes."""
        self._graphs[batch_size].replay()
