"""Executor: has every rank's model runner do what the engine asks for."""

import logging
import pickle
from contextlib import AbstractContextManager, nullcontext
from typing import NoReturn, cast

import torch

from nanovllm.config import Config
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.ranks.workers import WorkerError, Workers
from nanovllm.engine.step import Step
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.loader import TensorFacts
from nanovllm.utils.interrupts import held_interrupt
from nanovllm.utils.progress import StartProgress

logger = logging.getLogger(__name__)


class Executor:
    """Owns rank 0's `model_runner`, which lives in the caller's process, and the `workers`, the other ranks (None with
    one rank)."""

    def __init__(self, config: Config):
        """Start all ranks. If that fails, everything is given back. Raises ValueError, MemoryError or WorkerError."""
        self.workers: Workers | None = None
        self._device = _first_device(config)
        # A block with the engine's GPU as the current one. It is used again and again, and never inside itself.
        self._on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        self.model_runner = ModelRunner(config, self._device)
        try:
            self.model_runner.check_model()
            with self._on_device, StartProgress(config.use_tqdm) as progress:
                tp = TensorParallel()
                if config.tensor_parallel_size > 1:
                    self.workers = Workers(config, self._device)
                    tp = self.workers.meet()
                with self._interruptible(1):
                    self.model_runner.start(tp, progress)
                if self.workers is not None:
                    self.workers.wait_ready()
        except BaseException as error:
            self._end_after(error)

    def _interruptible(self, times: int) -> AbstractContextManager:
        """`Workers.interruptible`, if there are any."""
        return nullcontext() if self.workers is None else self.workers.interruptible(times)

    def run(self, step: Step) -> None:
        """`ModelRunner.run` on all ranks. The workers get the step's packed inputs."""
        self.model_runner.prepare(step)
        if self.workers is not None:
            self.call("run", step)
        else:
            with self._on_device:
                self.model_runner.run(step)

    def sample(self, step: Step) -> None:
        """`ModelRunner.sample` on all ranks."""
        self.call("sample", step, for_workers=())

    def update_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        """`ModelRunner.update_weights` on all ranks."""
        facts = {name: TensorFacts(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        self.call("update_weights", tensors, for_workers=(facts,))

    def call(self, method: str, *args, for_workers: tuple | None = None):
        """Run a method of the model runner on every rank; the result is rank 0's.

        for_workers: the workers' arguments, if they differ.

        With several ranks an exception ends the engine, because the ranks are out of step then. It is a WorkerError if
        a worker caused it. Ctrl-C waits until rank 0 has done its part. A second Ctrl-C does not, and ends the engine.
        """
        with self._on_device:
            if self.workers is None:
                return getattr(self.model_runner, method)(*args)
            try:
                with held_interrupt(), self.workers.interruptible(2):
                    self.write_shm(method, *(args if for_workers is None else for_workers))
                    return getattr(self.model_runner, method)(*args)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._end_after(error)

    def write_shm(self, method: str, *args) -> None:
        """Send a call to the workers."""
        cast(Workers, self.workers).send(pickle.dumps([method, *args], pickle.HIGHEST_PROTOCOL))

    def check_workers(self) -> None:
        """Raises WorkerError, and ends this engine, if a worker has died or failed."""
        if self.workers is not None:
            try:
                self.workers.check()
            except WorkerError as error:
                self._end_after(error)

    def exit(self) -> None:
        """End all ranks and give all memory back. Harmless when called again. Ctrl-C kills ranks that do not end."""
        if self.workers is None:
            self.model_runner.synchronize()
        else:
            with held_interrupt(), self.workers.interruptible(1):
                self.model_runner.synchronize()
                self.workers.end(farewell=pickle.dumps(["exit"]))
        self.model_runner.exit()

    def _end_after(self, error: BaseException) -> NoReturn:
        """Give everything back, and raise the error or the WorkerError that caused it."""
        cause = error
        if self.workers is not None:
            cause = self.workers.explain(error)
            self.workers.end()
        try:
            self.model_runner.exit()
        except RuntimeError as lost:  # The device's own errors show at the next call, whatever that is.
            logger.warning("the engine could not give everything back: %s", lost)
        if cause is error:
            raise error
        raise cause from error


def _first_device(config: Config) -> torch.device:
    """Rank 0's."""
    return torch.device("cpu") if config.device_index is None else torch.device(config.device, config.device_index)
