"""Timing launches that follow each other for half a second, as in a workload: at the card's power limit, if they get it
there. By the card's own counter of energy; needs nvidia-ml-py."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
from graph_timing import capture

SECONDS = 0.5
SECONDS_A_ROUND = 0.1  # between two looks at the counters, which take milliseconds
SHORTER = 20  # rounds by so much, to find the moment at which the counter of energy moves: ten times a second


class Card:
    """The current device's counters."""

    def __init__(self):
        import pynvml

        pynvml.nvmlInit()
        self._nvml = pynvml
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties().uuid}")

    def joules(self) -> float:
        """Since the driver was loaded, as far as the counter has moved."""
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1e3

    def mhz(self) -> int:
        return self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)


class Reading(NamedTuple):
    """Of a call in a row of them: microseconds, millijoules, and the card's power and clock meanwhile."""

    us: float
    mJ: float
    watts: float
    mhz: float

    def __str__(self) -> str:
        return f"{self.us:8.1f} us {self.mJ:8.2f} mJ {self.watts:4.0f} W {self.mhz:5.0f} MHz"


def in_a_row(card: Card, run: Callable[[], object], num_calls: int, seconds: float = SECONDS) -> Reading:
    """What one of the num_calls calls takes that `run` makes, captured in a CUDA graph and repeated."""
    graph = capture(run)
    replayed, busy = 0, 0.0  # how often, and how long that took, since the last reading of the counter

    def replay(count: int) -> float:
        nonlocal replayed, busy
        start = time.perf_counter()
        for _ in range(count):
            graph.replay()
        torch.cuda.synchronize()
        elapsed = time.perf_counter() - start
        replayed, busy = replayed + count, busy + elapsed
        return elapsed

    def joules_at_a_tick() -> float:
        joules = card.joules()
        while (now := card.joules()) == joules:
            replay(max(1, count // SHORTER))
        return now

    replay(2)
    count = max(1, int(SECONDS_A_ROUND / replay(1)))
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        replay(count)
    joules, start = joules_at_a_tick(), time.perf_counter()
    replayed, busy, clocks = 0, 0.0, []
    while time.perf_counter() - start < seconds:
        replay(count)
        clocks.append(card.mhz())
    joules = joules_at_a_tick() - joules
    calls = replayed * num_calls
    return Reading(1e6 * busy / calls, 1e3 * joules / calls, joules / (time.perf_counter() - start), median(clocks))
