"""How much shared memory a card gives to a program, and how many stages of a load pipeline that holds.

Cards have from 99 to 227 KiB, also within one generation. Constants that were measured on one card are cut to what fits
another. Estimates may be too large, but never too small.
"""

from functools import cache

import torch

_HOPPER_BYTES = 227 * 1024
_SPARE_BYTES = 2 * 1024  # for barriers, and for sums over warps


@cache
def shared_bytes(device: torch.device) -> int:
    """Shared memory of a program at most. On a CPU, where Triton's interpreter needs none, as on Hopper."""
    if device.type != "cuda":
        return _HOPPER_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


@cache
def reads_operands_there(device: torch.device) -> bool:
    """Whether tensor cores read their operands from shared memory: on Hopper and on Blackwell's data-centre cards.
    Elsewhere they read registers."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] in (9, 10)


def fits(num_bytes: float, device: torch.device) -> bool:
    """Whether a program may allocate so much."""
    return num_bytes + _SPARE_BYTES <= shared_bytes(device)


def held_stages(num_stages: int, device: torch.device) -> int:
    """How many stages of a pipeline are in shared memory at once. Where operands are copied to registers first, the one
    that is being multiplied is there no more."""
    return num_stages if reads_operands_there(device) else max(num_stages - 1, 1)


def fitting_stages(stage_bytes: int, num_stages: int, device: torch.device) -> int:
    """The most stages of this size that fit, up to num_stages; 0 if a pipeline of two does not."""
    stages = range(num_stages, min(num_stages, 2) - 1, -1)
    return next((n for n in stages if fits(stage_bytes * held_stages(n, device), device)), 0)
