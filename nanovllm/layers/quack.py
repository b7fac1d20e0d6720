"""Products by the quack-kernels package (GEMMs in CuTe), for the layers to prefer where they are the fastest."""

import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels import HAS_TRITON
from nanovllm.utils.light_imports import import_without_torch_compile
from nanovllm.utils.optional_packages import OptionalPackage, keep_kernels

if HAS_TRITON:
    from nanovllm.kernels.launch import is_compiling_ahead

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


class Product(NamedTuple):
    """A product that a step will ask for: the method of `Quack`, the tile, x `[num_tokens, K]`, weight `[N, K]`."""

    method: str
    tile: Tile
    num_tokens: int
    N: int
    K: int
    dtype: torch.dtype


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
        wanted: the products, one a kernel, that were asked for within `compile_ahead`. There none is launched.
        on_wanted: called with each of them when it is asked for; None for nobody.
    """

    name = "quack-kernels"
    DTYPES = (torch.bfloat16, torch.float16)

    def __init__(self, gemm_act: Callable, make_config: Callable, num_multiprocessors: int, decodes: bool = True):
        """gemm_act, make_config: `quack_early`'s function, and the package's GemmConfig."""
        self.num_multiprocessors = num_multiprocessors
        self.decodes = decodes
        self.wanted: dict[tuple[str, Tile], Product] = {}
        self.on_wanted: Callable[[Product], None] | None = None
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
        return self._launch("linear", x, weight, tile, x.new_empty(len(x), len(weight)))

    def linear_silu(self, x: Tensor, weight: Tensor, tile: Tile) -> Tensor | None:
        """`silu(x Wg^T) * (x Wu^T)` (Shazeer 2020), the products kept in float32; weight `[2 * intermediate, K]`, the
        gate's rows and then the up's: `[num_tokens, intermediate]`, or None as for `linear`."""
        out = x.new_empty(len(x), len(weight) // 2)
        return self._launch("linear_silu", x, weight, tile, out, activation="swiglu", concat_layout=("B",))

    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor, tile: Tile) -> Tensor | None:
        """`residual += x W^T`, which is returned, or None as for `linear`: then residual is as it was."""
        return self._launch("linear_add", x, weight, tile, residual, C=residual)

    def load(self, product: Product, device: torch.device) -> None:
        """Launch a product once, on numbers that mean nothing, so that its kernel is there for steps to come."""
        x = torch.empty(product.num_tokens, product.K, dtype=product.dtype, device=device)
        weight = torch.empty(product.N, product.K, dtype=product.dtype, device=device)
        out = (x.new_empty(product.num_tokens, product.N),) if product.method == "linear_add" else ()
        getattr(self, product.method)(x, weight, *out, product.tile)

    def _launch(self, method: str, x: Tensor, weight: Tensor, tile: Tile, out: Tensor, **options) -> Tensor | None:
        if HAS_TRITON and is_compiling_ahead():
            if (method, tile) not in self.wanted:
                product = self.wanted[method, tile] = Product(method, tile, len(x), *weight.shape, x.dtype)
                if self.on_wanted is not None:
                    self.on_wanted(product)
            return out

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
        gemm_act, make_config = import_without_torch_compile(_import_package)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        logger.warning("quack-kernels %s is not used (0.6.5 would be): it cannot be imported: %s", installed, reason)
        return None
    return Quack(gemm_act, make_config, properties.multi_processor_count, decodes)


def _import_package() -> tuple[Callable, Callable]:
    from quack.gemm_config import GemmConfig

    from nanovllm.layers.quack_early import gemm_act

    return gemm_act, GemmConfig


def load_product(product: Product, device: torch.device) -> None:
    """`Quack.load`, in a process of its own."""
    quack = load_quack(product.dtype, device, decodes=True)
    if quack is not None:
        with torch.cuda.device(device):
            quack.load(product, device)
            torch.cuda.synchronize()
