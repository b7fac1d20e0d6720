"""An engine's start: compiling and loading the kernels of quack-kernels and flash-attn-4 that it will launch."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from xxhash import xxh64_hexdigest

from nanovllm.config import Config
from nanovllm.layers.flash_attn4 import AttentionShape, FlashAttn4, load_kernel
from nanovllm.layers.quack import Product, Quack, load_product
from nanovllm.tuning.table import package_path, user_path
from nanovllm.utils.compile_processes import CompileProcesses
from nanovllm.utils.optional_packages import installed_versions, keep_kernels, kernel_cache
from nanovllm.utils.parallel import TensorParallel

_PACKAGES = ("quack-kernels", "flash-attn-4")
_MODULES = ["nanovllm.layers.quack_early", "flash_attn.cute"]
_COMPILER = "nvidia-cutlass-dsl"
# The options that decide which kernels an engine launches.
_OPTIONS = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_model_len",
    "tensor_parallel_size",
    "enforce_eager",
    "kvcache_block_size",
    "dtype",
    "attention_backend",
    "mixed_step_rows",
)
_SHAPE = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")


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
        self._quack: Quack | None = None
        self._flash_attn4: FlashAttn4 | None = None
        self._shape: AttentionShape | None = None
        versions = installed_versions(*_PACKAGES, _COMPILER, "torch")
        if rank or device.type != "cuda" or versions.keys().isdisjoint(_PACKAGES):
            return
        if config.dtype not in Quack.DTYPES:  # Which are flash-attn-4's too.
            return
        if torch.cuda.get_device_capability(device)[0] < 9:  # Neither package is used there.
            return
        shape = [getattr(config.hf_config, name, None) for name in _SHAPE]
        options = [getattr(config, name) for name in _OPTIONS]
        gpu = torch.cuda.get_device_name(device)
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

    def want(self, quack: Quack | None, flash_attn4: FlashAttn4 | None, shape: AttentionShape) -> None:
        """Have compiled: flash-attn-4's kernels for this shape, and from here on each product that quack is asked for
        within `compile_ahead`."""
        self._quack, self._flash_attn4, self._shape = quack, flash_attn4, shape
        if self._processes is None:
            return
        if flash_attn4 is not None:
            for kernel in range(flash_attn4.NUM_KERNELS):
                self._processes.submit(load_kernel, shape, kernel)
        if quack is not None:
            quack.on_wanted = self._compile_product

    def _compile_product(self, product: Product) -> None:
        self._processes.submit(load_product, product, self._shape.device)

    def load(self, tp: TensorParallel, tell: Callable[[int, int], None]) -> None:
        """Wait until all are compiled, then have this process launch each once. What could not be compiled elsewhere
        is compiled here. tell: called with how many are compiled, and how many there are."""
        if self._processes is not None:
            self._processes.wait(tell)
            self._stack.close()  # Their memory is free from here on.
        device = self._shape.device
        if tp.size > 1:
            tp.all_reduce(torch.zeros(1, device=device))  # The other ranks wait for rank 0's processes.
        if self._flash_attn4 is not None:
            for kernel in range(self._flash_attn4.NUM_KERNELS):
                self._flash_attn4.load(self._shape, kernel)
        if self._quack is not None:
            self._quack.on_wanted = None
            for product in self._quack.wanted.values():
                self._quack.load(product, device)
        if self._note is not None:
            with suppress(OSError):  # Without the note the next start compiles again.
                self._note.parent.mkdir(parents=True, exist_ok=True)
                self._note.touch()
