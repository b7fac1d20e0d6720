"""CUDA graphs of decode steps, one for each of several batch sizes, of each kind of step."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from nanovllm.engine.step import StepKind

Compute = Callable[[int], None]  # of a batch size


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream to capture on. torch's default is one of the first device, for all devices. There is not one for each
    engine, because cuBLAS keeps a workspace for every stream."""
    return torch.cuda.Stream(device)


class DecodeGraphs:
    """Graphs of one function of the batch size. There are none before `use_sizes`.

    Attributes:
        sizes: batch sizes that have a graph, or may get one by `capture`.
        size_for: {number of sequences: the size at which they run}, for each number that has one.
        graphs: {batch size: its graph}.
        pool: their memory; None before the first graph.
    """

    def __init__(self, device: torch.device):
        self.sizes: list[int] = []
        self.size_for: dict[int, int] = {}
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None
        self._device = device

    def use_sizes(self, sizes: list[int], pool: Any) -> None:
        """Say which graphs there may be. pool: memory that others use too which never run while these do."""
        self.sizes, self.pool = sizes, pool
        self.size_for = {n: sizes[bisect_left(sizes, n)] for n in range(1, sizes[-1] + 1)}

    def capture(self, batch_size: int, decode: Compute, prepare: Compute) -> None:
        """Capture the graph of one of the sizes, unless it exists. That waits for the device and overwrites the
        buffers, so call it before a step's inputs are sent.

        Args:
            decode: computes the first n rows of buffers that stay where they are.
            prepare: fills them with padding and launches every kernel that decode(n) launches, because a capture can
                neither load nor compile one.
        """
        if batch_size in self.graphs:
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
        self.graphs[batch_size] = graph

    def replay(self, batch_size: int) -> None:
        self.graphs[batch_size].replay()


class StepGraphs(dict[StepKind, DecodeGraphs]):
    """The graphs of every kind of step; none before the first `use_sizes`.

    Attributes:
        pool: the memory that they share, because a step runs one of them.
        logits: where those end that give logits, [largest batch of a graph, vocab_size]; None before the first.
    """

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self.pool: Any = None
        self.logits: torch.Tensor | None = None

    def __missing__(self, kind: StepKind) -> DecodeGraphs:
        self[kind] = graphs = DecodeGraphs(self._device)
        return graphs

    def use_sizes(self, kind: StepKind, sizes: list[int]) -> DecodeGraphs:
        """The graphs of a kind of step, which may have these sizes from now on; and so may those of its steps that give
        logits, which are captured when a request first needs them."""
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        for each in (kind, kind._replace(gives_logits=True)):
            self[each].use_sizes(sizes, self.pool)
        return self[kind]

    def clear(self) -> None:
        """Give all graphs and their memory back. `use_sizes` begins anew."""
        for graphs in self.values():
            graphs.graphs.clear()  # ModelRunner.graphs is one of these.
        super().clear()
        self.pool = self.logits = None
