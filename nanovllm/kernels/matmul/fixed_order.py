"""Products that sum each row over K in one order, whatever the number of rows: for `deterministic=True`.

A program sums its whole K, 16 columns after 16, as tensor cores do. So a row's bits depend neither on the other rows
nor on its place among them. Libraries, and our kernels for few rows, split K for some numbers of rows.

On Hopper, tiles are loaded by the tensor memory accelerator, and their size follows from the number of rows: tensor
cores there give a row the same bits in tiles of all sizes, which tests/gpu/test_deterministic_gpu.py compares. For
tensors that the accelerator cannot address, in float32, and on other cards, one tile size computes all numbers of rows.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.linear_checks import check_layer
from nanovllm.kernels.triton_stub import TensorDescriptor, tl, triton

# Narrow, because few rows leave no other programs than those of the columns.
TILE_TOKENS, TILE_COLUMNS = 64, 32
_TILE_BYTES = 128  # of a row of both tiles: 64 numbers of 16 bits
_NUM_WARPS, _NUM_STAGES = 4, 4
# Neighbouring programs multiply this many tiles of tokens with the same weights, which are then in L2.
_GROUP = 8


class Tile(NamedTuple):
    """Launch constants of the kernel for Hopper. The results and all stages are in shared memory."""

    tokens: int
    columns: int
    k: int
    num_warps: int
    num_stages: int

    def num_programs(self, num_tokens: int, N: int) -> int:
        return triton.cdiv(num_tokens, self.tokens) * triton.cdiv(N, self.columns)


# From the fastest of few rows to that of many, each with the rows that it is for (docs/notebook.md has the times). It
# takes twice as many where all its programs run at once.
_TILES = (
    (Tile(64, 64, 128, 4, 5), 64),
    (Tile(128, 64, 128, 4, 4), 128),
    (Tile(128, 128, 64, 4, 5), 512),
)
_LARGEST_TILE = Tile(128, 256, 64, 8, 3)


# Specialised on it, the kernel would be compiled again in mid-run, and perhaps to other operations.
@triton.jit(do_not_specialize=["num_tokens", "x_stride"])
def _fixed_order_kernel(
    x, weight, y, num_tokens, x_stride, N: tl.constexpr, K: tl.constexpr, TILE_TOKENS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    tokens = tl.program_id(1).to(tl.int64) * TILE_TOKENS + tl.arange(0, TILE_TOKENS)
    is_token, is_column = tokens < num_tokens, columns < N
    x_tile = x + tokens[:, None] * x_stride
    weight_tile = weight + columns.to(tl.int64)[:, None] * K
    acc = tl.zeros([TILE_TOKENS, TILE_COLUMNS], tl.float32)
    for start in range(0, K, TILE_K):
        k = start + tl.arange(0, TILE_K)
        of_x = tl.load(x_tile + k[None, :], mask=is_token[:, None] & (k < K)[None, :], other=0.0)
        of_weight = tl.load(weight_tile + k[None, :], mask=is_column[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(of_x, tl.trans(of_weight), acc, input_precision="ieee")
    inside = is_token[:, None] & is_column[None, :]
    tl.store(y + tokens[:, None] * N + columns[None, :], acc.to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "num_programs"])
def _fixed_order_hopper_kernel(
    x_desc, weight_desc, y_desc, num_tokens, N, K, num_programs,
    TILE_TOKENS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    token_tiles, column_tiles = tl.cdiv(num_tokens, TILE_TOKENS), tl.cdiv(N, TILE_COLUMNS)
    group_size = GROUP * column_tiles
    for tile in tl.range(tl.program_id(0), token_tiles * column_tiles, num_programs, flatten=True):
        first = tile // group_size * GROUP
        in_group = tl.minimum(token_tiles - first, GROUP)
        token = (first + tile % group_size % in_group) * TILE_TOKENS
        column = tile % group_size // in_group * TILE_COLUMNS
        acc = tl.zeros([TILE_TOKENS, TILE_COLUMNS], tl.float32)
        for k in range(0, K, TILE_K):  # What lies outside is zeros.
            acc = tl.dot(x_desc.load([token, k]), weight_desc.load([column, k]).T, acc)
        y_desc.store([token, column], acc.to(y_desc.dtype))


@kernel_or_twin
def fixed_order_linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x W^T`, summed in float32 and rounded once: a new `[num_tokens, N]`.

    x: `[num_tokens, K]`, float32, float16 or bfloat16, with contiguous rows. weight: `[N, K]` of x's dtype, contiguous.
    The kernel raises ValueError for others. A row of its result has the same bits for any other rows and any number of
    them; the twin, which has the kernel's sums and rounding, does not promise that.
    """
    return (x.float() @ weight.float().T).to(x.dtype)


@kernel_of(fixed_order_linear)
def _launch_fixed_order_linear(x, weight):
    num_tokens, (N, K) = len(x), weight.shape
    y = torch.empty(num_tokens, N, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return y
    check_layer(x, weight, None, num_tokens)
    if GpuFacts.of(x.device).is_hopper and all(map(_is_addressable, (x, weight, y))):
        fixed_order_linear_on_hopper(x, weight, y, _tile(num_tokens, N, GpuFacts.of(x.device).num_multiprocessors))
        return y
    grid = triton.cdiv(N, TILE_COLUMNS), triton.cdiv(num_tokens, TILE_TOKENS)
    launcher(_fixed_order_kernel, grid)(
        x, weight, y, num_tokens, x.stride(0), N=N, K=K, TILE_TOKENS=TILE_TOKENS, TILE_COLUMNS=TILE_COLUMNS,
        TILE_K=_TILE_BYTES // x.element_size(), num_warps=_NUM_WARPS, num_stages=_NUM_STAGES,
    )  # fmt: skip
    return y


def fixed_order_linear_on_hopper(x: Tensor, weight: Tensor, y: Tensor, tile: Tile) -> None:
    """`y = x W^T` with a tile of a given size, of tensors as `fixed_order_linear`'s in 16 bits, whose rows begin at
    multiples of 16 bytes."""
    (num_tokens, K), N = x.shape, len(weight)
    num_programs = min(tile.num_programs(num_tokens, N), GpuFacts.of(x.device).num_multiprocessors)
    launcher(_fixed_order_hopper_kernel, (num_programs,))(
        TensorDescriptor.from_tensor(x, [tile.tokens, tile.k]),
        TensorDescriptor.from_tensor(weight, [tile.columns, tile.k]),
        TensorDescriptor.from_tensor(y, [tile.tokens, tile.columns]),
        num_tokens, N, K, num_programs, TILE_TOKENS=tile.tokens, TILE_COLUMNS=tile.columns, TILE_K=tile.k,
        GROUP=_GROUP, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip


def _tile(num_tokens: int, N: int, num_multiprocessors: int) -> Tile:
    for tile, most in _TILES:
        is_one_wave = tile.num_programs(num_tokens, N) <= num_multiprocessors
        if num_tokens <= (2 * most if is_one_wave else most):
            return tile
    return _LARGEST_TILE


def _is_addressable(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can address it, and tensor cores multiply its numbers as they are."""
    size = x.element_size()
    return size == 2 and x.data_ptr() % 16 == 0 and x.stride(0) * size % 16 == 0
