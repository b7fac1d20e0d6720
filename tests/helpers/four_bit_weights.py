"""Weights of 4 bits with random numbers."""

import torch

from nanovllm.kernels.matmul.four_bit import FourBit

KINDS = ("symmetric", "zeros", "e2m1")


def make_four_bit(kind: str, shape: tuple[int, ...], group: int, dtype: torch.dtype, device: str) -> FourBit:
    """A weight `[..., N, K]`, whose products with numbers of order one are of order one. dtype: of scales."""
    *rows, K = shape
    groups = (*rows, K // group)
    values = torch.randint(0, 256, (*rows, K // 2), dtype=torch.uint8, device=device)
    if kind == "e2m1":
        return FourBit(values, torch.randint(119, 124, groups, dtype=torch.uint8, device=device))
    scale = ((torch.rand(groups, device=device) + 0.5) * 0.2 * K**-0.5).to(dtype)
    zeros = torch.randint(0, 16, groups, dtype=torch.uint8, device=device)
    return FourBit(values, scale, zeros if kind == "zeros" else None)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the norm."""
    return ((found.float() - expected).norm() / expected.norm()).item()
