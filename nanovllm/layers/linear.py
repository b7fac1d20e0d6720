"""Linear layers whose weights are split over tensor-parallel ranks, by columns or rows (Megatron-LM, arXiv:1909.08053).

Every parameter knows how it is loaded (`parameters`), and the weight's format how it is stored (`formats`).
"""

from typing import Any

from torch import Tensor, nn

from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.all_formats import get_weight_format
from nanovllm.layers.formats.format import Input, Weight
from nanovllm.layers.formats.parameters import load_rows, make_parameter
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.matmul.matmul import Matmul, Products
from nanovllm.layers.parallel.rank_sums import add_over_ranks
from nanovllm.layers.parallel.tensor_parallel import TensorParallel


class LinearBase(nn.Module):
    """A weight `[N, K]`, perhaps a bias `[N]`. A subclass has `weight_loader`, also of scales, and `bias_loader`."""

    weight: nn.Parameter
    weight_loader: Any
    bias_loader: Any

    def __init__(self, weight_shape: tuple[int, int], shards: dict, bias: bool, tp: TensorParallel, matmul: Matmul):
        """weight_shape: this rank's part. shards: of the weight."""
        super().__init__()
        self.tp = tp
        self.format = get_weight_format()
        for name, parameter in self.format.parameters(weight_shape, shards, self.weight_loader).items():
            self.register_parameter(name, parameter)
        self.bias: nn.Parameter | None = None
        if bias:
            bias_shards = {key: shape[:1] for key, shape in shards.items()}
            self.bias = make_parameter(weight_shape[:1], bias_shards, self.bias_loader, Unquantized())
        self.products = Products(matmul, self, self.bias_of_rank)

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
        self.products.clear()

    def unpack_weight(self) -> None:
        """Undo `pack_weight`, so that the weight can be loaded again."""
        self.format, self.weight = self.format.unpacked(self.weight)
        self.products.clear()


class ReplicatedLinear(LinearBase):
    """y = x W^T + b, the same on every rank: [num_tokens, input_size] -> [num_tokens, output_size]."""

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel, matmul: Matmul):
        shape = output_size, input_size
        super().__init__(shape, {None: shape}, bias, tp, matmul)

    def weight_loader(self, param: Any, loaded: Any, shard_id: object = None) -> None:
        param.format.store(param, loaded[:])

    bias_loader = weight_loader

    def forward(self, x: Input) -> Any:
        return self.products["linear"](x)


class ColumnParallelLinear(LinearBase):
    """y = x W^T + b with W's rows, the output features, split over the ranks. W may be several matrices, stacked. The
    checkpoint has them one by one, or all as one tensor, whose shard id is None.

    forward: [num_tokens, input_size] -> [num_tokens, this rank's rows].
    """

    def __init__(self, input_size: int, output_sizes: dict, bias: bool, tp: TensorParallel, matmul: Matmul):
        """output_sizes: {shard id: rows of that matrix in the checkpoint}."""
        self.output_sizes = output_sizes
        self.parts = {key: self.part(key, tp) for key in output_sizes}
        rows = sum(num_rows for _, num_rows in self.parts.values())
        sizes = self.checkpoint_sizes() | {None: sum(output_sizes.values())}
        shards = {key: (size, input_size) for key, size in sizes.items()}
        super().__init__((rows, input_size), shards, bias, tp, matmul)

    def checkpoint_sizes(self) -> dict:
        """{shard id: rows of a tensor of the checkpoint}."""
        return self.output_sizes

    def part(self, shard_id: Any, tp: TensorParallel) -> tuple[int, int]:
        """First row and number of rows of a checkpoint matrix that this rank has."""
        num_rows = tp.shard(self.output_sizes[shard_id], f"output size of {shard_id or 'a layer'}")
        return tp.rank * num_rows, num_rows

    def weight_loader(self, param: Any, loaded: Any, shard_id: object = None) -> None:
        offset = first_row = 0
        for key, (start, num_rows) in self.parts.items():
            if shard_id in (key, None):
                load_rows(param, offset, loaded, start + (first_row if shard_id is None else 0), num_rows)
            offset += num_rows
            first_row += self.output_sizes[key]

    bias_loader = weight_loader

    def forward(self, x: Input) -> Any:
        return self.products["linear"](x)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several matrices with the same input as one product: gate and up. Shard ids are 0, 1, ..."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool, tp: TensorParallel, matmul: Matmul):
        super().__init__(input_size, dict(enumerate(output_sizes)), bias, tp, matmul)

    def silu(self, x: Tensor | Normed) -> Tensor | Gated:
        """SwiGLU (Shazeer 2020) without a bias: `silu(gate) * up` of `gate, up = forward(x)`, computed or not."""
        return self.products["linear_silu"](x)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections as one product. Shard ids are "q", "k" and "v". Each rank has whole heads; with
    fewer KV heads than ranks, several ranks have a copy of the same KV head.

    forward: [num_tokens, hidden_size] -> [num_tokens, this rank's (num_heads + 2 * num_kv_heads) * head_dim].
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool,
        tp: TensorParallel,
        matmul: Matmul,
        **more_sizes: int,
    ):
        """more_sizes: of further parts, which are split as q is."""
        self.num_heads = tp.shard(num_heads, "num_attention_heads")
        self.head_dim = head_dim
        self.first_kv_head, self.num_kv_heads = tp.shard_kv_heads(num_kv_heads)
        kv_size = num_kv_heads * head_dim
        sizes = {"q": num_heads * head_dim, "k": kv_size, "v": kv_size, **more_sizes}
        super().__init__(hidden_size, sizes, bias, tp, matmul)

    def part(self, shard_id: Any, tp: TensorParallel) -> tuple[int, int]:
        if shard_id in ("k", "v"):
            return self.first_kv_head * self.head_dim, self.num_kv_heads * self.head_dim
        return super().part(shard_id, tp)


class KeysAsValuesParallelLinear(QKVParallelLinear):
    """The same for a checkpoint without a projection of values: k's is v's too. Its rows are there twice, because keys
    and values get norms of their own."""

    def checkpoint_sizes(self) -> dict:
        return {key: size for key, size in self.output_sizes.items() if key != "v"}

    def weight_loader(self, param: Any, loaded: Any, shard_id: object = None) -> None:
        super().weight_loader(param, loaded, shard_id)
        if shard_id == "k":
            super().weight_loader(param, loaded, "v")

    bias_loader = weight_loader


class GatedQKVParallelLinear(QKVParallelLinear):
    """The same, followed by a gate for each number of q: [num_tokens, this rank's (2 * num_heads + 2 * num_kv_heads) *
    head_dim]. In the checkpoint's q_proj each head has the rows of its query and then those of its gate."""

    def __init__(self, hidden_size: int, head_dim: int, num_heads: int, *args: Any):
        super().__init__(hidden_size, head_dim, num_heads, *args, gate=num_heads * head_dim)

    def checkpoint_sizes(self) -> dict:
        return self.output_sizes | {"q": self.output_sizes["q"] + self.output_sizes["gate"]}

    def weight_loader(self, param: Any, loaded: Any, shard_id: object = None) -> None:
        if shard_id != "q":
            super().weight_loader(param, loaded, shard_id)
            return
        first, num_rows = self.parts["q"]
        first_gate = sum(self.parts[key][1] for key in "qkv")
        for row in range(0, num_rows, self.head_dim):
            start = 2 * (first + row)
            load_rows(param, row, loaded, start, self.head_dim)
            load_rows(param, first_gate + row, loaded, start + self.head_dim, self.head_dim)

    bias_loader = weight_loader


def columns_of_rank(param: Any, shard_id: object, tp: TensorParallel) -> slice:
    """Those of a tensor of the checkpoint that fill a rank's part of a parameter. Its columns need not be the
    parameter's: weights may be packed once they are cut."""
    num_columns = param.shards[shard_id][1]
    size = max(1, num_columns // tp.size)  # All ranks have the scales of whole rows.
    start = tp.rank * size % num_columns
    return slice(start, start + size)


class RowParallelLinear(LinearBase):
    """y = x W^T + b with W's columns, the input features, split over the ranks, and y summed over the ranks.

    y is added to the residual stream, because the product can do so without another pass over memory. x: [num_tokens,
    this rank's part of input_size]; residual: [num_tokens, output_size], the same on all ranks.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool, tp: TensorParallel, matmul: Matmul):
        shape = (output_size, tp.shard(input_size, "input size of a row-parallel layer"))
        super().__init__(shape, {None: (output_size, input_size)}, bias, tp, matmul)

    def add(
        self,
        residual: Tensor,
        x: Tensor | Gated,
        norm: RMSNorm | None,
        output_norm: RMSNorm | None = None,
    ) -> Normed:
        """Add y, or output_norm(y), to residual, in place. Returns norm of the sum; without a norm, the sum itself."""
        if self.tp.size > 1 or self.tp.reducer is not None:
            return add_over_ranks(self, residual, x, norm, output_norm)
        if output_norm is not None:
            output_norm.add_to(residual, self.products["linear"](x))
        else:
            self.products["linear_add"](x, residual)
        return Normed(residual, norm)

    def part_of_sum(self, operation: str, x: Tensor | Gated, out: Tensor | None = None) -> Any:
        """This rank's part of y: a new tensor for the operation linear; into `out` for linear_sum; added to `out` for
        linear_add."""
        return self.products[operation](x, out)

    @property
    def bias_of_rank(self) -> Tensor | None:
        """Only rank 0 adds the bias, or the sum would contain it several times."""
        return self.bias if self.tp.rank == 0 else None

    def weight_loader(self, param: Any, loaded: Any, shard_id: object = None) -> None:
        param.format.store(param, loaded[:, columns_of_rank(param, shard_id, self.tp)])

    def bias_loader(self, param: Any, loaded: Any, shard_id: object = None) -> None:
        param.data.copy_(loaded[:])
