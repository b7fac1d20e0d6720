"""Rows of a table that lies on several GPUs, each read from where it is: an embedding without a sum over the ranks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanovllm.kernels.launch import launcher


@triton.jit
def _peer_embedding_kernel(tables, token_ids, abort, y, rows, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    is_alive = tl.load(abort, volatile=True) == 0
    # What is drawn once aborted may be anything.
    token_id = tl.where(is_alive, tl.load(token_ids + token).to(tl.int64), 0)
    table = tl.load(tables + token_id // rows).to(tl.pointer_type(y.dtype.element_ty))
    # An address from memory could be odd, as far as the compiler knows.
    table = tl.multiple_of(table, 16)
    column = tl.arange(0, BLOCK)
    # Once aborted, the others' memory may be gone with them.
    reachable = column < tl.where(is_alive, HIDDEN, 0)
    row = tl.load(table + token_id % rows * HIDDEN + column, mask=reachable, other=0.0)
    tl.store(y + token * HIDDEN + column, row, mask=column < HIDDEN)


def peer_embedding(
    tables: Tensor, token_ids: Tensor, abort: Tensor, rows: int, hidden: int, dtype: torch.dtype
) -> Tensor:
    """The rows of `token_ids`.

    Args:
        tables: int64 `[size]`, addresses, multiples of 16, of the ranks' shards, each `[rows, hidden]`, contiguous.
        token_ids: int32 or int64 `[num_tokens]`, each in 0..size * rows - 1: not checked.
        abort: int32 `[1]`; other than 0, the result is zeros.
        rows: of each shard.
        hidden: length of a row.
        dtype: of the table.

    Returns:
        `[num_tokens, hidden]` of `dtype`.
    """
    y = torch.empty(len(token_ids), hidden, dtype=dtype, device=token_ids.device)
    block = triton.next_power_of_2(hidden)
    num_warps = min(max(block // 256, 1), 16)
    launcher(_peer_embedding_kernel, (len(token_ids),))(
        tables, token_ids, abort, y, rows, HIDDEN=hidden, BLOCK=block, num_warps=num_warps
    )
    return y
