"""RankCalls: how rank 0's model runner has those of the other ranks do what it does."""

import logging
import pickle
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import NoReturn

import torch

from nanovllm.engine.ranks.call_channel import CallReader
from nanovllm.engine.ranks.interrupts import HeldInterrupt
from nanovllm.engine.ranks.step_messages import StepDecoder, StepEncoder
from nanovllm.engine.ranks.workers import WorkerError, Workers

logger = logging.getLogger(__name__)


class RankCalls(ABC):
    """The calls between the ranks of a model runner, which derives from this: rank 0's, in the caller's process, writes
    a call to shared memory, where each worker's `loop` reads it, and all of them do the same in lock-step.

    Attributes:
        rank, device: this rank, and its device.
        workers: rank 0's, the processes of the other ranks; None with one rank.
        calls, steps: with several ranks, what a worker reads calls from, and each side's memory of the steps.
    """

    rank: int
    device: torch.device
    workers: Workers | None
    calls: CallReader
    steps: StepEncoder | StepDecoder

    @abstractmethod
    def exit(self) -> None:
        """Give everything back; harmless when called again."""

    def call(self, method: str, *args):
        """Run one method by name on every rank, each with its own device as the current one, whichever the caller's is;
        the result is rank 0's.

        With several ranks an exception in it ends the engine, for the ranks are out of step then; where a worker
        caused it, it is a WorkerError. Ctrl-C waits until rank 0 has done its part.
        """
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            if self.workers is None:
                return getattr(self, method)(*args)
            try:
                with HeldInterrupt():
                    self.write_shm(method, *args)
                    return getattr(self, method)(*args)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._end_after(error)

    def write_shm(self, method: str, *args) -> None:
        """Rank 0's: send a call to the workers. Of a step's sequences they get what they do not know yet."""
        if method == "launch":
            args = (self.steps.encode(*args),)
        elif method == "launch_sampling":
            args = ()  # They know which step, and rank 0 draws.
        self.workers.send(pickle.dumps([method, *args], pickle.HIGHEST_PROTOCOL))

    def read_shm(self) -> tuple[str, list]:
        """A worker's: wait for the next call, (method, arguments)."""
        method, *args = pickle.loads(self.calls.read())
        return method, self.steps.decode(*args) if method == "launch" else args

    def loop(self) -> None:
        """A worker's: do what rank 0 calls, until it calls exit."""
        method = ""
        while method != "exit":
            method, args = self.read_shm()
            self.call(method, *args)

    def check_workers(self) -> None:
        """Raises WorkerError, once this engine has ended, where a worker has died or failed."""
        try:
            self.workers.check()
        except WorkerError as error:
            self._end_after(error)

    def _end_after(self, error: BaseException) -> NoReturn:
        """Give everything back, and raise the error or the WorkerError that caused it."""
        cause = error
        if self.workers is not None:
            cause = self.workers.explain(error)
            self.workers.end()
        if self.rank == 0:  # A worker process ends, and must not wait for anybody before it does.
            try:
                self.exit()
            except RuntimeError as lost:  # The device's own errors show at the next call, whatever that is.
                logger.warning("the engine could not give everything back: %s", lost)
        if cause is error:
            raise error
        raise cause from error
