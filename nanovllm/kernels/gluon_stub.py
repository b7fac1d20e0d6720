"""Gluon, Triton's language of layouts and warps, for the kernels to import from here, or a stub where it is missing.

Triton ships it as an experiment, and has renamed a few of its functions. A release that lacks one has no Gluon here:
`HAS_GLUON` is False, and no candidate that needs it is offered.
"""

from typing import TYPE_CHECKING, Any

from nanovllm.kernels import HAS_TRITON
from nanovllm.kernels.triton_stub import Stub

__all__ = [
    *("HAS_GLUON", "SharedDescriptor", "async_load", "async_store", "barrier", "fence_async_shared", "gl", "gluon"),
    *("mbarrier", "store_wait", "warpgroup_mma", "warpgroup_mma_wait"),
]

HAS_GLUON = HAS_TRITON
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...

else:
    try:
        import triton.experimental.gluon.language as gl
        from triton.experimental import gluon
        from triton.experimental.gluon.language.nvidia.hopper import (
            fence_async_shared,
            mbarrier,
            tma,
            warpgroup_mma,
            warpgroup_mma_wait,
        )
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as SharedDescriptor

        store_wait = tma.store_wait
        # What kernels read of the two modules when they are defined, or not before they are compiled.
        for name in (
            "warp_specialize",
            "NVMMADistributedLayout",
            "NVMMASharedLayout",
            "inline_asm_elementwise",
            "atomic_add",
        ):
            getattr(gl, name)
        gluon.constexpr_function  # noqa: B018
        # The second names are those of Triton 3.6.
        barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
        async_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
        async_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
    except (ImportError, AttributeError):
        HAS_GLUON = False
        gl = gluon = mbarrier = SharedDescriptor = async_load = async_store = barrier = fence_async_shared = Stub()
        store_wait = warpgroup_mma = warpgroup_mma_wait = Stub()
