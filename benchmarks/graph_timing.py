"""How long does a launch take in a CUDA graph, where the host costs nothing? Shared by the other scripts."""

from collections.abc import Callable
from statistics import median

import torch


def capture(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """What `run` launches on the current stream, run once before."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's own thread may ask how an earlier collective is doing.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        run()
    return graph


def time_graph(run: Callable[[], object], num_calls: int, num_replays: int, num_warm_replays: int = 1) -> float:
    """Microseconds a call in `run`, which makes num_calls of them: median of the replays."""
    graph = capture(run)
    for _ in range(num_warm_replays):
        graph.replay()
    micros = []
    for _ in range(num_replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        micros.append(1e3 * start.elapsed_time(end) / num_calls)
    return median(micros)
