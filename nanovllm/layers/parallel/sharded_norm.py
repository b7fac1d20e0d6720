"""RMSNorm over a width that is split over the tensor-parallel ranks: OLMo 2's norms of all heads of q and of k."""

import torch
from torch import Tensor

from nanovllm.layers.formats.parameters import make_parameter
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.parallel.tensor_parallel import TensorParallel


class ShardedRMSNorm(RMSNorm):
    """The norm of this rank's columns by the mean square of all ranks' columns; see `normalize_over_ranks`.

    Args:
        start, size: this rank's columns.
        full_size: columns of the checkpoint's weight.
        eps: added to the mean square.
    """

    def __init__(self, start: int, size: int, full_size: int, eps: float):
        super().__init__(0, eps)
        self.start = start
        self.weight = make_parameter((size,), {None: (full_size,)}, self.weight_loader)

    def weight_loader(self, param, loaded, shard_id=None) -> None:
        param.data.copy_(loaded[self.start : self.start + len(param)])


def normalize_over_ranks(parts: list[tuple[Tensor, ShardedRMSNorm]], tp: TensorParallel) -> None:
    """Normalize each tensor [num_tokens, size] in place. All ranks have equally many columns, and all columns equally
    many copies over the ranks. So the mean of the ranks' mean squares is the mean square of the whole width."""
    if tp.size == 1:
        for x, norm in parts:
            norm.norm_in_place(x)
        return
    wide = [x.float() for x, _ in parts]
    squares = torch.stack([x.square().mean(-1) for x in wide])
    mean_squares = tp.all_reduce(squares).div_(tp.size).unsqueeze(-1)
    for (x, norm), values, mean_square in zip(parts, wide, mean_squares, strict=True):
        x.copy_(values * torch.rsqrt(mean_square + norm.eps) * norm.weight.float())
