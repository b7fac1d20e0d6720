"""CUDA graphs of the decode step, one for each of several batch sizes."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

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
    """Graphs of one function of the batch size, in one memory pool."""

    def __init__(
        self,
        decode: Callable[[int], None],
        prepare: Callable[[int], None],
        sizes: list[int],
        device: torch.device,
        pool: Any = None,
    ):
        """decode(n) computes the first n rows of buffers that stay where they are. prepare(n) fills them with padding
        and launches every kernel that decode(n) launches, because a capture can neither load nor compile one. pool:
        memory of another DecodeGraphs, whose graphs never run while these do; None allocates some."""
        self.sizes = sizes
        self.max_batch_size = sizes[-1]
        self.pool = pool or torch.cuda.graph_pool_handle()
        self._decode, self._prepare, self._device = decode, prepare, device
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture_all(self, tell: Callable[[int, int], None]) -> None:
        """Largest first, so that the smaller ones fit into its memory. tell: as for `ModelRunner.capture_cudagraph`."""
        for i, size in enumerate(reversed(self.sizes)):
            tell(i, len(self.sizes))
            self.capture(size)

    def capture(self, batch_size: int) -> None:
        """Capture the graph of one of the sizes, unless it exists. That waits for the device and overwrites the
        buffers, so call it before a step's inputs are sent."""
        if batch_size in self._graphs:
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()  # A step in flight may still read the host's buffers, which `prepare` overwrites.
            self._prepare(batch_size)
            torch.cuda.synchronize()
            # thread_local, because NCCL's own thread may query an earlier collective meanwhile.
            stream = _capture_stream(self._device)
            with torch.cuda.graph(graph, self.pool, stream=stream, capture_error_mode="thread_local"):
                self._decode(batch_size)
        self._graphs[batch_size] = graph

    def padded(self, num_seqs: int) -> int:
        """The captured size at which a batch of num_seqs runs."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def replay(self, batch_size: int) -> None:
        self._graphs[batch_size].replay()
