"""CUDA graphs of the decode step, one for each of several batch sizes."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

Compute = Callable[[int], None]  # of a batch size

MAX_GRAPH_BATCH_SIZE = 512  # Larger batches run without a graph, as in nano-vLLM.


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, 32, 48, ... up to min(max_num_seqs, MAX_GRAPH_BATCH_SIZE), which is always the last."""
    largest = min(max_num_seqs, MAX_GRAPH_BATCH_SIZE)
    sizes = [size for size in (1, 2, 4, 8, *range(16, largest + 1, 16)) if size < largest]
    return [*sizes, largest]


def mixed_batch_sizes(num_rows: int, max_num_seqs: int) -> list[int]:
    """Numbers of sequences for which mixed steps have graphs: 64, 128, 192, ... up to the most that they may have."""
    largest = min(num_rows, max_num_seqs)
    return [*range(64, largest, 64), largest]


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream to capture on. torch's default is one of the first device, for all devices. There is not one for each
    engine, because cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)


class DecodeGraphs:
    """Graphs of one function of the batch size, in one memory pool. There are none before `use_sizes`.

    Attributes:
        sizes: batch sizes that have a graph, or may get one by `capture`.
        size_for: {number of sequences: the size at which they run}, for each number that has one.
        pool: the memory; None before the first graph.
    """

    def __init__(self, device: torch.device):
        self.sizes: list[int] = []
        self.size_for: dict[int, int] = {}
        self.pool: Any = None
        self._device = device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def use_sizes(self, sizes: list[int], pool: Any = None) -> None:
        """Say which graphs there may be. pool: memory of another DecodeGraphs, whose graphs never run while these do;
        None allocates some."""
        self.sizes, self.pool = sizes, pool or torch.cuda.graph_pool_handle()
        self.size_for = {n: sizes[bisect_left(sizes, n)] for n in range(1, sizes[-1] + 1)}

    def clear(self) -> None:
        """Give the graphs and their memory back. `use_sizes` begins anew."""
        self._graphs.clear()
        self.sizes, self.size_for, self.pool = [], {}, None

    def capture_all(self, decode: Compute, prepare: Compute, tell: Callable[[int, int], None]) -> None:
        """Capture each size, the largest first, so that the smaller ones fit into its memory. decode, prepare: as for
        `capture`. tell: as for `ModelRunner.capture_cudagraph`."""
        for i, size in enumerate(reversed(self.sizes)):
            tell(i, len(self.sizes))
            self.capture(size, decode, prepare)

    def capture(self, batch_size: int, decode: Compute, prepare: Compute) -> None:
        """Capture the graph of one of the sizes, unless it exists. That waits for the device and overwrites the
        buffers, so call it before a step's inputs are sent.

        Args:
            decode: computes the first n rows of buffers that stay where they are.
            prepare: fills them with padding and launches every kernel that decode(n) launches, because a capture can
                neither load nor compile one.
        """
        if batch_size in self._graphs:
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # A step in flight may still read the host's buffers, which `prepare` overwrites.
            prepare(batch_size)
            torch.cuda.synchronize()
            # thread_local, because NCCL's own thread may query an earlier collective meanwhile.
            stream = _capture_stream(self._device)
            with torch.cuda.graph(graph, self.pool, stream=stream, capture_error_mode="thread_local"):
                decode(batch_size)
        self._graphs[batch_size] = graph

    def replay(self, batch_size: int) -> None:
        self._graphs[batch_size].replay()
