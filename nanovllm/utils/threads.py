"""How many threads torch computes a step with on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Tokens times parameters of a layer. The demo model's decode steps gain nothing by a second thread up to 32 tokens, its
# prefill of 800 takes three quarters of the time with one (2 cores).
_MIN_WORK = 1 << 23


@contextmanager
def threads_for(work: int) -> Iterator[None]:
    """Have the block compute in the calling thread alone where its work, tokens times parameters of a layer, is little.

    Every operation ends with all threads waiting for the last one, and as they wait busily, that one waits for a turn
    of the scheduler's where another program wants a core as well: on two cores, one of them busy, the demo model
    generated 4 to 41 tokens a second by two threads and 128 to 150 by one (example.py's progress bar).
    """
    num_threads = torch.get_num_threads()
    if num_threads == 1 or work >= _MIN_WORK:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
