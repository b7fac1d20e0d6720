"""Linear layers whose weights are split over tensor-parallel ranks, by columns or rows (Megatron-LM, arXiv:1909.08053).

Every parameter knows how it is loaded (`parameters`). Weights may be in fp8 (`quantization`), with scales from the
checkpoint, or computed while the weights are loaded.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.parameters import as_weight, load_rows, make_parameter, make_weight, store
from nanovllm.layers.formats.quantization import Weight
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.matmul import Matmul, Problem
from nanovllm.layers.matmul.packed_weights import packed
from nanovllm.layers.parallel.rank_sums import NormedParts, add_over_ranks
from nanovllm.layers.parallel.tensor_parallel import TensorParallel


class LinearBase(nn.Module):
    """A weight `[N, K]`, perhaps a bias `[N]`. A subclass has `weight_loader`, also of scales, and `bias_loader`."""

    def __init__(self, weight_shape: tuple[int, int], shards: dict, bias: bool, tp: TensorParallel):
        """weight_shape: this rank's part. shards: of the weight."""
        super().__init__()
        self.tp = tp
        self.matmul = Matmul()  # cuBLAS alone, before the model's `use_matmul`
        self.weight, self.weight_scale = make_weight(weight_shape, shards, self.weight_loader)
        self.bias = None
        if bias:
            bias_shards = {key: shape[:1] for key, shape in shards.items()}
            self.bias = make_parameter(weight_shape[:1], bias_shards, self.bias_loader)

    @property
    def matrix(self) -> Weight:
        """The weight, as products take it."""
        return as_weight(self.weight)

    def pack_weight(self) -> None:
        """Let a CPU's products read the loaded weight faster, if there is a way (`packed_weights`)."""
        self.weight = packed(self.weight)


class ReplicatedLinear(LinearBase):
    """y = x W^T + b, the same on every rank: [num_tokens, input_size] -> [num_tokens, output_size]."""

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel):
        shape = output_size, input_size
        super().__init__(shape, {None: shape}, bias, tp)

    def weight_loader(self, param: Any, loaded, shard_id=None) -> None:
        store(param, loaded[:])

    bias_loader = weight_loader

    def forward(self, x: torch.Tensor | Normed) -> torch.Tensor:
        return self.matmul.linear(x, self.matrix, self.bias)


class ColumnParallelLinear(LinearBase):
    """y = x W^T + b with W's rows, the output features, split over the ranks. W may be several matrices, stacked. The
    checkpoint has them one by one, or all as one tensor, whose shard id is None.

    forward: [num_tokens, input_size] -> [num_tokens, this rank's rows].
    """

    def __init__(self, input_size: int, output_sizes: dict, bias: bool, tp: TensorParallel):
        """output_sizes: {shard id: rows of that matrix in the checkpoint}."""
        self.output_sizes = output_sizes
        self.parts = {key: self.part(key, tp) for key in output_sizes}
        rows = sum(num_rows for _, num_rows in self.parts.values())
        shards = {key: (size, input_size) for key, size in output_sizes.items()}
        shards[None] = (sum(output_sizes.values()), input_size)
        super().__init__((rows, input_size), shards, bias, tp)

    def part(self, shard_id, tp: TensorParallel) -> tuple[int, int]:
        """First row and number of rows of a checkpoint matrix that this rank has."""
        num_rows = tp.shard(self.output_sizes[shard_id], f"output size of {shard_id or 'a layer'}")
        return tp.rank * num_rows, num_rows

    def weight_loader(self, param: Any, loaded, shard_id=None) -> None:
        offset = first_row = 0
        for key, (start, num_rows) in self.parts.items():
            if shard_id in (key, None):
                load_rows(param, offset, loaded, start + (first_row if shard_id is None else 0), num_rows)
            offset += num_rows
            first_row += self.output_sizes[key]

    bias_loader = weight_loader

    def forward(self, x: torch.Tensor | Normed | NormedParts) -> torch.Tensor:
        if not isinstance(x, NormedParts):
            return self.matmul.linear(x, self.matrix, self.bias)
        y, start = x.residual.new_empty(len(x.residual), len(self.weight)), 0
        for part in x.parts:
            self.matmul.linear(part, self.matrix, self.bias, out=y[start : start + len(part)])
            start += len(part)
        return y


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several matrices with the same input as one product: gate and up. Shard ids are 0, 1, ..."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool, tp: TensorParallel):
        super().__init__(input_size, dict(enumerate(output_sizes)), bias, tp)

    def silu(self, x: torch.Tensor | Normed) -> torch.Tensor | Gated:
        """SwiGLU (Shazeer 2020) without a bias: `silu(gate) * up` of `gate, up = forward(x)`, computed or not."""
        return self.matmul.linear_silu(x, self.matrix)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as one product. Shard ids are "q", "k" and "v". Each rank has whole heads; with
    fewer KV heads than ranks, several ranks have a copy of the same KV head.

    forward: [num_tokens, hidden_size] -> [num_tokens, this rank's (num_heads + 2 * num_kv_heads) * head_dim].
    """

    def __init__(
        self, hidden_size: int, head_dim: int, num_heads: int, num_kv_heads: int, bias: bool, tp: TensorParallel
    ):
        self.num_heads = tp.shard(num_heads, "num_attention_heads")
        self.head_dim = head_dim
        self.first_kv_head, self.num_kv_heads = tp.shard_kv_heads(num_kv_heads)
        kv_size = num_kv_heads * head_dim
        super().__init__(hidden_size, {"q": num_heads * head_dim, "k": kv_size, "v": kv_size}, bias, tp)

    def part(self, shard_id, tp: TensorParallel) -> tuple[int, int]:
        if shard_id == "q":
            return super().part(shard_id, tp)
        return self.first_kv_head * self.head_dim, self.num_kv_heads * self.head_dim


class RowParallelLinear(LinearBase):
    """y = x W^T + b with W's columns, the input features, split over the ranks, and y summed over the ranks.

    y is added to the residual stream, because the product can do so without another pass over memory. x: [num_tokens,
    this rank's part of input_size]; residual: [num_tokens, output_size], the same on all ranks.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel):
        shape = (output_size, tp.shard(input_size, "input size of a row-parallel layer"))
        super().__init__(shape, {None: (output_size, input_size)}, bias, tp)

    def add(
        self,
        residual: torch.Tensor,
        x: torch.Tensor | Gated | Iterable[torch.Tensor | Gated],
        norm: RMSNorm | None,
        output_norm: RMSNorm | None = None,
    ) -> Normed | NormedParts:
        """Add y, or output_norm(y), to residual, in place. Returns norm of the sum; without a norm, the sum itself."""
        return add_over_ranks(self, residual, x, norm, output_norm)

    def part_of_sum(self, operation: str, x: torch.Tensor | Gated, out: torch.Tensor | None = None) -> torch.Tensor:
        """This rank's part of y: a new tensor for the operation linear; into `out` for linear_sum; added to `out` for
        linear_add."""
        return self.matmul.run(Problem(operation, x, self.matrix, self.bias_of_rank, out))

    @property
    def bias_of_rank(self) -> torch.Tensor | None:
        """Only rank 0 adds the bias, or the sum would contain it several times."""
        return self.bias if self.tp.rank == 0 else None

    def weight_loader(self, param: Any, loaded, shard_id=None) -> None:
        num_columns = param.shape[1]
        start = self.tp.rank * num_columns % param.shards[shard_id][1]  # 0 for the scales of whole rows
        store(param, loaded[:, start : start + num_columns])

    def bias_loader(self, param: Any, loaded, shard_id=None) -> None:
        param.data.copy_(loaded[:])
