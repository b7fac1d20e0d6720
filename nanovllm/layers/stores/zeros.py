"""The memory of stores."""

import math
import mmap
from contextlib import suppress

import torch
from torch import Tensor

from nanovllm.utils.units import GIB


def store_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str) -> Tensor:
    """Zeros for a store of this name. On a CPU a page becomes memory when it is written. Raises MemoryError if the
    system refuses."""
    if device.type == "cpu":
        return _zeros_when_touched(math.prod(shape) * dtype.itemsize, name).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


def _zeros_when_touched(num_bytes: int, name: str) -> Tensor:
    """uint8 zeros on the host. A page becomes memory when it is written, because to write gigabytes of zeros would take
    seconds.

    The pages are small ones (4 KiB). In one of 2 MiB a sequence's first tokens in one layer would cost the time to fill
    all of it with zeros: docs/notebook.md, "On a CPU".
    """
    if num_bytes == 0:
        return torch.zeros(0, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        remedy = "lower num_kvcache_blocks or kvcache_gib"
        raise MemoryError(f"no {num_bytes / GIB:.1f} GiB for the {name} ({error}): {remedy}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux, which may be set to use large pages unasked
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
