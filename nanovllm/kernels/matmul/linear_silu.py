"""The gate and up projection of a long prefill with SwiGLU as its last step: gate and up never go to memory.

As two launches, the projection writes 2 * intermediate values a token, and the activation reads them back and writes
half as many. Here a program multiplies a tile of tokens with a tile of the gate and the same tile of up, so each thread
ends with both factors of its results. The kernel is persistent: a program computes one tile after the other. Tiles are
loaded by the tensor memory accelerator.
"""

import torch
from torch import Tensor

from nanovllm.kernels.gpu import GpuFacts
from nanovllm.kernels.launch import launcher
from nanovllm.kernels.triton_stub import TensorDescriptor, tl, triton

# Three stages of three tiles and the results fill an H200's shared memory.
TILE_TOKENS, TILE_COLUMNS, TILE_K = 128, 128, 64
_NUM_WARPS, _NUM_STAGES = 8, 3
# Neighbouring programs multiply this many tiles of tokens with the same weights, which are then in L2.
_GROUP = 4


# Every prefill has another number of tokens: specialised on it, the kernel would be compiled again in mid-run.
@triton.jit(do_not_specialize=["num_tokens", "num_programs"])
def _linear_silu_kernel(
    x_desc, weight_desc, y_desc, num_tokens, intermediate, K, num_programs,
    TILE_TOKENS: tl.constexpr, TILE_COLUMNS: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    token_tiles = tl.cdiv(num_tokens, TILE_TOKENS)
    column_tiles = intermediate // TILE_COLUMNS
    group_size = GROUP * column_tiles
    for tile in range(tl.program_id(0), token_tiles * column_tiles, num_programs):
        first = tile // group_size * GROUP
        in_group = tl.minimum(token_tiles - first, GROUP)
        token = (first + tile % group_size % in_group) * TILE_TOKENS
        column = tile % group_size // in_group * TILE_COLUMNS
        gate = tl.zeros([TILE_TOKENS, TILE_COLUMNS], tl.float32)
        up = tl.zeros([TILE_TOKENS, TILE_COLUMNS], tl.float32)
        for k in range(0, K, TILE_K):
            x = x_desc.load([token, k])
            gate = tl.dot(x, weight_desc.load([column, k]).T, gate)
            up = tl.dot(x, weight_desc.load([intermediate + column, k]).T, up)
        product = gate / (1.0 + tl.exp(-gate)) * up
        y_desc.store([token, column], product.to(y_desc.dtype))


def can_fuse(weight: Tensor) -> bool:
    """Whether `linear_silu` takes this weight: on Hopper, in half precision, in whole tiles."""
    rows, K = weight.shape
    return (
        weight.is_cuda
        and weight.dtype in (torch.bfloat16, torch.float16)
        and K % TILE_K == 0
        and rows % (2 * TILE_COLUMNS) == 0
        and GpuFacts.of(weight.device).is_hopper
    )


def linear_silu(x: Tensor, weight: Tensor) -> Tensor:
    """`silu(x Wg^T) * (x Wu^T)`, the two products kept in float32 (Shazeer 2020): `[num_tokens, intermediate]`.

    x: `[num_tokens, K]`, contiguous, bfloat16 or float16, K a multiple of 64. weight: `[2 * intermediate, K]`,
    contiguous, of x's dtype: Wg, then Wu; intermediate a multiple of 128. Raises ValueError for others.
    """
    num_tokens, K = x.shape
    intermediate = weight.shape[0] // 2
    if weight.shape[1] != K or K % TILE_K or weight.shape[0] % (2 * TILE_COLUMNS) or x.dtype != weight.dtype:
        raise ValueError(
            f"x {list(x.shape)} {x.dtype} and weight {list(weight.shape)} {weight.dtype} must have one dtype, with K a "
            f"multiple of {TILE_K} and intermediate one of {TILE_COLUMNS}"
        )
    y = torch.empty(num_tokens, intermediate, dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return y
    tiles = triton.cdiv(num_tokens, TILE_TOKENS) * (intermediate // TILE_COLUMNS)
    num_programs = min(GpuFacts.of(x.device).num_multiprocessors, tiles)
    launcher(_linear_silu_kernel, (num_programs,))(
        TensorDescriptor.from_tensor(x, [TILE_TOKENS, TILE_K]),
        TensorDescriptor.from_tensor(weight, [TILE_COLUMNS, TILE_K]),
        TensorDescriptor.from_tensor(y, [TILE_TOKENS, TILE_COLUMNS]),
        num_tokens, intermediate, K, num_programs,
        TILE_TOKENS=TILE_TOKENS, TILE_COLUMNS=TILE_COLUMNS, TILE_K=TILE_K, GROUP=_GROUP,
        num_warps=_NUM_WARPS, num_stages=_NUM_STAGES,
    )  # fmt: skip
    return y
