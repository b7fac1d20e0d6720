"""Linear layers whose weights are split over tensor-parallel ranks, by columns or rows (Megatron-LM, arXiv:1909.08053).

Every parameter knows how it is loaded (`parameters`), and the weight's format how it is stored (`formats`).
"""

from collections.abc import Hashable, Iterable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import TypedDict, Unpack

from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.all_formats import get_weight_format
from nanovllm.layers.formats.format import Input, Weight, WeightFormat, value_of
from nanovllm.layers.formats.parameters import LayerParameter, Shards, Sliceable, load_rows, make_parameter
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.matmul import Matmul, Products
from nanovllm.layers.parallel.rank_sums import add_over_ranks
from nanovllm.layers.parallel.tensor_parallel import TensorParallel


class LinearOptions(TypedDict, total=False):
    """Arguments of `LinearBase` that its subclasses have too."""

    tp: TensorParallel | None
    matmul: Matmul | None
    format: WeightFormat | None
    size_name: str | None


def divide(numerator: int, denominator: int) -> int:
    """The quotient. Raises ValueError if there is a remainder."""
    if numerator % denominator:
        raise ValueError(f"{numerator} is not a multiple of {denominator}")
    return numerator // denominator


def part_of(size: int, tp: TensorParallel, name: str | None) -> int:
    """A rank's part of a size. Raises ValueError, with the name that it has in config.json, if there is none."""
    return divide(size, tp.size) if name is None else tp.shard(size, name)


class LinearBase(nn.Module):
    """y = x W^T + b with a weight `[output_size, input_size]`, both sizes of this rank.

    Args:
        tp_dim: the weight's dimension that is split over the ranks; None: none is.
        tp: this rank's place; None: there is one rank.
        matmul: chooses who computes the products, by a table of measured ones; None: torch does.
        format: of the weight; None: the one of the block that this is called in (`weight_format`).
        shards: the checkpoint tensors that make the weight up: {shard id: their full shape}; None: one like the weight.
        size_name: what config.json calls the size that is split over the ranks. The other size of such a layer is the
            hidden_size, and ValueError is raised if the format cannot store a rank's part. None: nothing is checked.

    Attributes:
        tp_rank, tp_size: of tp.
        is_plain: whether forward is torch's `F.linear`: without a table, and of a weight that is a plain tensor.
        products: this product and its variants, such as one that adds to its output, by operation.
    """

    weight: LayerParameter
    weight_scale: LayerParameter  # in a format with scales

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        tp_dim: int | None = None,
        *,
        tp: TensorParallel | None = None,
        matmul: Matmul | None = None,
        format: WeightFormat | None = None,
        shards: Shards | None = None,
        size_name: str | None = None,
    ):
        super().__init__()
        self.tp, self.tp_dim = tp or TensorParallel(), tp_dim
        self.tp_rank, self.tp_size = self.tp.rank, self.tp.size
        self.format = format or get_weight_format()
        if size_name is not None:
            columns = "hidden_size" if tp_dim == 0 else size_name, input_size
            self.format.check_sizes(self.named_rows(size_name, output_size), columns, self.tp_size)
        shape, shards = (output_size, input_size), shards or {None: (output_size, input_size)}
        for name, parameter in self.format.parameters(shape, shards, self.weight_loader).items():
            self.register_parameter(name, parameter)
        self.bias: nn.Parameter | None = None
        if bias:
            bias_shards = {key: shape[:1] for key, shape in shards.items()}
            self.bias = make_parameter(shape[:1], bias_shards, self.bias_loader, Unquantized())
        self.has_table = matmul is not None
        self.is_plain = not self.has_table and self.format == Unquantized()
        self.products = Products(matmul, self, self.bias_of_rank)

    def named_rows(self, size_name: str, num_rows: int) -> Iterable[tuple[str, int]]:
        """The rows that are cut from tensors of the checkpoint, for `WeightFormat.check_sizes`."""
        return [("hidden_size", num_rows)]

    def weight_loader(self, param: LayerParameter, loaded_weight: Sliceable, loaded_shard_id: object = None) -> None:
        """Copy this rank's part of a tensor of the checkpoint to a parameter: the weight, or its scales."""
        param.stored.format.store(param, loaded_weight[:])

    def bias_loader(self, param: LayerParameter, loaded_weight: Sliceable, loaded_shard_id: object = None) -> None:
        """The same of the bias."""
        self.weight_loader(param, loaded_weight, loaded_shard_id)

    def forward(self, x: Input) -> Tensor:
        """[num_tokens, input_size] -> [num_tokens, output_size]."""
        if self.is_plain:
            return F.linear(value_of(x), self.weight, self.bias_of_rank)
        return self.products["linear"](x)

    @property
    def matrix(self) -> Weight:
        """The weight, as products take it."""
        return self.format.weight(self)

    @property
    def bias_of_rank(self) -> Tensor | None:
        return self.bias

    def pack_weight(self) -> None:
        """Let this machine read the loaded weight faster, if there is a way."""
        self.format, self.weight = self.format.packed(self.weight)
        self._forget_products()

    def unpack_weight(self) -> None:
        """Undo `pack_weight`, so that the weight can be loaded again."""
        self.format, self.weight = self.format.unpacked(self.weight)
        self._forget_products()

    def _forget_products(self) -> None:
        self.is_plain = not self.has_table and self.format == Unquantized()
        self.products.clear()


class ReplicatedLinear(LinearBase):
    """y = x W^T + b, the same on every rank: [num_tokens, input_size] -> [num_tokens, output_size]."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False, **options: Unpack[LinearOptions]):
        """options: LinearBase's."""
        super().__init__(input_size, output_size, bias, **options)


class ColumnParallelLinear(LinearBase):
    """y = x W^T + b with W's rows, the output features, split over the ranks.

    A subclass may stack several matrices. The checkpoint has them one by one, or all as one tensor, whose shard id is
    None.

    forward: [num_tokens, input_size] -> [num_tokens, this rank's rows].
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        *,
        tp: TensorParallel | None = None,
        matrix_sizes: dict | None = None,
        size_name: str | None = None,
        **options: Any,
    ):
        """matrix_sizes: {shard id: rows of that matrix in the checkpoint}; None: there is one matrix. options:
        LinearBase's."""
        tp, self.size_name = tp or TensorParallel(), size_name
        self.matrix_sizes: dict = {None: output_size} if matrix_sizes is None else matrix_sizes
        self.parts = {key: self.part(key, tp) for key in self.matrix_sizes}
        rows = sum(num_rows for _, num_rows in self.parts.values())
        sizes = self.checkpoint_sizes() | {None: output_size}
        shards = {key: (size, input_size) for key, size in sizes.items()}
        options |= {"tp_dim": 0, "tp": tp, "shards": shards, "size_name": size_name}
        super().__init__(input_size, rows, bias, **options)

    def named_rows(self, size_name: str, num_rows: int) -> Iterable[tuple[str, int]]:
        return ((size_name, num_rows) for _, num_rows in self.parts.values())

    def checkpoint_sizes(self) -> dict:
        """{shard id: rows of a tensor of the checkpoint}."""
        return self.matrix_sizes

    def part(self, shard_id: Hashable, tp: TensorParallel) -> tuple[int, int]:
        """First row and number of rows of a checkpoint matrix that this rank has."""
        num_rows = part_of(self.matrix_sizes[shard_id], tp, self.size_name)
        return tp.rank * num_rows, num_rows

    def weight_loader(self, param: LayerParameter, loaded_weight: Sliceable, loaded_shard_id: object = None) -> None:
        offset = first_row = 0
        for key, (start, num_rows) in self.parts.items():
            if loaded_shard_id in (key, None):
                load_rows(param, offset, loaded_weight, start + (first_row if loaded_shard_id is None else 0), num_rows)
            offset += num_rows
            first_row += self.matrix_sizes[key]


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several matrices with the same input as one product: gate and up. Shard ids are 0, 1, ..."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool = False, **options: Unpack[LinearOptions]):
        """output_sizes: of each matrix, on all ranks together. options: LinearBase's."""
        self.output_sizes = output_sizes
        matrix_sizes = dict(enumerate(self.output_sizes))
        super().__init__(input_size, sum(output_sizes), bias, matrix_sizes=matrix_sizes, **options)

    def silu(self, x: Tensor | Normed) -> Tensor | Gated:
        """SwiGLU (Shazeer 2020) without a bias: `silu(gate) * up` of `gate, up = forward(x)`, computed or not."""
        return self.products["linear_silu"](x)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as one product. Shard ids are "q", "k" and "v". Each rank has whole heads; with
    fewer KV heads than ranks, several ranks have a copy of the same KV head.

    forward: [num_tokens, hidden_size] -> [num_tokens, this rank's (num_heads + 2 * num_kv_heads) * head_size].

    Attributes:
        num_heads, num_kv_heads: of this rank.
        first_kv_head: this rank's first one among all.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = False,
        *,
        tp: TensorParallel | None = None,
        more_sizes: dict[str, int] | None = None,
        names: tuple[str, str] = ("num_key_value_heads", "head_dim"),
        **options: Any,
    ):
        """more_sizes: of further parts, which are split as q is. names: what config.json calls the number of KV heads
        and their size. options: LinearBase's."""
        tp = tp or TensorParallel()
        total_num_kv_heads = total_num_kv_heads or total_num_heads
        self.head_size, self.names = head_size, names
        self.num_heads = tp.shard(total_num_heads, "num_attention_heads")
        self.first_kv_head, self.num_kv_heads = tp.shard_kv_heads(total_num_kv_heads, names[0])
        kv_size = total_num_kv_heads * head_size
        sizes = {"q": total_num_heads * head_size, "k": kv_size, "v": kv_size, **(more_sizes or {})}
        options |= {"tp": tp, "matrix_sizes": sizes, "size_name": f"num_attention_heads * {names[1]}"}
        super().__init__(hidden_size, sum(sizes.values()), bias, **options)

    def named_rows(self, size_name: str, num_rows: int) -> Iterable[tuple[str, int]]:
        return [(size_name, self.parts["q"][1]), (" * ".join(self.names), self.parts["k"][1])]

    def part(self, shard_id: Hashable, tp: TensorParallel) -> tuple[int, int]:
        if shard_id in ("k", "v"):
            return self.first_kv_head * self.head_size, self.num_kv_heads * self.head_size
        return super().part(shard_id, tp)


class KeysAsValuesParallelLinear(QKVParallelLinear):
    """The same for a checkpoint without a projection of values: k's is v's too. Its rows are there twice, because keys
    and values get norms of their own."""

    def checkpoint_sizes(self) -> dict:
        return {key: size for key, size in self.matrix_sizes.items() if key != "v"}

    def weight_loader(self, param: LayerParameter, loaded_weight: Sliceable, loaded_shard_id: object = None) -> None:
        super().weight_loader(param, loaded_weight, loaded_shard_id)
        if loaded_shard_id == "k":
            super().weight_loader(param, loaded_weight, "v")


class GatedQKVParallelLinear(QKVParallelLinear):
    """q, k and v, then a gate for each number of q: [num_tokens, this rank's (2 * num_heads + 2 * num_kv_heads) *
    head_size]. In the checkpoint's q_proj each head has the rows of its query and then the rows of its gate."""

    def __init__(self, hidden_size: int, head_size: int, total_num_heads: int, *args: Any, **options: Any):
        more_sizes = {"gate": total_num_heads * head_size}
        super().__init__(hidden_size, head_size, total_num_heads, *args, more_sizes=more_sizes, **options)

    def named_rows(self, size_name: str, num_rows: int) -> Iterable[tuple[str, int]]:
        return [(self.names[1], self.head_size)]

    def checkpoint_sizes(self) -> dict:
        return self.matrix_sizes | {"q": self.matrix_sizes["q"] + self.matrix_sizes["gate"]}

    def weight_loader(self, param: LayerParameter, loaded_weight: Sliceable, loaded_shard_id: object = None) -> None:
        if loaded_shard_id != "q":
            super().weight_loader(param, loaded_weight, loaded_shard_id)
            return
        first, num_rows = self.parts["q"]
        first_gate = sum(self.parts[key][1] for key in "qkv")
        for row in range(0, num_rows, self.head_size):
            start = 2 * (first + row)
            load_rows(param, row, loaded_weight, start, self.head_size)
            load_rows(param, first_gate + row, loaded_weight, start + self.head_size, self.head_size)


def columns_of_rank(param: LayerParameter, shard_id: Hashable, tp: TensorParallel) -> slice:
    """Those of a tensor of the checkpoint that fill a rank's part of a parameter. Its columns need not be the
    parameter's: weights may be packed once they are cut."""
    num_columns = param.shards[shard_id][1]
    size = max(1, num_columns // tp.size)  # All ranks have the scales of whole rows.
    start = tp.rank * size % num_columns
    return slice(start, start + size)


class RowParallelLinear(LinearBase):
    """y = x W^T + b with W's columns, the input features, split over the ranks, and y summed over the ranks.

    x: [num_tokens, this rank's part of input_size]; y: [num_tokens, output_size], the same on all ranks. The fast
    decoder adds y to the residual stream, because the product can do so without another pass over memory (`add`).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        *,
        tp: TensorParallel | None = None,
        size_name: str | None = None,
        **options: Any,
    ):
        """options: LinearBase's."""
        tp = tp or TensorParallel()
        shards = {None: (output_size, input_size)}
        options |= {"tp_dim": 1, "tp": tp, "shards": shards, "size_name": size_name}
        super().__init__(part_of(input_size, tp, size_name), output_size, bias, **options)

    def forward(self, x: Input) -> Tensor:
        """x W^T + b of this rank's x and W, summed over the ranks; b once."""
        return self.tp.all_reduce(super().forward(x))

    def add(
        self,
        residual: Tensor,
        x: Input,
        norm: RMSNorm | None,
        output_norm: RMSNorm | None = None,
    ) -> Normed:
        """Add y, or output_norm(y), to residual, in place. Returns norm of the sum; without a norm, the sum itself."""
        if self.tp.size > 1 or self.tp.reducer is not None:
            return add_over_ranks(self, residual, x, norm, output_norm)
        if output_norm is not None:
            output_norm.add_to(residual, self.products["linear"](x))
        elif norm is not None and self.format.quantizes_inputs:
            return self.products["linear_add"].norm_of_sum(x, residual, norm)
        else:
            self.products["linear_add"](x, residual)
        return Normed(residual, norm)

    def part_of_sum(self, operation: str, x: Input, out: Tensor | None = None) -> Tensor:
        """This rank's part of y: a new tensor for the operation linear; into `out` for linear_sum; added to `out` for
        linear_add."""
        return self.products[operation](x, out)

    @property
    def bias_of_rank(self) -> Tensor | None:
        """Only rank 0 adds the bias, or the sum would contain it several times."""
        return self.bias if self.tp.rank == 0 else None

    def weight_loader(self, param: LayerParameter, loaded_weight: Sliceable, loaded_shard_id: object = None) -> None:
        param.stored.format.store(param, loaded_weight[:, columns_of_rank(param, loaded_shard_id, self.tp)])

    def bias_loader(self, param: LayerParameter, loaded_weight: Sliceable, loaded_shard_id: object = None) -> None:
        param.data.copy_(loaded_weight[:])
