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

    def __init__(self, decode: Callable[[int], None], sizes: list[int], device: torch.device):
        """decode(n) works on the first n rows of buffers that stay where they are."""
        self.sizes = sizes
        self.max_batch_size = sizes[-1]
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        pool = torch.cuda.graph_pool_handle()
        with torch.cuda.device(device):
            for size in reversed(sizes):
                graph = torch.cuda.CUDAGraph()
                decode(size)  # Compiles and warms up: neither is allowed in a capture.
                torch.cuda.synchronize()
                with torch.cuda.graph(graph, pool):
                    decode(size)
                self._graphs[size] = graph

    def replay(self, num_seqs: int) -> None:
        """Decode the buffers' first num_seqs rows, padded to the next captured size."""
        self._graphs[self.sizes[bisect_left(self.sizes, num_seqs)]].replay()
