"""Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464): linear attention, whose state has a fixed size."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from nanovllm.kernels.linear_attention.fixed_order import fixed_order_decode, fixed_order_prefill
from nanovllm.kernels.linear_attention.gated_delta import delta_rule_decode, delta_rule_prefill
from nanovllm.layers.activation import OutputGate
from nanovllm.layers.formats.all_formats import get_unquantized_format, get_weight_format, weight_format
from nanovllm.layers.formats.format import value_of
from nanovllm.layers.formats.parameters import LayerParameter, Sliceable, load_rows, make_parameter
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.layernorm import Normed
from nanovllm.layers.linear import ColumnParallelLinear, RowParallelLinear
from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.utils.context import Context, get_context


class DeltaNetShape(NamedTuple):
    """The heads of the whole model, and the taps of the convolution. Value head v reads key head `v // (num_value_heads
    // num_key_heads)`."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    num_taps: int

    def of_rank(self, tp: TensorParallel) -> "DeltaNetShape":
        """The same with this rank's heads. Raises ValueError if the ranks do not divide them."""
        return self._replace(
            num_key_heads=tp.shard(self.num_key_heads, "linear_num_key_heads"),
            num_value_heads=tp.shard(self.num_value_heads, "linear_num_value_heads"),
        )

    @property
    def sizes(self) -> dict[str, int]:
        """Outputs of each part of the input projection."""
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        return {"q": keys, "k": keys, "v": values, "z": values, "b": self.num_value_heads, "a": self.num_value_heads}

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution: those of q, k and v."""
        return sum(self.sizes[part] for part in "qkv")


class DeltaNetProjection(ColumnParallelLinear):
    """The projections to some of q, k, v, z, b and a, in this order, as one product.

    Shard ids: "qkv", "z", "b" and "a", Qwen3.5's tensors. "qkvz" and "ba" are Qwen3-Next's, which have the rows of one
    key head after those of another.
    """

    def __init__(self, hidden_size: int, shape: DeltaNetShape, parts: str, tp: TensorParallel, matmul: Matmul):
        """parts: "qkvzba", "qkvz" or "ba"."""
        self.shape = shape
        sizes = {part: shape.sizes[part] for part in parts}
        options: dict[str, Any] = {"matrix_sizes": sizes, "size_name": "linear_num_value_heads"}
        super().__init__(hidden_size, sum(sizes.values()), tp=tp, matmul=matmul, **options)

    def named_rows(self, size_name: str, num_rows: int) -> Iterator[tuple[str, int]]:
        yield from (("linear_key_head_dim", self.shape.key_dim), ("linear_value_head_dim", self.shape.value_dim))

    def checkpoint_sizes(self) -> dict:
        sizes = self.shape.sizes
        return {key: sum(sizes[part] for part in key) for key in ("qkv", "z", "b", "a", "qkvz", "ba")}

    def weight_loader(self, param: LayerParameter, loaded_weight: Sliceable, loaded_shard_id: object = None) -> None:
        row, shard_id = 0, str(loaded_shard_id)
        for part, (_, num_rows) in self.parts.items():
            if part in shard_id:
                done = 0
                for start, count in self._rows_of(part, shard_id):
                    load_rows(param, row + done, loaded_weight, start, count)
                    done += count
            row += num_rows

    def _rows_of(self, part: str, shard_id: str) -> Iterator[tuple[int, int]]:
        """Where this rank's rows of a part are in a tensor: starts and numbers of rows."""
        first, num_rows = self.parts[part]
        sizes = {each: self.shape.sizes[each] for each in shard_id}
        before = sum(size for each, size in sizes.items() if shard_id.index(each) < shard_id.index(part))
        if shard_id not in ("qkvz", "ba"):
            yield before + first, num_rows
            return
        # In each key head's rows the parts follow each other.
        num_heads = self.shape.num_key_heads
        of_head = sizes[part] // num_heads
        for row in range(first, first + num_rows, of_head):
            yield row // of_head * (sum(sizes.values()) // num_heads) + before // num_heads, of_head


class CausalConvolution(nn.Module):
    """The weights of a convolution over each channel of q, k and v: [this rank's channels, taps]."""

    weight: nn.Parameter

    def __init__(self, shape: DeltaNetShape, tp: TensorParallel):
        super().__init__()
        self._sizes = [shape.sizes[part] for part in "qkv"]
        self._parts = [(tp.rank * size // tp.size, size // tp.size) for size in self._sizes]
        rows, full = shape.conv_dim // tp.size, (shape.conv_dim, 1, shape.num_taps)
        self.weight = make_parameter((rows, shape.num_taps), {None: full}, self.weight_loader, Unquantized())

    def weight_loader(self, param: LayerParameter, loaded: Sliceable, shard_id: object = None) -> None:
        row = begin = 0
        for (start, num_rows), size in zip(self._parts, self._sizes, strict=True):
            param.stored.format.store(param, loaded[begin + start : begin + start + num_rows].squeeze(1), row)
            row, begin = row + num_rows, begin + size


class GatedRMSNorm(nn.Module):
    """The weight of the norm of each head's output, float32 [value_dim]."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, dtype=torch.float32), requires_grad=False)


class GatedDeltaNet(nn.Module):
    """Input projections, causal convolution, gated delta rule, gated norm.

    forward: the normed residual stream [num_tokens, hidden_size] -> the input of out_proj, [num_tokens, this rank's
    num_value_heads * value_dim]. The layer calls out_proj, as it does o_proj of attention.

    Attributes:
        shape: this rank's heads.
        prefill_rule, decode_rule: `delta_rule_prefill` and `delta_rule_decode`, or what stands for them.
        defers_norm: whether the norm of a prefill is left to the output projection.
        tails: [cells, num_taps - 1, conv_dim], the last inputs of each sequence's convolution, the oldest first; None
            until the store has memory (the warm-up runs without).
        states: [cells, num_value_heads, key_dim, value_dim] in state_dtype; None likewise.
    """

    def __init__(self, hidden_size: int, shape: DeltaNetShape, eps: float, tp: TensorParallel, matmul: Matmul):
        super().__init__()
        self.shape, self.eps, self.tp = shape.of_rank(tp), eps, tp
        options = tp, matmul
        self.in_proj: DeltaNetProjection | None = None
        if isinstance(get_weight_format(), Unquantized):
            self.in_proj = DeltaNetProjection(hidden_size, shape, "qkvzba", *options)
        else:  # The gates b and a stay in the model's dtype.
            self.in_proj_qkvz = DeltaNetProjection(hidden_size, shape, "qkvz", *options)
            with weight_format(None):
                self.in_proj_ba = DeltaNetProjection(hidden_size, shape, "ba", *options)
        self.conv1d = CausalConvolution(shape, tp)
        num_heads, full = self.shape.num_value_heads, {None: (shape.num_value_heads,)}
        self.A_log, self.dt_bias = (
            make_parameter((num_heads,), full, self._load_heads, Unquantized(), torch.float32) for _ in range(2)
        )
        self.norm = GatedRMSNorm(shape.value_dim)
        size, name = shape.num_value_heads * shape.value_dim, "linear_num_value_heads * linear_value_head_dim"
        self.out_proj = RowParallelLinear(size, hidden_size, tp=tp, matmul=matmul, size_name=name)
        self.tails: Tensor | None = None
        self.states: Tensor | None = None
        self.state_dtype = torch.float32
        in_fixed_order = get_unquantized_format().is_batch_invariant  # of deterministic=True
        self.defers_norm = not in_fixed_order
        self.prefill_rule: Callable[..., Tensor] = fixed_order_prefill if in_fixed_order else delta_rule_prefill
        self.decode_rule: Callable[..., Tensor] = fixed_order_decode if in_fixed_order else delta_rule_decode

    def _load_heads(self, param: LayerParameter, loaded: Sliceable, shard_id: object = None) -> None:
        first = self.tp.rank * len(param)
        param.data.copy_(loaded[first : first + len(param)])

    def forward(self, positions: Tensor, hidden: Normed, rows: Tensor | slice | None = None) -> Tensor | OutputGate:
        """rows: the tokens whose output is needed, None for all. The states need all tokens."""
        context, inputs = get_context(), self._project(hidden)
        out = self._prefill(inputs, context) if context.is_prefill else self._decode(inputs, context)
        return out if rows is None else value_of(out)[rows]

    def _prefill(self, inputs: list[Tensor], context: Context) -> Tensor | OutputGate:
        tails, states, cells, ends = self.tails, self.states, context.cells, cast(Tensor, context.cu_seqlens_q)
        if tails is None or states is None:
            num_seqs, (tail_shape, state_shape) = len(ends) - 1, self.state_shapes
            tails = inputs[0].new_empty(0, *tail_shape)
            states = inputs[0].new_empty(0, *state_shape, dtype=self.state_dtype)
            cells = inputs[0].new_full((4, num_seqs), -1, dtype=torch.int32)
        places = tails, states, ends, *cast(Tensor, cells)
        *weights, norm_weight, eps = self._weights()
        of_rule = None if self.defers_norm else norm_weight
        out = self.prefill_rule(*inputs, *weights, of_rule, eps, *places, *self._heads())
        return OutputGate(out, inputs[1], norm_weight, eps) if self.defers_norm else out

    def _decode(self, inputs: list[Tensor], context: Context) -> Tensor:
        order = context.row_order
        # Cells and lengths first, because the kernels read these before the launch before them has ended.
        rows: list[Any] = [context.cells, context.context_lens, context.is_proposed, *inputs]
        if order is not None:
            rows = [None if x is None else x[order] for x in rows]
        cells, lens, is_proposed, *inputs = rows
        places = self.tails, self.states, cells, lens
        arguments: Any = (*inputs, *self._weights(), *places, *self._heads(), is_proposed)
        out = self.decode_rule(*arguments)
        return out if order is None else torch.empty_like(out).index_copy_(0, order, out)

    def _weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        return self.conv1d.weight, self.A_log, self.dt_bias, self.norm.weight, self.eps

    def _heads(self) -> tuple[int, int]:
        return self.shape.num_key_heads, self.shape.num_value_heads

    def input_projections(self) -> list[DeltaNetProjection]:
        return [self.in_proj_qkvz, self.in_proj_ba] if self.in_proj is None else [self.in_proj]

    def _project(self, hidden: Normed) -> list[Tensor]:
        """q, k and v side by side, z, b, a."""
        sizes = self.shape.sizes
        widths = [self.shape.conv_dim, sizes["z"]]
        hidden.is_read_again = self.in_proj is None
        if self.in_proj is not None:
            return list(self.in_proj(hidden).split((*widths, sizes["b"], sizes["a"]), dim=1))
        qkvz, gates = self.in_proj_qkvz(hidden), self.in_proj_ba(hidden)
        return [*qkvz.split(widths, dim=1), *gates.split((sizes["b"], sizes["a"]), dim=1)]

    @property
    def state_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of a cell of tails, and of one of states."""
        shape = self.shape
        return (shape.num_taps - 1, shape.conv_dim), (shape.num_value_heads, shape.key_dim, shape.value_dim)
