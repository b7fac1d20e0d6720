"""Ranks as threads of one process, over gloo."""

import tempfile
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nanovllm.engine.ranks.process_group import join_group, open_store
from nanovllm.layers.parallel.tensor_parallel import TensorParallel

CPU = torch.device("cpu")


def on_ranks(size: int, work: Callable[[TensorParallel], Any]) -> list[Any]:
    """[work(tp)] of each rank."""
    results = [None] * size
    with tempfile.TemporaryDirectory() as folder:

        def run(rank):
            results[rank] = work(join_group(open_store(folder), rank, size, CPU))

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not dist.is_initialized()
    return results
