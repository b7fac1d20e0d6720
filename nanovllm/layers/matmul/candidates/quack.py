"""Products by the quack-kernels package (GEMMs in CuTe)."""

import logging
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import is_compiling_ahead
from nanovllm.layers.formats.all_formats import format_of_table
from nanovllm.layers.formats.format import Input, Weight
from nanovllm.layers.formats.fp8 import Fp8
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.problem import Problem
from nanovllm.layers.matmul.table import Key
from nanovllm.utils.light_imports import import_without_torch_compile
from nanovllm.utils.optional_packages import OptionalPackage, keep_kernels

MAX_GRAPH_BATCH_SIZE = 512  # of `engine.batch_sizes`
logger = logging.getLogger(__name__)

_ALIGNMENT = 64  # elements. The tensor memory accelerator needs 16 bytes; less than this was not tried.


class Tile(NamedTuple):
    """The part of a product that a program computes at a time."""

    tokens: int
    columns: int  # gate and up count as two
    cluster: tuple[int, int] = (1, 1)  # programs that share what they load, along the tokens and along the columns
    pingpong: bool = False  # two warp groups compute a tile each, one multiplying while the other stores its results


class Wanted(NamedTuple):
    """A kernel that a later step will launch, and how: on x `[num_rows, K]` of a dtype, by a weight of this key."""

    key: Key
    tile: Tile
    num_rows: int
    dtype: torch.dtype


class Quack(OptionalPackage, Candidate):
    """bfloat16 and float16 products on Hopper, summed in float32 and rounded once; linear_add rounds twice. With a
    weight in fp8 x is quantized first, and tensor cores sum as in `scaled_mm`. constants: a `Tile`'s.

    All launches are dependent ones (see `kernels.dependent_launch`). The first launch of a tile compiles it, which
    takes seconds, or loads it from the disk. The first error of the package is logged and ends its use: every later
    `multiply` returns None.

    Attributes:
        decodes: whether decode steps use it too. A launch takes the host long, so CUDA graphs have to capture it.
        wanted: what `multiply` was asked for within `compile_ahead`, once for each kernel. It launches nothing there.
    """

    name = "quack-kernels"
    operations = ("linear", "linear_silu", "linear_add")
    formats = (Unquantized.name, Fp8.name)
    suits_one_shape = True  # A decode step wants about one tile a multiprocessor.
    DTYPES = (torch.bfloat16, torch.float16)

    def __init__(self, gemm_act: Callable, make_config: Callable, decodes: bool = True):
        """gemm_act: `quack_products`'s. make_config: the package's GemmConfig."""
        self.decodes = decodes
        self.wanted: dict[tuple, Wanted] = {}
        self._gemm_act = gemm_act
        self._make_config = make_config

    def supports(self, key: Key, weight: Weight) -> bool:
        return self.is_for(key) and self.can_multiply(key, weight)

    def can_multiply(self, key: Key, weight: Weight) -> bool:
        """Whether it can in steps of this phase: 16-bit floats, or a weight in fp8 with a scale for each channel;
        multiples of 64 rows and columns."""
        return self.works and (self.decodes or key.phase == "prefill") and self._takes(key, weight)

    def _takes(self, key: Key, weight: Weight) -> bool:
        # Half of the rows of experts' gate and up projection are the columns of down.
        unit = 2 * _ALIGNMENT if key.operation == "experts" else _ALIGNMENT
        return weight.values.is_cuda and weight.dtype in self.DTYPES and not (key.N % unit or key.K % _ALIGNMENT)

    def launch(self, problem: Problem, constants: tuple) -> Tensor | None:
        """None also with a bias, and with a place for a result that is no residual."""
        key, x, weight, bias, out = problem
        if bias is not None or (out is not None) != (key.operation == "linear_add"):
            return None
        return self.multiply(key.operation, x, weight, Tile(*constants), out)

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
        """The result. None if it failed, or does not take this x; a residual is unchanged then. Raises
        torch.OutOfMemoryError only.

        Args:
            operation: linear, linear_silu or linear_add, as in `problem`.
            out: linear_add's residual, else None.
            starts: int32 `[num_experts + 1]`, of a weight `[num_experts, N, K]`: where each expert's rows begin, and
                where the last ones end.
            rows: int32 `[num_rows]`, those of x to multiply, in the order of their experts; None: all. Like starts, it
                may be read while the launch before still runs, if that is a dependent one.
        """
        if not self.works or not self._takes_rows(x, weight):
            return None
        num_rows, N = len(x if rows is None else rows), weight.shape[-2]
        options: dict[str, Any] = {} if starts is None else {"cu_seqlens_m": starts, "A_idx": rows}
        result: Any = out
        if operation == "linear_add":
            options["C"] = out
        else:
            result = weight.new_empty(num_rows, N // 2 if operation == "linear_silu" else N)
        if operation == "linear_silu":
            options |= {"activation": "swiglu", "concat_layout": ("B",)}
        values, x_scale = weight.format.quantize_input(x)
        if x_scale is not None:
            if rows is not None and not is_compiling_ahead():  # Within a trace they are any numbers.
                x_scale = x_scale[rows]
            options["scales"] = x_scale, weight.scale
        if is_compiling_ahead():
            key = Key.of(operation, False, weight)
            wanted = Wanted(key, tile, num_rows, weight.dtype)
            self.wanted.setdefault((operation, tile, key.format, starts is None), wanted)
            return result

        def run() -> Tensor:
            config = _config(self._make_config, tile)
            arguments = {"postact_out": result, "store_preact": False, "tuned": False, "config": config}
            self._gemm_act(values, weight.values.mT, **arguments, **options)
            return result

        return self.attempt(run)

    def _takes_rows(self, x: Input, weight: Weight) -> bool:
        """x is packed and aligned, unless it is a norm, or quantized first."""
        if not isinstance(x, Tensor) or weight.scale is not None:
            return True
        return x.dtype == weight.dtype and x.stride(1) == 1 and not (x.stride(0) % _ALIGNMENT or x.data_ptr() % 16)

    def load(self, wanted: Wanted, device: torch.device) -> None:
        """Launch a kernel once, on arbitrary numbers, to load it."""
        (operation, _, N, K, format, num_experts), tile, num_rows, dtype = wanted
        x = torch.empty(num_rows, K, dtype=dtype, device=device)
        lead = (num_experts,) if num_experts > 1 else ()
        weight = format_of_table(format).quantize(x.new_empty(*lead, N, K), dtype)
        options: dict[str, Any] = {}
        if operation == "linear_add":
            options["out"] = x.new_empty(num_rows, N)
        if lead:  # All rows are the last one's.
            options["starts"] = torch.zeros(num_experts + 1, dtype=torch.int32, device=device)
            options["starts"][-1] = num_rows
            if operation == "linear_silu":
                options["rows"] = torch.arange(num_rows, dtype=torch.int32, device=device)
        self.multiply(operation, x, weight, tile, **options)

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        if not cls.is_for(key):
            return
        has_graph = key.phase == "decode" and num_tokens <= MAX_GRAPH_BATCH_SIZE
        if key.format == Fp8.name:
            if num_tokens >= 48:
                yield from _tiles_in_fp8(key, num_tokens, num_multiprocessors) if has_graph else _LONG_FP8_TILES
            return
        if key.phase == "decode" and num_tokens > 16:
            yield from _decode_tiles(key, num_tokens, num_multiprocessors)
        if key.phase == "prefill" or num_tokens > 128:
            yield from _LONG_TILES


_LONG_TILES = (
    *(Tile(128, columns, (1, 2), True) for columns in (128, 192)),
    *(Tile(256, columns, cluster) for columns in (128, 192) for cluster in ((1, 2), (2, 1))),
)
_LONG_FP8_TILES = tuple(
    tile for columns in (128, 192) for tile in (Tile(128, columns, (1, 2), True), Tile(256, columns, (2, 1)))
)


def _decode_tiles(key: Key, num_tokens: int, num_multiprocessors: int) -> Iterator[Tile]:
    """Tiles of a size that gives each multiprocessor about one; the smallest tiles for small products."""
    is_silu = key.operation == "linear_silu"
    for tokens in (64, 128, 192, 256):
        all_columns: tuple[int, ...] = (64, 96, 128, 160, 192) if is_silu else (32, 48, 64, 80, 96, 128)
        if is_silu and tokens == 192:
            all_columns = (64, 96, 128)  # The package gets SwiGLU in tiles of 192 x 192 wrong.
        for columns in all_columns:
            programs = -(-num_tokens // tokens) * -(-key.N // columns) / num_multiprocessors
            is_smallest = columns == all_columns[0]
            if tokens >= 2 * num_tokens or programs > 1.6 or (programs < 0.35 and not is_smallest):
                continue
            yield Tile(tokens, columns)
            if num_tokens > tokens:
                yield Tile(tokens, columns, (2, 1))


def _tiles_in_fp8(key: Key, num_tokens: int, num_multiprocessors: int) -> Iterator[Tile]:
    """For a decode step with a graph, the three tiles with which the busiest multiprocessor has the least to do."""

    def duration(tile: tuple[int, int]) -> int:
        tokens, columns = tile
        programs = -(-num_tokens // tokens) * -(-key.N // columns)
        # It multiplies about 80 pairs of numbers in the time in which it loads one number.
        return -(-programs // num_multiprocessors) * max(tokens * columns, 80 * (tokens + columns))

    tiles = [(64, 256), (128, 256), *product((64, 128, 192, 256), (32, 64, 96, 128)), *product((64, 128, 256), (192,))]
    tiles = [tile for tile in tiles if tile[0] < 2 * num_tokens]
    for tokens, columns in sorted(tiles, key=duration)[:3]:
        for cluster in ((1, 1), (2, 1) if num_tokens > tokens else (1, 2)):
            yield Tile(tokens, columns, cluster)


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

    from nanovllm.layers.matmul.candidates.quack_products import gemm_act

    return gemm_act, GemmConfig


def load_product(wanted: Wanted, device: torch.device) -> None:
    """`Quack.load`, for a process of its own."""
    quack = load_quack(wanted.dtype, device, decodes=True)
    if quack is not None:
        with torch.cuda.device(device):
            quack.load(wanted, device)
            torch.cuda.synchronize()
