"""Timing launches that follow each other for half a second, as in a workload: at the card's power limit, if they get it
there. By the card's own counter of energy; needs nvidia-ml-py."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from graph_timing import capture

SECONDS = 0.5


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

    def repeat(seconds: float) -> tuple[float, int, list[int]]:
        """Until so long has passed and the counter, which moves ten times a second, has moved: seconds, calls, MHz."""
        start, joules, count, clocks = time.perf_counter(), card.joules(), 0, []
        while (elapsed := time.perf_counter() - start) < seconds or card.joules() == joules:
            joules = card.joules()
            for _ in range(5):
                graph.replay()
            torch.cuda.synchronize()
            clocks.append(card.mhz())
            count += 5
        return elapsed, count * num_calls, clocks

    repeat(seconds)
    joules = card.joules()
    elapsed, count, clocks = repeat(seconds)
    joules = card.joules() - joules
    return Reading(1e6 * elapsed / count, 1e3 * joules / count, joules / elapsed, median(clocks))
