"""Products by the quack-kernels package (GEMMs in CuTe): a candidate of `matmul`."""

import logging
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels import HAS_TRITON
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.layers.formats.quantization import E4M3, Fp8Format, Fp8Weight, Weight
from nanovllm.layers.layernorm import Normed
from nanovllm.layers.matmul.fp8_products import quantize_input
from nanovllm.layers.matmul.matmul import Candidate, Input, Problem
from nanovllm.utils.context import get_context
from nanovllm.utils.light_imports import import_without_torch_compile
from nanovllm.utils.optional_packages import OptionalPackage, keep_kernels

if HAS_TRITON:
    from nanovllm.kernels.launch import is_compiling_ahead

logger = logging.getLogger(__name__)

_ALIGNMENT = 64  # elements. The tensor memory accelerator needs 16 bytes; less than this was not tried.


class Tile(NamedTuple):
    """The part of a product that a program computes at a time."""

    tokens: int
    columns: int  # gate and up count as two
    cluster: tuple[int, int] = (1, 1)  # programs that share what they load, along the tokens and along the columns
    pingpong: bool = False  # two warp groups compute a tile each, one multiplying while the other stores its results


class Product(NamedTuple):
    """A product that a later step will launch: x `[num_rows, K]` by a weight `[N, K]`."""

    operation: str
    tile: Tile
    num_rows: int
    N: int
    K: int
    dtype: torch.dtype  # of x, and of the weight unless that is in fp8
    is_fp8: bool = False
    num_experts: int = 0  # with such a weight each; 0: no experts


class Quack(OptionalPackage, Candidate):
    """bfloat16 and float16 products on Hopper, summed in float32 and rounded once; linear_add rounds twice. With a
    weight in fp8 x is quantized first, and tensor cores sum as in `fp8_products.fp8_product`.

    All launches are dependent ones (see `kernels.dependent_launch`). The first launch of a tile compiles it, which
    takes seconds, or loads it from the disk. The first error of the package is logged and ends its use: every later
    `multiply` returns None.

    Attributes:
        decodes: whether decode steps use it too. A launch takes the host long, so CUDA graphs have to capture it.
        wanted: the products, one for each kernel, that `multiply` was asked for within `compile_ahead`. It launches
            nothing there.
    """

    name = "quack-kernels"
    suits_one_shape = True  # A decode step wants about one tile a multiprocessor.
    DTYPES = (torch.bfloat16, torch.float16)

    def __init__(self, gemm_act: Callable, make_config: Callable, decodes: bool = True):
        """gemm_act: `quack_early`'s. make_config: the package's GemmConfig."""
        self.decodes = decodes
        self.wanted: dict[tuple, Product] = {}
        self._gemm_act = gemm_act
        self._make_config = make_config

    def serves(self, weight: Weight) -> bool:
        return self.works and self.decodes and self._takes(weight)

    def supports(self, problem: Problem) -> bool:
        """No bias, `out` only for linear_add, and what `can_multiply`."""
        operation, x, weight, bias, out = problem
        return bias is None and (out is not None) == (operation == "linear_add") and self.can_multiply(x, weight)

    def can_multiply(self, x: Input, weight: Weight) -> bool:
        """Whether it can in this step: 16-bit floats, or a weight in fp8 with a scale for each channel; multiples of 64
        rows and columns. An x that is not quantized first is packed and aligned likewise."""
        if not self.works or not (self.decodes or get_context().is_prefill) or not self._takes(weight):
            return False
        return isinstance(x, Normed) or isinstance(weight, Fp8Weight) or self._takes_rows(x, weight)

    def _takes(self, weight: Weight) -> bool:
        shape_fits = not (weight.shape[-2] % _ALIGNMENT or weight.shape[-1] % _ALIGNMENT)
        if isinstance(weight, Fp8Weight):
            return weight.is_cuda and not weight.format.is_blocked and shape_fits
        return weight.is_cuda and weight.dtype in self.DTYPES and shape_fits

    def _takes_rows(self, x: Tensor, weight: Tensor) -> bool:
        return x.dtype == weight.dtype and x.stride(1) == 1 and not (x.stride(0) % _ALIGNMENT or x.data_ptr() % 16)

    def launch(self, problem: Problem, constants: tuple) -> Tensor | None:
        """`multiply`. constants: a Tile's."""
        operation, x, weight, _, out = problem
        return self.multiply(operation, x, weight, Tile(*constants), out)

    def multiply(
        self,
        operation: str,
        x: Input,
        weight: Weight,
        tile: Tile,
        out: Tensor | None = None,
        *,
        starts: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor | None:
        """The result, or None if it failed; a residual is unchanged then. Raises torch.OutOfMemoryError only.

        Args:
            operation: linear, linear_silu or linear_add, as in `matmul`.
            out: linear_add's residual, else None.
            starts: int32 `[num_experts + 1]`, of a weight `[num_experts, N, K]`: where each expert's rows begin, and
                where the last ones end.
            rows: int32 `[num_rows]`, those of x to multiply, in the order of their experts; None: all. Like starts, it
                may be read while the launch before still runs, if that is a dependent one.
        """
        num_rows, N = len(x if rows is None else rows), weight.shape[-2]
        options: dict[str, Any] = {} if starts is None else {"cu_seqlens_m": starts, "A_idx": rows}
        if operation == "linear":
            out = weight.new_empty(num_rows, N)
        elif operation == "linear_silu":
            out = weight.new_empty(num_rows, N // 2)
            options |= {"activation": "swiglu", "concat_layout": ("B",)}
        else:
            options["C"] = out
        is_traced = HAS_TRITON and is_compiling_ahead()
        is_fp8 = isinstance(weight, Fp8Weight)
        if is_fp8:
            values, x_scale = quantize_input(x, weight.format)
            if rows is not None and not is_traced:  # Within a trace they are any numbers.
                x_scale = x_scale[rows]
            factor, options["scales"] = weight.values, (x_scale, weight.scale)
        else:
            values, factor = x if isinstance(x, Tensor) else x.value(), weight
        if is_traced:
            num_experts = 0 if starts is None else len(weight)
            product = Product(operation, tile, num_rows, *weight.shape[-2:], out.dtype, is_fp8, num_experts)
            self.wanted.setdefault((operation, tile, is_fp8, num_experts > 0), product)
            return out

        def run() -> Tensor:
            config = _config(self._make_config, tile)
            arguments = {"postact_out": out, "store_preact": False, "tuned": False, "config": config}
            self._gemm_act(values, factor.mT, **arguments, **options)
            return out

        return self.attempt(run)

    def load(self, product: Product, device: torch.device) -> None:
        """Launch a product once, on arbitrary numbers, to load its kernel."""
        operation, tile, num_rows, N, K, dtype, is_fp8, num_experts = product
        x = torch.empty(num_rows, K, dtype=dtype, device=device)
        lead = (num_experts,) if num_experts else ()
        weight: Any = x.new_empty(*lead, N, K, dtype=E4M3 if is_fp8 else None)
        if is_fp8:
            scale = torch.empty(*lead, N, 1, dtype=torch.float32, device=device)
            weight = Fp8Weight(weight, scale, Fp8Format(), dtype)
        options: dict[str, Any] = {}
        if operation == "linear_add":
            options["out"] = x.new_empty(num_rows, N)
        if num_experts:  # All rows are the last one's.
            options["starts"] = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
            options["starts"][-1] = num_rows
            if operation == "linear_silu":
                options["rows"] = torch.arange(num_rows, dtype=torch.int32, device=device)
        self.multiply(operation, x, weight, tile, **options)


@cache
def _config(make_config: Callable, tile: Tile):
    """Kept, because the package recognises it by its identity."""
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
    """None unless the package is installed, supports this dtype and the device is a Hopper GPU. The import takes
    seconds. If it fails, that is logged as a warning."""
    if dtype not in Quack.DTYPES or not GpuFacts.of(device).is_hopper:
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
    return Quack(gemm_act, make_config, decodes)


def _import_package() -> tuple[Callable, Callable]:
    from quack.gemm_config import GemmConfig

    from nanovllm.layers.matmul.quack_early import gemm_act

    return gemm_act, GemmConfig


def load_product(product: Product, device: torch.device) -> None:
    """`Quack.load`, for a process of its own."""
    quack = load_quack(product.dtype, device, decodes=True)
    if quack is not None:
        with torch.cuda.device(device):
            quack.load(product, device)
            torch.cuda.synchronize()
