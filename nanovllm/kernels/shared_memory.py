"""How much shared memory a card gives to a program, and how many stages of a load pipeline that holds.

Cards have from 99 to 227 KiB, also within one generation. Constants that were measured on one card are cut to what fits
another. Estimates may be too large, but never too small.
"""

import torch

from nanovllm.kernels.gpu import GpuFacts

_SPARE_BYTES = 2 * 1024  # for barriers, and for sums over warps


def fits(num_bytes: float, device: torch.device) -> bool:
    """Whether a program may allocate so much."""
    return num_bytes + _SPARE_BYTES <= GpuFacts.of(device).shared_bytes


def held_stages(num_stages: int, device: torch.device) -> int:
    """How many stages of a pipeline are in shared memory at once. Where operands are copied to registers first, the one
    that is being multiplied is there no more."""
    return num_stages if GpuFacts.of(device).reads_shared_operands else max(num_stages - 1, 1)


def fitting_stages(stage_bytes: int, num_stages: int, device: torch.device, other_bytes: int = 0) -> int:
    """The most stages of this size that fit, up to num_stages; 0 if a pipeline of two does not. other_bytes: what a
    program holds beside the pipeline."""
    stages = range(num_stages, min(num_stages, 2) - 1, -1)
    return next((n for n in stages if fits(stage_bytes * held_stages(n, device) + other_bytes, device)), 0)
