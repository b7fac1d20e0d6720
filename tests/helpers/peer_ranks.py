"""Ranks whose kernels wait for each other, without several GPUs: processes, in which Triton's interpreter runs, or
streams of one GPU."""

import gc
import mmap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkProcess
from typing import Any

import torch

_SECONDS = 60  # that the ranks of a test may take beside other tests


def shared_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """Zeros that all ranks have at one address."""
    if device == "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = torch.Size(shape).numel()
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype, count=count).view(shape)


def addresses(tensors: list[torch.Tensor]) -> torch.Tensor:
    """int64 [len(tensors)], on their device."""
    return torch.tensor([tensor.data_ptr() for tensor in tensors], device=tensors[0].device)


class MappedMemory:
    """All ranks' memory, in the place of `Peers`. What is of one name is shared."""

    def __init__(self, size: int, device: str):
        self.size, self.device = size, device
        self.abort_flag = shared_zeros((1,), torch.int32, device)
        self.tensors: dict[str, list[torch.Tensor]] = {}

    def share(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
        """Zeros of each rank."""
        if name not in self.tensors:
            self.tensors[name] = [shared_zeros(shape, dtype, self.device) for _ in range(self.size)]
        return self.tensors[name]

    @contextmanager
    def running(self, ranks: list[int], work: Callable[[int], Any]) -> Iterator[None]:
        """A block beside work(rank) of each of these ranks, which ends when they have ended. What they find out must be
        written to tensors of `shared_zeros`. On a GPU work is called twice; the first call waits for nobody."""
        if self.device == "cuda":
            # To load a kernel may wait for those that run. So all are loaded before one of them waits for another.
            self.abort_flag.fill_(1)
            for rank in ranks:
                work(rank)
            self.abort_flag.zero_()
            torch.cuda.synchronize()
            for rank in ranks:
                with torch.cuda.stream(torch.cuda.Stream()):
                    work(rank)
            yield
            torch.cuda.synchronize()
            return
        processes = [ForkProcess(target=_run_politely, args=(work, rank), daemon=True) for rank in ranks]
        for process in processes:
            process.start()
        try:
            yield
            deadline = time.monotonic() + _SECONDS
            for process in processes:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in processes]
            assert codes == [0] * len(ranks), f"the ranks' exit codes, None of one that waits for ever: {codes}"
        finally:
            for process in processes:
                process.kill()
                process.join()

    def run(self, work: Callable[[int], Any]) -> None:
        """work(rank) of all ranks."""
        with self.running(list(range(self.size)), work):
            pass


def _run_politely(work: Callable[[int], Any], rank: int) -> None:
    """Leave the core to the rank that this one waits for."""
    from triton.runtime.interpreter import InterpreterBuilder

    update = InterpreterBuilder.create_atomic_rmw

    def update_and_pause(*args):
        time.sleep(0.0001)
        return update(*args)

    InterpreterBuilder.create_atomic_rmw = update_and_pause
    # A fork has none of its parent's threads. Torch's products and the collector's end of, say, a process group would
    # wait for them for ever.
    torch.set_num_threads(1)
    gc.disable()
    work(rank)


def await_true(condition: Callable[[], Any]) -> None:
    """Wait for what ranks that run will do."""
    deadline = time.monotonic() + _SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the ranks did not get so far"
        time.sleep(0.001)
