"""CUDA graphs of the decode step, one a batch size."""

from bisect import bisect_left
from collections.abc import Callable

import torch

MAX_GRAPH_BATCH_SIZE = 512


def graph_batch_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, 8, 16, 32, 48, ... up to min(max_num_seqs, 512), which is always the last."""
    largest = min(max_num_seqs, MAX_GRAPH_BATCH_SIZE)
    sizes = [size for size in (1, 2, 4, 8, *range(16, largest + 1, 16)) if size < largest]
    return [*sizes, largest]


class DecodeGraphs:
    """Graphs of one function of the batch size, captured largest first over one memory pool."""

    def __init__(
        self,
        decode: Callable[[int], None],
        prepare: Callable[[int], None],
        sizes: list[int],
        device: torch.device,
    ):
        """decode(n) works on the first n rows of buffers that stay where they are; prepare(n) fills them with n
        rows of padding, for the run that goes before a capture."""
        self.sizes = sizes
        self.max_batch_size = sizes[-1]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            for size in reversed(sizes):
                graph = torch.cuda.CUDAGraph()
                prepare(size)
                decode(size)  # Loads kernels, or compiles them: neither is allowed in a capture.
                torch.cuda.synchronize()
                # Only this thread's calls count: NCCL's own thread may ask how an earlier collective is doing.
                with torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                    decode(size)
                self._graphs[size] = graph

    def padded(self, num_seqs: int) -> int:
        """The captured size that a batch of this size runs at."""
        return self.sizes[bisect_left(self.sizes, num_seqs)]

    def replay(self, batch_size: int) -> None:
        """Decode the buffers' first rows, as many as one of the captured sizes."""
        self._graphs[batch_size].replay()
