"""GpuFacts: what choices and launch constants depend on of a GPU, asked of the driver once."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

_HOPPER_SHARED_BYTES = 227 * 1024


@dataclass(frozen=True)
class GpuFacts:
    """What a GPU is. Code that depends on the card asks this record, so that a test can pretend another card by
    replacing `GpuFacts.of`.

    A CPU has a record too, of a card that Triton's interpreter plays: it computes all that Hopper does, and launches
    nothing early.
    """

    name: str
    capability: tuple[int, int]  # compute capability, such as (9, 0) for Hopper
    shared_bytes: int  # shared memory that one program may have
    num_multiprocessors: int
    total_memory: int  # bytes; 0 of a CPU
    is_gpu: bool = True

    @staticmethod
    @cache
    def of(device: torch.device) -> "GpuFacts":
        if device.type != "cuda":
            return GpuFacts("CPU", (9, 0), _HOPPER_SHARED_BYTES, 2, 0, is_gpu=False)
        found: Any = torch.cuda.get_device_properties(device)  # torch's types lack a property.
        shared = found.shared_memory_per_block_optin
        capability = found.major, found.minor
        return GpuFacts(found.name, capability, shared, found.multi_processor_count, found.total_memory)

    @property
    def is_hopper(self) -> bool:
        return self.is_gpu and self.capability[0] == 9

    @property
    def has_pdl(self) -> bool:
        """Whether dependent launches are available (`dependent_launch`): on Hopper or newer."""
        return self.is_gpu and self.capability >= (9, 0)

    @property
    def has_tma(self) -> bool:
        """Whether there is a tensor memory accelerator: on Hopper or newer, and in Triton's interpreter."""
        return self.capability >= (9, 0)

    @property
    def reads_shared_operands(self) -> bool:
        """Whether tensor cores read their operands from shared memory: on Hopper and on Blackwell's data-centre cards.
        Elsewhere they read registers."""
        return self.capability[0] in (9, 10)
