"""Launch constants of decode attention."""

from functools import cache
from typing import NamedTuple

import torch
import triton

from nanovllm.utils.decode_plan import SPLIT_UNIT

_TILE_BYTES = 16 * 1024  # of keys, and as much of values


class DecodeConfig(NamedTuple):
    """Launch constants.

    Attributes:
        tile: keys a step of the loop, a power of two from 16 up to SPLIT_UNIT.
        num_warps: a program.
        num_stages: of the load pipeline; all but one have a tile of keys and one of values in shared memory.
        prefetch: whether the programs of a dependent launch ask for their keys and values while they wait; not with
            `tma`, where that gained nothing.
        tma: whether whole tiles come by the tensor memory accelerator (`paged_decode_tma`).
    """

    tile: int
    num_warps: int
    num_stages: int
    prefetch: bool = False
    tma: bool = False


@cache
def _has_much_shared_memory(device: torch.device) -> bool:
    """Whether a multiprocessor has room for two programs of four stages, as Hopper's, with 228 KiB, has."""
    if device.type != "cuda":
        return False
    # Some versions of torch may not say.
    found = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_multiprocessor", 0)
    return found >= 14 * _TILE_BYTES


@cache
def has_tma(head_dim: int, block_size: int, itemsize: int, device: torch.device) -> bool:
    """Whether `paged_decode_tma` can be taken: on Hopper, where it was measured, in half precision, for the head_dims
    of published models. Triton before 3.6, with which it was written, may not have products of eight columns."""
    is_new = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
    fits = itemsize == 2 and head_dim in (64, 128) and block_size >= SPLIT_UNIT
    return is_new and fits and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def choose_config(
    num_rows: int, padded_dim: int, itemsize: int, device: torch.device, tma: bool = False
) -> DecodeConfig:
    """The best, or close to it, of benchmarks/attention_decode.py --sweep and of whole workloads on an H200, for
    num_rows = sequences x KV heads, of `padded_dim` elements of `itemsize` bytes. tma: whether `has_tma`."""
    tile = max(16, min(SPLIT_UNIT, _TILE_BYTES // (padded_dim * itemsize)))
    half = max(16, tile // 2)
    if num_rows <= (16 if tma else 32):
        # With three stages, or at one or two sequences of eight KV heads by the memory accelerator, the kernel is as
        # fast, but a step of Qwen3-8B is 5 to 10 % slower: the multiprocessors give up L1 for more shared memory,
        # through which, it seems, the skinny kernels around want to read.
        return DecodeConfig(tile, 4, 2, prefetch=True)
    if tma:
        if 32 < num_rows <= 512:
            return DecodeConfig(64, 2, 3, tma=True)
        return DecodeConfig(32, 1, 4 if 512 < num_rows <= 1536 else 3, tma=True)
    if num_rows <= 256:
        return DecodeConfig(tile, 4, 3)
    if num_rows <= 1536:
        return DecodeConfig(tile, 4, 4 if _has_much_shared_memory(device) else 3)
    if num_rows <= 2048:
        return DecodeConfig(half, 1, 4 if half < tile else 3)
    return DecodeConfig(half, 2, 3)
