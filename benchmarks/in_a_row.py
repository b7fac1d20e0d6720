"""Timing launches that follow each other for half a second, as in a workload: at the card's power limit, if they get it
there. By the card's own counter of energy; needs nvidia-ml-py."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from graph_timing import capture

SECONDS = 0.5
SECONDS_A_ROUND = 0.1  # between two looks at the counters


class Card:
    """The current device's counters."""

    def __init__(self):
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")

    def joules(self) -> float:
        """Since the driver was loaded."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3

    def mhz(self) -> int:
        return self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)


class Reading(NamedTuple):
    """Of a call in a row of them."""

    us: float
    mJ: float
    watts: float
    mhz: float

    def __str__(self) -> str:
        return f"{self.us:8.1f} us {self.mJ:8.2f} mJ {self.watts:4.0f} W {self.mhz:5.0f} MHz"


def in_a_row(card: Card, run: Callable[[], object], num_calls: int, seconds: float = SECONDS) -> Reading:
    """What one of the num_calls calls takes that `run` makes, captured in a CUDA graph and repeated."""
    graph = capture(run)

    def replay(count: int) -> float:
        """Seconds."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    replay(2)
    # Asking the card takes milliseconds, in which it has nothing to do.
    count = max(1, int(SECONDS_A_ROUND / replay(1)))

    def repeat() -> tuple[int, list[int]]:
        """For so long, and until the counter has moved, which it does ten times a second: rounds, and MHz."""
        start, joules, clocks = time.perf_counter(), card.joules(), []
        while time.perf_counter() - start < seconds or card.joules() == joules:
            joules = card.joules()
            replay(count)
            clocks.append(card.mhz())
        return len(clocks), clocks

    repeat()
    joules, start = card.joules(), time.perf_counter()
    rounds, clocks = repeat()
    elapsed, joules = time.perf_counter() - start, card.joules() - joules
    calls = rounds * count * num_calls
    return Reading(1e6 * elapsed / calls, 1e3 * joules / calls, joules / elapsed, median(clocks))
