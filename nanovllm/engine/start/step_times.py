"""How long decode steps take, measured at an engine's start: what a budget for proposed tokens has to know."""

import time
from collections.abc import Callable

import torch

from nanovllm.engine.features.speculation.budget import StepTimes

_REPEATS = 3  # The fastest one counts: the others were disturbed.
_SIZES = 1, 2, 4, 8, 16, 32, 64, 128, 256, 512  # where there are no graphs
_MAX_CPU_SIZE = 64  # On a CPU wider steps take longer in proportion.


def measure_step_times(
    compute: Callable[[int], None], sizes: list[int], max_rows: int, device: torch.device
) -> StepTimes:
    """Time steps of padding.

    Args:
        compute: starts a step with the given number of rows.
        sizes: of CUDA graphs; none where there are no graphs.
        max_rows: of the largest step.
    """
    if not sizes:
        most = min(max_rows, _MAX_CPU_SIZE) if device.type == "cpu" else max_rows
        sizes = [*(size for size in _SIZES if size < most), most]
    seconds = []
    for size in sizes:
        seconds.append(min(_seconds(compute, size, device) for _ in range(_REPEATS)))
    for i in range(1, len(sizes)):  # A wider step does no less.
        seconds[i] = max(seconds[i], seconds[i - 1])
    return StepTimes(sizes, seconds)


def _seconds(compute: Callable[[int], None], size: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    compute(size)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
