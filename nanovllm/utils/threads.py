"""The number of threads with which torch computes a step on a CPU, and of those that read images."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Tokens times parameters of a layer, from which a second thread gains anything.
_MIN_WORK = 1 << 23
_TRIAL_SECONDS = 0.01  # of each number of threads, on a quiet machine
_TRIAL_SHARE = 0.01  # Trials take at most this share of the time: one every 2 s on a quiet machine.
_MAX_IMAGE_THREADS = 16


class StepThreads:
    """Chooses between one thread and all that the caller allows torch, and restores the caller's setting.

    At the end of every operation all threads wait, busily, for the last one, which waits for its turn if other programs
    use the cores. So steps of little work use one thread, and other steps use what was faster in a recent trial.
    """

    def __init__(self, num_ranks: int = 1):
        """num_ranks: ranks that share this machine's cores."""
        self._num_ranks = num_ranks
        self._chosen: dict[int, int] = {}  # {threads that the caller allows: threads to use}
        self._next_trial = 0.0

    def choose(self, current: int, work: int) -> int:
        """The threads for a step. current: threads that the caller allows torch. work: the step's tokens times the
        parameters of a layer."""
        allowed = current if self._num_ranks == 1 else threads_per_rank(self._num_ranks)
        if allowed == 1 or work < _MIN_WORK:
            return 1
        start = time.monotonic()
        if allowed not in self._chosen or start >= self._next_trial:
            self._chosen = {allowed: max((allowed, 1), key=_products_per_second)}
            end = time.monotonic()
            self._next_trial = end + (end - start) / _TRIAL_SHARE
        return self._chosen[allowed]


class OneThread(StepThreads):
    """One thread for every step: the bits of attention and norms depend on the number. Products, whose bits may not,
    set their own."""

    def choose(self, current: int, work: int) -> int:
        return 1


def threads_of_steps(device_type: str, num_ranks: int, one: bool) -> StepThreads | None:
    """What chooses the threads of a rank's steps; None on a GPU. one: whether all steps have one thread."""
    if device_type != "cpu":
        return None
    return OneThread(num_ranks) if one else StepThreads(num_ranks)


@contextmanager
def step_threads(threads: StepThreads | None, work: int) -> Iterator[None]:
    """A block in which torch computes with the threads that are chosen for this work; None leaves it as it is."""
    if threads is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads.choose(before, work))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def threads_per_rank(num_ranks: int) -> int:
    """Threads of one rank: as many as the caller allows torch, but with several ranks at most its share of cores."""
    allowed = torch.get_num_threads()
    return allowed if num_ranks == 1 else max(1, min(available_cores() // num_ranks, allowed))


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def image_threads() -> int:
    """Threads that read images side by side: one for each core, up to a number that keeps their pixels few."""
    return min(available_cores(), _MAX_IMAGE_THREADS)


@contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """A block in which torch computes with this many threads, also in threads that it starts."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _products_per_second(num_threads: int) -> float:
    """The speed of products that are large enough for several threads, if each has a core to itself."""
    x, weight = torch.ones(16, 1024), torch.ones(1024, 1024)
    with torch_threads(num_threads):
        x @ weight  # Threads start and memory is touched here.
        num_products, start, seconds = 0, time.perf_counter(), 0.0
        while seconds < _TRIAL_SECONDS:
            x @ weight
            num_products += 1
            seconds = time.perf_counter() - start
    return num_products / seconds
