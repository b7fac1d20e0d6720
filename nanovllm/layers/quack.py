"""Products by the quack-kernels package (GEMMs in CuTe), for the layers to prefer where they are the fastest."""

import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from inspect import signature
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.utils.optional_packages import OptionalPackage, kernel_cache

logger = logging.getLogger(__name__)

# The tensor memory accelerator wants rows of multiples of 16 bytes; published models have whole multiples of this many
# elements, and nothing less was tried.
_ALIGNMENT = 64


class Tile(NamedTuple):
    """What a program computes at a time.

    Attributes:
        tokens, columns: of the product, gate and up counted as two columns.
        cluster: how many programs along each of them share what they load.
        pingpong: whether two warp groups work on a tile each, one multiplying while the other stores its results,
            instead of on one tile together.
    """

    tokens: int
    columns: int
    cluster: tuple[int, int] = (1, 1)
    pingpong: bool = False


class Quack(OptionalPackage):
    """Products of bfloat16 and float16 on Hopper, in float32, rounded once, in a sum twice.

    All launches are dependent ones under the rule that `kernels.dependent_launch` states. A tile's first launch waits
    for a compiler, seconds, or less than one where an earlier process left its work on the disk. The package keeps 3 KB
    for every shape that it has seen, so as many for every number of tokens that a prefill has had. An error of the
    package is logged once and ends its use: every later call returns None.

    Attributes:
        num_multiprocessors: of the device.
        decodes: whether it is for decode steps too. Those are short: a launch, 0.1 ms of the host's, pays where it is
            captured in a CUDA graph.
    """

    name = "quack-kernels"
    DTYPES = (torch.bfloat16, torch.float16)

    def __init__(self, gemm_act: Callable, make_config: Callable, num_multiprocessors: int, decodes: bool = True):
        """gemm_act, make_config: quack's function of that name, or `quack_early`'s, and its GemmConfig."""
        self.num_multiprocessors = num_multiprocessors
        self.decodes = decodes
        self._gemm_act = gemm_act
        self._make_config = make_config

    def takes_weight(self, weight: Tensor) -> bool:
        """Whether products with it can be computed here: 16-bit floats, whole multiples of 64 rows and columns."""
        shape_fits = not (weight.shape[0] % _ALIGNMENT or weight.shape[1] % _ALIGNMENT)
        return weight.is_cuda and weight.dtype in self.DTYPES and shape_fits

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Whether `x weight^T` can be: with x of the same dtype, its rows packed and whole multiples of 64 elements
        apart, from an address that is a multiple of 16 bytes."""
        x_fits = x.dtype == weight.dtype and x.stride(1) == 1 and not (x.stride(0) % _ALIGNMENT or x.data_ptr() % 16)
        return self.works and self.takes_weight(weight) and x_fits

    def linear(self, x: Tensor, weight: Tensor, tile: Tile) -> Tensor | None:
        """`x W^T`, x `[num_tokens, K]` and weight `[N, K]`: `[num_tokens, N]`, or None where the caller has to compute
        it. Raises torch.OutOfMemoryError alone."""
        return self._launch(x, weight, tile, x.new_empty(len(x), len(weight)))

    def linear_silu(self, x: Tensor, weight: Tensor, tile: Tile) -> Tensor | None:
        """`silu(x Wg^T) * (x Wu^T)` (Shazeer 2020), the products kept in float32; weight `[2 * intermediate, K]`, the
        gate's rows and then the up's: `[num_tokens, intermediate]`, or None as for `linear`."""
        out = x.new_empty(len(x), len(weight) // 2)
        return self._launch(x, weight, tile, out, activation="swiglu", concat_layout=("B",))

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor, tile: Tile) -> Tensor | None:
        """`residual += x W^T`, which is returned, or None as for `linear`: then residual is as it was."""
        return self._launch(x, weight, tile, residual, C=residual)

    def _launch(self, x: Tensor, weight: Tensor, tile: Tile, out: Tensor, **options) -> Tensor | None:
        def multiply() -> Tensor:
            config = _config(self._make_config, tile)
            self._gemm_act(x, weight.t(), postact_out=out, store_preact=False, tuned=False, config=config, **options)
            return out

        return self.attempt(multiply)


@cache
def _config(make_config: Callable, tile: Tile):
    """quack's name for a tile. It recognizes one that it has seen by its identity, so they live as long as it does."""
    return make_config(
        tile_m=tile.tokens,
        tile_n=tile.columns,
        cluster_m=tile.cluster[0],
        cluster_n=tile.cluster[1],
        pingpong=tile.pingpong,
        is_dynamic_persistent=False,
        device_capacity=9,
    )


def keep_kernels() -> None:
    """Have the package keep what it compiles where it outlives temporary files, its own default. It reads this when it
    is imported, by whomever: flash-attn-4 does so as well."""
    os.environ.setdefault("QUACK_CACHE_DIR", kernel_cache("quack"))


def load_quack(dtype: torch.dtype, device: torch.device, decodes: bool) -> Quack | None:
    """The package where it is installed, takes this dtype and the device is a Hopper GPU (others than an H200 were not
    measured); else None. The import takes seconds. One that is there and cannot be used is logged as a warning.
    decodes: see `Quack`."""
    if device.type != "cuda" or dtype not in Quack.DTYPES:
        return None
    properties = torch.cuda.get_device_properties(device)
    if properties.major != 9:
        return None
    try:
        installed = version("quack-kernels")
    except PackageNotFoundError:
        return None
    keep_kernels()
    try:
        from quack.gemm_config import GemmConfig
        from quack.gemm_interface import gemm_act
    except Exception as error:
        logger.warning("quack-kernels cannot be imported: %s: %s", type(error).__name__, error)
        return None
    if "config" not in signature(gemm_act).parameters:
        logger.warning("quack-kernels %s is too old and is not used: pip install 'quack-kernels>=0.6.5'", installed)
        return None
    return Quack(_early(gemm_act), GemmConfig, properties.multi_processor_count, decodes)


def _early(gemm_act: Callable) -> Callable:
    """What lets the next kernel in earlier than the package's function does; that where the package can no longer be
    extended as in 0.6.5."""
    try:
        from nanovllm.layers.quack_early import gemm_act as early
    except Exception as error:
        logger.info("quack-kernels' products let the next kernel in late: %s: %s", type(error).__name__, error)
        return gemm_act
    return early
