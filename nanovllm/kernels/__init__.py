"""Triton kernels and their plain-torch twins: tensors in, tensors out. A test compares the two.

A file imports Triton from `triton_stub`, so it can be imported where Triton is not installed.
"""

from importlib.util import find_spec

from torch import Tensor

HAS_TRITON: bool = find_spec("triton") is not None


def use_kernels(x: Tensor) -> bool:
    """True if an operation on `x` runs its Triton kernel (on CUDA), False for its plain-torch twin (elsewhere)."""
    return HAS_TRITON and x.is_cuda
