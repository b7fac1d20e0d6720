"""How many threads torch computes a step with on a CPU."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Tokens times parameters of a layer. The demo model's decode steps gain nothing by a second thread up to 32 tokens, its
# prefill of 800 takes three quarters of the time with one (2 cores).
_MIN_WORK = 1 << 23
_TRIAL_SECONDS = 0.01  # of each number of threads, on a quiet machine
_TRIAL_SHARE = 0.01  # of the time, at most, that goes into trials: every 2 s on a quiet machine


class StepThreads:
    """Chooses between one thread and all that the caller allows torch, and leaves the caller's setting as it was.

    Every operation ends with all threads waiting for the last one. They wait busily, so where other programs want the
    cores as well, that last one waits for its turn: beside four busy programs on two cores the demo model generates
    29 tokens a second in a batch of 64 with two threads, and 576 with one. On a quiet machine several threads are
    faster, unless an operation is so short that starting them takes longer. So steps of little work always take one
    thread, and the others what has just been faster in a trial.
    """

    def __init__(self, num_ranks: int = 1):
        """num_ranks: that share this machine's cores."""
        self._num_ranks = num_ranks
        self._chosen: dict[int, int] = {}  # {threads that the caller allows: threads to use}
        self._next_trial = 0.0

    @contextmanager
    def computing(self, work: int) -> Iterator[None]:
        """Compute the block with as many threads as pay for its work: tokens times parameters of a layer."""
        callers = torch.get_num_threads()
        num_threads = self._choose(threads_per_rank(self._num_ranks), work)
        if num_threads == callers:
            yield
            return
        torch.set_num_threads(num_threads)
        try:
            yield
        finally:
            torch.set_num_threads(callers)

    def _choose(self, allowed: int, work: int) -> int:
        if allowed == 1 or work < _MIN_WORK:
            return 1
        start = time.monotonic()
        if allowed not in self._chosen or start >= self._next_trial:
            self._chosen = {allowed: max((allowed, 1), key=_products_per_second)}
            end = time.monotonic()
            self._next_trial = end + (end - start) / _TRIAL_SHARE
        return self._chosen[allowed]


def threads_per_rank(num_ranks: int) -> int:
    """The threads of one rank: no more than the caller allows torch, nor, with several ranks, than its share of the
    cores that this process may use."""
    allowed = torch.get_num_threads()
    if num_ranks == 1:
        return allowed
    return max(1, min(available_cores() // num_ranks, allowed))


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _products_per_second(num_threads: int) -> float:
    """Of a size that several threads compute faster where each has a core to itself."""
    callers = torch.get_num_threads()
    x, weight = torch.ones(16, 1024), torch.ones(1024, 1024)
    torch.set_num_threads(num_threads)
    try:
        x @ weight  # Threads start and memory is touched here.
        num_products, start, seconds = 0, time.perf_counter(), 0.0
        while seconds < _TRIAL_SECONDS:
            x @ weight
            num_products += 1
            seconds = time.perf_counter() - start
    finally:
        torch.set_num_threads(callers)
    return num_products / seconds
