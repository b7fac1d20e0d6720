"""An engine's start on one rank, around what its ModelRunner builds."""

import logging
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Protocol

import torch
from typing_extensions import Self

from nanovllm.engine.features.speculation.budget import StepTimes
from nanovllm.engine.ranks.ranks import Ranks
from nanovllm.engine.start.kernel_compilation import StepRunner, compiling_kernels, warmup_kernels
from nanovllm.engine.start.kv_scales import choose_kv_scales
from nanovllm.engine.start.memory import free_memory
from nanovllm.engine.start.model_check import check_model
from nanovllm.engine.start.package_kernels import PackageKernels
from nanovllm.engine.start.step_times import measure_step_times
from nanovllm.engine.start.weights import load_weights
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.gpu_backend import GpuBackend
from nanovllm.layers.matmul.candidates.quack import Quack
from nanovllm.models.loader import num_checkpoint_params
from nanovllm.utils.progress import StartProgress

logger = logging.getLogger(__name__)


class StartingRunner(StepRunner, Protocol):
    """What of a ModelRunner a start sees."""

    rank: int
    event: Ranks
    on_device: AbstractContextManager
    attention_shape: AttentionShape
    quack: Quack | None
    has_graphs: bool

    @property
    def device_name(self) -> str: ...

    def compute_padding(self, batch_size: int) -> None: ...

    def give_back(self) -> None: ...


class Start:
    """Use as a context manager around the building of a ModelRunner, whose GPU is the current one in it. A terminal
    shows what goes on. If the block fails, everything is given back. At its end all ranks are ready.

    Attributes:
        free_at_start: bytes of the device that were free; from the meeting of the ranks on they share memory.
        progress: what the terminal shows.
    """

    def __init__(self, runner: StartingRunner):
        self.free_at_start = free_memory(runner.device)
        self.progress = StartProgress(runner.config.use_tqdm and runner.rank == 0)
        self._runner = runner
        self._stack, self._waits = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        try:
            runner = self._runner
            check_model(runner.config, runner.rank, self.free_at_start)
            self._stack.enter_context(runner.on_device)
            self._stack.enter_context(self.progress)
        except BaseException as error:
            self._end_after(error)
        return self

    def __exit__(self, _: type | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._waits.close()
        try:
            with self._stack:
                if error is None:
                    self._runner.event.wait_ready()
        except BaseException as later:
            error = later
        if error is not None:
            self._end_after(error)

    def _end_after(self, error: BaseException) -> None:
        self._runner.event.end_after(error, self._runner.give_back)

    def load_weights(self) -> None:
        """Fill the model's parameters, and compile kernels meanwhile."""
        runner, config, progress = self._runner, self._runner.config, self.progress
        self._waits.enter_context(runner.event.interruptible(1))
        with PackageKernels(config, runner.rank, runner.device) as packages:
            progress.tell("compiling kernels")
            with compiling_kernels(runner, progress.count("compiling kernels")):
                flash_attn4 = runner.backend.flash_attn4 if isinstance(runner.backend, GpuBackend) else None
                packages.compile(runner.quack, flash_attn4, runner.attention_shape)
                progress.tell("loading weights")
                load_weights(config, runner.model, runner.rank)
            packages.load(runner.tp, progress.count("compiling kernels of packages"))
        billions = num_checkpoint_params(runner.model) / 1e9
        logger.info("model: %s, %.3f B parameters, %s", config.model, billions, config.dtype)
        logger.info("device: %s", runner.device_name)
        logger.info("attention back end: %s", runner.backend.description)
        scales = choose_kv_scales(config, runner.model, runner.stores)
        if scales is not None:
            logger.info("KV cache scales: %s", scales)
        progress.tell("measuring memory")

    @torch.inference_mode()
    def warm_up(self) -> StepTimes | None:
        """Launch the kernels that later steps may need. Returns how long decode steps take; None without
        speculation."""
        runner, config = self._runner, self._runner.config
        if config.device == "cuda":
            warmup_kernels(runner, config.num_kvcache_blocks)
        if not config.speculation:
            return None
        sizes = runner.graph_bs
        return measure_step_times(runner.compute_padding, sizes, config.max_decode_rows, runner.device)
