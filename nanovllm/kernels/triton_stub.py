"""Triton, for the kernels to import from here, or a stub where it is not installed.

With the stub, a file of kernels can be imported on any machine and its plain twins run. Its kernels are then stubs too,
which are never launched (`use_kernels`).
"""

from typing import TYPE_CHECKING

from nanovllm.kernels import HAS_TRITON

__all__ = ["Stub", "TensorDescriptor", "driver", "gdc_launch_dependents", "gdc_wait", "libdevice", "tl", "triton"]


class Stub:
    """Whatever Triton offers: modules, decorators, types of arguments and constants."""

    def __getattr__(self, name: str) -> "Stub":
        if name.startswith("__"):  # Python asks for its own names, such as __wrapped__, to learn what this is.
            raise AttributeError(name)
        return self

    def __call__(self, *args, **options) -> "Stub":
        return self

    def __getitem__(self, grid) -> "Stub":
        raise ModuleNotFoundError("this kernel needs Triton, which is not installed", name="triton")


if TYPE_CHECKING or HAS_TRITON:
    import triton
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.runtime import driver
    from triton.tools.tensor_descriptor import TensorDescriptor
else:
    triton = tl = libdevice = driver = gdc_launch_dependents = gdc_wait = TensorDescriptor = Stub()
