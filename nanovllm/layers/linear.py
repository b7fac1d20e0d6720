"""Linear layers that know their shard: columns or rows over the tensor-parallel ranks (Megatron-LM, arXiv:1909.08053).

Every parameter carries two things for the loader: `shards`, the checkpoint tensors that make it up ({shard id:
their full shape}), and `weight_loader(param, loaded, shard_id)`, which copies this rank's part of one of them.
`loaded` is a tensor or anything that yields one when sliced, such as a safetensors slice, of which only the part
asked for is read.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from nanovllm.layers import decode_linear
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.product import add_product, product
from nanovllm.layers.quack import Quack
from nanovllm.layers.skinny_linear import linear_add
from nanovllm.utils.parallel import TensorParallel


def make_parameter(shape: tuple[int, ...], shards: dict, weight_loader) -> nn.Parameter:
    """An uninitialised parameter of this rank's shape, which knows how it is loaded."""
    parameter = nn.Parameter(torch.empty(shape), requires_grad=False)
    parameter.shards = shards
    parameter.weight_loader = weight_loader
    return parameter


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with W's output rows over the ranks; several matrices may be stacked into one.

    Args:
        input_size: columns of W.
        output_sizes: {shard id: output rows of that matrix in the checkpoint}.
        bias: whether there is one.
        tp: this rank's place.

    forward: [num_tokens, input_size] -> [num_tokens, sum of this rank's parts].
    """

    def __init__(self, input_size: int, output_sizes: dict, bias: bool, tp: TensorParallel):
        super().__init__()
        self.output_sizes = output_sizes
        self.parts = {key: self.part(key, tp) for key in output_sizes}
        rows = sum(num_rows for _, num_rows in self.parts.values())
        shapes = {key: (size, input_size) for key, size in output_sizes.items()}
        self.weight = make_parameter((rows, input_size), shapes, self.weight_loader)
        self.bias = None
        if bias:
            shapes = {key: (size,) for key, size in output_sizes.items()}
            self.bias = make_parameter((rows,), shapes, self.weight_loader)
        self.register_buffer("arrivals", decode_linear.make_arrivals(), persistent=False)
        self.quack: Quack | None = None

    def part(self, shard_id, tp: TensorParallel) -> tuple[int, int]:
        """First row and number of rows that this rank takes of a checkpoint matrix."""
        num_rows = tp.shard(self.output_sizes[shard_id], f"output size of {shard_id or 'a layer'}")
        return tp.rank * num_rows, num_rows

    def weight_loader(self, param: nn.Parameter, loaded, shard_id=None) -> None:
        offset = 0
        for key, (start, num_rows) in self.parts.items():
            if key == shard_id:
                param.data[offset : offset + num_rows].copy_(loaded[start : start + num_rows])
                return
            offset += num_rows
        raise KeyError(shard_id)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return product(x, self.weight, self.bias, arrivals=self.arrivals, quack=self.quack)

    def of_parts(self, parts: Iterable[torch.Tensor], num_tokens: int) -> torch.Tensor:
        """`forward` of parts that follow each other, num_tokens in all; each is asked for once the product of the one
        before has been launched."""
        y = None
        for part in parts:
            if y is None:
                y, start = part.new_empty(num_tokens, len(self.weight)), 0
            product(part, self.weight, self.bias, out=y[start : start + len(part)])
            start += len(part)
        return y


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Equal-input matrices as one product: gate and up. Shard ids are 0, 1, ..."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool, tp: TensorParallel):
        super().__init__(input_size, dict(enumerate(output_sizes)), bias, tp)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as one product, whole heads a rank. Shard ids are "q", "k" and "v". With fewer
    KV heads than ranks, each rank holds the one that its query heads read.

    forward: [num_tokens, hidden_size] -> [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim], both head
    counts this rank's.
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


class RowParallelLinear(nn.Module):
    """y = x W^T + b with W's input columns over the ranks, and the sum over the ranks after it: always added to the
    residual stream, so that the addition needs no pass over memory of its own. x: [num_tokens, this rank's part of
    input_size]; residual: [num_tokens, output_size], the same on all ranks.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel):
        super().__init__()
        self.tp = tp
        shape = (output_size, tp.shard(input_size, "input size of a row-parallel layer"))
        self.weight = make_parameter(shape, {None: (output_size, input_size)}, self.weight_loader)
        self.bias = make_parameter((output_size,), {None: (output_size,)}, self.bias_loader) if bias else None
        self.register_buffer("arrivals", decode_linear.make_arrivals(), persistent=False)
        self.quack: Quack | None = None

    def weight_loader(self, param: nn.Parameter, loaded, shard_id=None) -> None:
        num_columns = param.shape[1]
        start = self.tp.rank * num_columns
        param.data.copy_(loaded[:, start : start + num_columns])

    def bias_loader(self, param: nn.Parameter, loaded, shard_id=None) -> None:
        param.data.copy_(loaded[:])

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """residual + y, overwriting residual."""
        if self.tp.size == 1:
            return add_product(residual, x, self.weight, self.bias, self.arrivals, self.quack)
        if self.tp.rank == 0:  # which brings the residual into the sum as well
            residual.addmm_(x, self.weight.t())
            if self.bias is not None:
                residual += self.bias
        else:
            torch.mm(x, self.weight.t(), out=residual)
        return self.tp.all_reduce(residual)

    def add_norm(self, residual: torch.Tensor, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """norm(residual + y), overwriting residual with the sum."""
        reducer = self.tp.reducer
        if reducer is None or not reducer.takes(len(x)):
            return norm(self.add_to(residual, x))
        partial, bias = reducer.partial(len(x)), self._bias_of_rank()
        product(x, self.weight, bias, partial, self.arrivals)
        return reducer.add_norm(residual, partial, norm.weight, norm.eps)

    def add_norm_parts(
        self, residual: torch.Tensor, parts: Iterable[torch.Tensor], norm: RMSNorm
    ) -> Iterator[torch.Tensor]:
        """`add_norm` of parts that follow each other, through the reducer's long_sums. The parts are asked for when the
        first result is; the last sum travels while the caller is at work on the first result."""
        sums = self.tp.reducer.long_sums
        under_way, start = [], 0
        for x in parts:
            partial = x.new_empty(len(x), len(self.weight))
            product(x, self.weight, self._bias_of_rank(), out=partial)
            under_way.append((residual[start : start + len(x)], sums.send(partial)))
            start += len(x)
        for residual_part, sent in under_way:
            yield sums.finish(residual_part, sent, norm.weight, norm.eps)

    def skinny_add(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """`add_to` for the few tokens of `is_skinny`, by kernels that start while the one before still runs."""
        bias = self._bias_of_rank()
        if self.tp.size == 1:
            linear_add(x, self.weight, residual, bias, pdl=True)
        else:
            self.tp.reducer.add_linear(residual, x, self.weight, bias)

    def _bias_of_rank(self) -> torch.Tensor | None:
        """One rank brings the bias into the sum, which would hold it once a rank otherwise."""
        return self.bias if self.tp.rank == 0 else None
