"""Triton kernels. Each has a plain-torch twin in `nanovllm.layers`, and a test that compares the two.

The modules import Triton, so they may be imported only if `HAS_TRITON` is true. This file and
`decode_plan` do not import it.
"""

from importlib.util import find_spec

from torch import Tensor

HAS_TRITON: bool = find_spec("triton") is not None


def use_kernels(x: Tensor) -> bool:
    """Whether an operation on `x` runs its Triton kernel (on CUDA) or its plain-torch twin (elsewhere)."""
    return HAS_TRITON and x.is_cuda
