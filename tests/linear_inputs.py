"""Weights and rows for the tests of linear layers' kernels."""

import torch


def make_linear(N: int, K: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight whose products with standard normal rows are of order one, and a bias."""
    weight = torch.randn(N, K, device=device) / K**0.5
    return weight.to(dtype), torch.randn(N, device=device).to(dtype)


def make_rows(M: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows that lie further apart than they are wide, in a tensor that is NaN elsewhere."""
    wide = torch.full((M, width + 24), float("nan"), device=device, dtype=dtype)
    wide[:, 8 : 8 + width] = torch.randn(M, width, device=device)
    return wide[:, 8 : 8 + width]
