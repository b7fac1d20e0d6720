"""An engine's start: compiling and loading the kernels of quack-kernels and flash-attn-4 that it will launch."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

import torch
from xxhash import xxh64_hexdigest

from nanovllm.config import Config
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.backends.flash_attn4 import FlashAttn4, load_kernel
from nanovllm.layers.matmul.candidates.quack import Quack, load_product
from nanovllm.layers.matmul.table import package_path, user_path
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.utils.light_imports import import_without_torch_compile
from nanovllm.utils.optional_packages import installed_versions, keep_kernels, kernel_cache
from nanovllm.utils.python_process import python_command

_PACKAGES = ("quack-kernels", "flash-attn-4")
_MODULES = ["nanovllm.layers.matmul.candidates.quack_products", "flash_attn.cute"]
_COMPILER = "nvidia-cutlass-dsl"
# The options that decide which kernels an engine launches.
_OPTIONS = (
    *("max_num_batched_tokens", "max_num_seqs", "max_model_len", "tensor_parallel_size", "enforce_eager"),
    *("kvcache_block_size", "dtype", "weight_format", "attention_backend", "mixed_step_rows"),
)
_SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_MAX_PROCESSES = 8
_PATIENCE_SECONDS = 600.0


class PackageKernels:
    """Use as a context manager around an engine's start.

    Both packages take seconds to compile a kernel, and keep it on the disk. When an engine of this shape starts for the
    first time on a machine, several processes compile side by side. They start with the block, because their imports
    take seconds too. Later starts find all kernels on the disk and need no processes.

    With several ranks, rank 0 has the processes, and the other ranks load what these have compiled.
    """

    def __init__(self, config: Config, rank: int, device: torch.device):
        self._stack = ExitStack()
        self._processes: CompileProcesses | None = None
        self._note: Path | None = None
        self._device = device
        self._loads: list[Callable[[], object]] = []
        versions = installed_versions(*_PACKAGES, _COMPILER, "torch")
        if rank or device.type != "cuda" or versions.keys().isdisjoint(_PACKAGES):
            return
        # Neither package is used for other dtypes, or on older GPUs.
        if config.dtype not in Quack.DTYPES or GpuFacts.of(device).capability[0] < 9:
            return
        shape = [getattr(config.hf_config, name, None) for name in _SHAPE]
        options = [getattr(config, name) for name in _OPTIONS]
        gpu = GpuFacts.of(device).name
        tables = [path.read_bytes() for path in (package_path(gpu), user_path(gpu)) if path.is_file()]
        facts = repr((shape, options, versions, gpu, tables))
        note = Path(kernel_cache("starts"), xxh64_hexdigest(facts.encode()))
        if not note.exists():
            self._note = note

    def __enter__(self):
        if self._note is not None:
            keep_kernels()  # The processes inherit where.
            self._processes = self._stack.enter_context(CompileProcesses(_MODULES))
        return self

    def __exit__(self, *exc_info) -> None:
        self._stack.close()

    def compile(self, quack: Quack | None, flash_attn4: FlashAttn4 | None, shape: AttentionShape) -> None:
        """Have flash-attn-4's kernels for this shape compiled, and the products that quack was asked for within
        `compile_ahead`."""
        tasks: list[tuple] = []
        if flash_attn4 is not None:
            for kernel in range(flash_attn4.NUM_KERNELS):
                tasks.append((load_kernel, shape, kernel))
                self._loads.append(partial(flash_attn4.load, shape, kernel))
        if quack is not None:
            for product in quack.wanted.values():
                tasks.append((load_product, product, shape.device))
                self._loads.append(partial(quack.load, product, shape.device))
        if self._processes is not None:
            self._processes.submit(tasks)

    def load(self, tp: TensorParallel, tell: Callable[[int, int], None]) -> None:
        """Wait until all are compiled, then have this process launch each once. What could not be compiled elsewhere
        is compiled here. tell: as for `CompileProcesses.wait`."""
        if self._processes is not None:
            self._processes.wait(tell)
            self._stack.close()  # Their memory is free from here on.
        if tp.size > 1:
            tp.all_reduce(torch.zeros(1, device=self._device))  # The other ranks wait for rank 0's processes.
        for load in self._loads:
            load()
        if self._note is not None:
            with suppress(OSError):  # Without the note the next start compiles again.
                self._note.parent.mkdir(parents=True, exist_ok=True)
                self._note.touch()


class CompileProcesses:
    """Processes that launch kernels once, so that this one finds them on the disk. Threads would not do: the packages
    hold the interpreter's lock while they compile.

    Use as a context manager: no process outlives the block. A task that fails, or whose process dies, is left to the
    kernel's first launch, which reports the error.
    """

    def __init__(self, modules: list[str]):
        """modules: what the tasks need; imported at once, before there is a task."""
        self._processes: list[subprocess.Popen[bytes]] = []
        command = [*python_command(f"from {__name__} import work; work()"), *modules]
        # A session of their own, or Ctrl-C would reach them. What they print is not the caller's.
        silent: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with suppress(OSError):
            for _ in range(max(1, min(_MAX_PROCESSES, (os.cpu_count() or 1) // 2))):
                self._processes.append(subprocess.Popen(command, start_new_session=True, **silent))

    def __enter__(self) -> "CompileProcesses":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with the assembler that it may have started
        for process in self._processes:
            with suppress(BrokenPipeError), process:  # Its end is waited for, and its pipe is closed.
                pass

    def submit(self, tasks: Sequence[tuple]) -> None:
        """Have each (function, *arguments) called, one after the other in each process. Call it once."""
        for i, process in enumerate(self._processes):
            with suppress(OSError), cast(IO[bytes], process.stdin) as pipe:  # It may have died.
                pickle.dump(tasks[i :: len(self._processes)], pipe)

    def wait(self, tell: Callable[[int, int], None]) -> None:
        """Return when all processes have ended, because no task is left, or ten minutes have passed. tell: called with
        how many have ended, and how many there are."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        for i, process in enumerate(self._processes):
            tell(i, len(self._processes))
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def work() -> None:
    """What such a process does: import the modules of its command line, then do its tasks."""
    for module in sys.argv[1:]:
        with suppress(Exception):
            import_without_torch_compile(partial(import_module, module))
    for function, *args in pickle.load(sys.stdin.buffer):
        with suppress(Exception):
            function(*args)
    os._exit(0)  # Taking torch down takes time.
