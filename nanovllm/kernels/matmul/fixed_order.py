"""Products that sum each row over K in one order, whatever the number of rows: for `deterministic=True`.

One tile size computes all numbers of rows, and a program sums its whole K. So a row's bits depend neither on the other
rows nor on its place among them. Libraries, and our kernels for few rows, choose other tiles for other numbers of rows,
or split K.
"""

import torch
from torch import Tensor

from nanovllm.kernels import kernel_of, kernel_or_twin
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.matmul.linear_checks import check_layer
from nanovllm.kernels.triton_stub import tl, triton

# Narrow, because few rows leave no other programs than those of the columns.
TILE_TOKENS, TILE_COLUMNS = 64, 32
_TILE_BYTES = 128  # of a row of both tiles: 64 numbers of 16 bits
_NUM_WARPS, _NUM_STAGES = 4, 4


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
    grid = triton.cdiv(N, TILE_COLUMNS), triton.cdiv(num_tokens, TILE_TOKENS)
    launcher(_fixed_order_kernel, grid)(
        x, weight, y, num_tokens, x.stride(0), N=N, K=K, TILE_TOKENS=TILE_TOKENS, TILE_COLUMNS=TILE_COLUMNS,
        TILE_K=_TILE_BYTES // x.element_size(), num_warps=_NUM_WARPS, num_stages=_NUM_STAGES,
    )  # fmt: skip
    return y
