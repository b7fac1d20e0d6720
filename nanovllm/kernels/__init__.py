"""Triton kernels, each the fast second half of a plain-torch twin in `nanovllm.layers`.

A module of this package imports Triton, so it may be imported only where `HAS_TRITON` holds; this file never
does.
"""

from importlib.util import find_spec

from torch import Tensor

HAS_TRITON: bool = find_spec("triton") is not None


def use_kernels(x: Tensor) -> bool:
    """Whether an operation on `x` runs its Triton kernel (CUDA) or its plain-torch twin (elsewhere)."""
    return HAS_TRITON and x.is_cuda
