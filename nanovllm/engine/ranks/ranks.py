"""Ranks: the other ranks of an engine, as one of them sees them."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.shared_memory import SharedMemory
from typing import NoReturn

import torch

from nanovllm.config import Config
from nanovllm.layers.parallel.tensor_parallel import TensorParallel

logger = logging.getLogger(__name__)

ENDED = "the engine's workers have ended: make a new LLM"


class Ranks:
    """What a ModelRunner has as its `event`. This class stands for none: the engine has one rank.

    `Workers` is rank 0's, and `WorkerSide` a worker's.

    Attributes:
        processes: of the ranks that this one has started.
        events: for each of them the connection that says that a call lies in shared memory.
        shm: the segment that calls lie in; None with one rank.
        has_ended: whether the other ranks have been ended.
    """

    shm: SharedMemory | None = None
    has_ended = False

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.events: list[Connection] = []

    def meet(self, run: Callable[..., object]) -> TensorParallel:
        """This rank's place among all ranks, once they are connected. run: a ModelRunner's class, for the others."""
        return TensorParallel()

    def wait_ready(self) -> None:
        """Wait until all others wait for calls."""

    def write(self, message: bytes) -> None:
        """Send a call to all others."""
        raise RuntimeError("this rank calls no others")

    def read(self) -> bytes:
        """Wait for the next call of rank 0."""
        raise RuntimeError("this rank is called by no other")

    def check(self) -> None:
        """Raises WorkerError if one of them has died or failed."""

    def interruptible(self, times: int) -> AbstractContextManager:
        """A block in which this rank waits for the others, at most until the user has pressed Ctrl-C `times` times."""
        return nullcontext()

    def leaving(self) -> AbstractContextManager:
        """A block that ends this rank and the others."""
        return nullcontext()

    def calling(self, give_back: Callable[[], None]) -> AbstractContextManager:
        """A block that calls all others and does this rank's part. After a failure the engine has ended: give_back
        gives this rank's memory back."""
        return nullcontext()

    def end_after(self, error: BaseException, give_back: Callable[[], None]) -> NoReturn:
        """Give everything back, and raise the error or the other rank's that caused it."""
        cause = self.explain(error)
        self.end()
        try:
            give_back()
        except RuntimeError as lost:  # The device's own errors show at the next call, whatever that is.
            logger.warning("the engine could not give everything back: %s", lost)
        if cause is error:
            raise error
        raise cause from error

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for an exception of this rank's: itself, or the other rank's failure that caused it."""
        return error

    def end(self, farewell: bytes | None = None) -> None:
        """End all others. farewell: a call after which they end by themselves."""


def device_of_rank(config: Config, rank: int) -> torch.device:
    if config.device_index is None:
        return torch.device("cpu")
    return torch.device(config.device, config.device_index + rank)
