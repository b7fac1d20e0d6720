"""Weights whose products sum each row in one order, whatever the other rows: for `deterministic=True`.

A library may sum a row of `x W^T` over K in another order when x has another number of rows. oneDNN does for one row of
a long K in float32, and MKL for a few rows. So a product is computed in parts whose numbers of rows are known to give
the same bits. Which ones do is found out at the engine's start, by a trial with each shape of weight on this machine
(`find_row_counts`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.matmul.fixed_order import fixed_order_linear
from nanovllm.kernels.matmul.fp8 import dequantize_torch
from nanovllm.layers.formats.format import Input, T, Weight, WeightFormat, value_of
from nanovllm.layers.formats.parameters import LayerParameter, Shards, WeightLoader
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.utils.threads import torch_threads

_ROWS = (1, 2, 4, 8, 16, 32, 64)  # that may be multiplied at once
_STANDARD = 16  # The bits of a row are those that it gets among so many.
_FEW = 16  # Up to so many rows, one part with spare rows costs less than several parts, which read the weight each.
_MIN_WORK = 1 << 23  # Rows times parameters, from which further threads gain anything.


class RowCounts(NamedTuple):
    """How products with a weight of one shape are computed, so that a row's bits do not depend on the others.

    Attributes:
        counts: numbers of rows that may be multiplied at once, ascending.
        num_threads: with which they may be.
    """

    counts: tuple[int, ...]
    num_threads: int

    def parts(self, num_rows: int) -> Iterator[tuple[int, int]]:
        """Numbers of rows that make up num_rows, each with the number that is multiplied: as many, or some more."""
        while num_rows:
            fitting = [count for count in self.counts if count <= num_rows]
            if num_rows <= _FEW or not fitting:
                fitting = [next((count for count in self.counts if count >= num_rows), self.counts[-1])]
            yield min(num_rows, fitting[-1]), fitting[-1]
            num_rows -= min(num_rows, fitting[-1])

    def product(self, linear: Callable[[Tensor], Tensor], x: Tensor, weight_shape: torch.Size) -> Tensor:
        """`x W^T`. linear: computes it of some rows."""
        N, K = weight_shape
        with torch_threads(self.num_threads if len(x) * N * K >= _MIN_WORK else 1):
            if len(x) in self.counts:
                return linear(x)
            y, start = x.new_empty(len(x), N), 0
            for num_rows, count in self.parts(len(x)):
                rows = x[start : start + num_rows]
                if count > num_rows:
                    rows = F.pad(rows, (0, 0, 0, count - num_rows))
                y[start : start + num_rows] = linear(rows)[:num_rows]
                start += num_rows
            return y


def find_row_counts(linear: Callable[[Tensor], Tensor], N: int, K: int, dtype: torch.dtype, threads: int) -> RowCounts:
    """Try numbers of rows, and of threads, with random numbers. The order of a sum does not depend on the numbers that
    are summed, and another order rounds other numbers among so many.

    Args:
        linear: `x W^T` with a weight `[N, K]` of this dtype.
        threads: most threads to use; 1 may be found to be all.

    Raises:
        ValueError: a row's bits depend on its place among others, so no such order can be promised.
    """
    half, order = _cancelling(2 * _ROWS[-1], K)
    x = torch.cat((half, -half, half.new_zeros(len(half), K % 2)), dim=1)[:, order].to(dtype)
    with torch_threads(1):
        standard = torch.cat([linear(rows) for rows in x.split(_STANDARD)])
        shifted = linear(x[_STANDARD // 2 :][:_STANDARD])
    if not torch.equal(shifted, standard[_STANDARD // 2 :][:_STANDARD]):
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"deterministic=True: on this CPU a row of a product with a weight [{N}, {K}] in {name} has other bits at "
            "another place among others; use another dtype, or deterministic=False"
        )

    def is_same(count: int, num_threads: int, start: int) -> bool:
        with torch_threads(num_threads):
            return torch.equal(linear(x[start:][:count]), standard[start:][:count])

    alone = tuple(count for count in _ROWS if is_same(count, 1, _ROWS[-1] - 1))
    with_threads = tuple(count for count in alone if is_same(count, threads, 0))
    return RowCounts(with_threads, threads) if with_threads else RowCounts(alone, 1)


def _cancelling(num_rows: int, K: int) -> tuple[Tensor, Tensor]:
    """Random numbers `[num_rows, K // 2]`, and an order of K columns in which pairs of columns are apart."""
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(K, generator=generator)
    return torch.randn(num_rows, K // 2, generator=generator), order


def trial_weight(N: int, K: int, dtype: torch.dtype) -> Tensor:
    """A weight `[N, K]` whose products with the trial's rows are 0 but for the rounding of sums. So another order shows
    in nearly every number, also if results have 16 bits, which would hide most of the differences of larger numbers."""
    half, order = _cancelling(_STANDARD, K)
    rows = torch.cat((half, half, half.new_zeros(len(half), K % 2)), dim=1)[:, order].to(dtype)
    return rows[torch.arange(N) % len(rows)]


@dataclass(frozen=True)
class FixedOrder(Unquantized):
    """What weights are loaded into, and what they are on a GPU, where one kernel computes all numbers of rows.

    Attributes:
        num_threads: of a product, at most.
        known: of the shapes and dtypes that were tried.
    """

    name = "fixed_order"
    is_batch_invariant = True
    num_threads: int = 1
    known: dict[tuple, RowCounts] = field(default_factory=dict, compare=False, repr=False)

    def table_name(self, dtype: torch.dtype) -> str:
        return self.name

    def settings_name(self, dtype: torch.dtype) -> str:
        return super().table_name(dtype)

    def packed(self, weight: T) -> tuple[WeightFormat, T]:
        if not weight.numel():  # a rank without a part of the vocabulary
            return self, weight
        (N, K), dtype = weight.shape[-2:], weight.dtype
        inner, weight = super().packed(weight)  # Experts stay as they are, a plain matrix each.
        key = inner.name, N, K, dtype
        if key not in self.known:
            # In 32 bits nothing is hidden, and a second weight would take memory.
            tried = weight if weight.dim() == 2 else weight[0]
            if dtype != torch.float32:
                tried = inner.quantize(trial_weight(N, K, dtype), dtype).values
            values = Weight(inner, tried)
            self.known[key] = find_row_counts(lambda x: inner.linear(x, values), N, K, dtype, self.num_threads)
        return FixedOrderReady(self, inner, self.known[key]), weight

    def linear(self, x: Input, weight: Weight) -> Tensor:
        return fixed_order_linear(value_of(x), weight.values)

    def linear_into(self, x: Input, weight: Weight, out: Tensor) -> Tensor:
        return out.copy_(self.linear(x, weight))


@dataclass(frozen=True)
class FixedOrderReady(WeightFormat):
    """What they become once they are loaded, on a CPU.

    Attributes:
        loaded: what they were.
        inner: of the values, as one product reads them.
        rows: how many at once.
    """

    name = "fixed_order_ready"
    is_batch_invariant = True
    loaded: FixedOrder = field(default_factory=FixedOrder)
    inner: WeightFormat = field(default_factory=Unquantized)
    rows: RowCounts = field(default=RowCounts((_STANDARD,), 1))

    def parameters(
        self, shape: tuple[int, ...], shards: Shards, weight_loader: WeightLoader
    ) -> dict[str, LayerParameter]:
        raise NotImplementedError("weights are tried once they are loaded")

    def unpacked(self, weight: Any) -> tuple[WeightFormat, Any]:
        return self.loaded, self.inner.unpacked(weight)[1]

    def quantize(self, weight: Tensor, dtype: torch.dtype) -> Weight:
        ready, values = self.loaded.packed(weight.to(dtype))
        return Weight(ready, values)

    def linear(self, x: Input, weight: Weight) -> Tensor:
        values = Weight(self.inner, weight.values)
        return self.rows.product(lambda rows: self.inner.linear(rows, values), value_of(x), weight.shape)


class DequantizedProducts:
    """Products of a CPU with weights that become plain matrices first, each row summed in one order."""

    def __init__(self, num_threads: int):
        """num_threads: of a product, at most."""
        self._num_threads = num_threads
        self._known: dict[tuple, RowCounts] = {}  # by shape and dtype of a plain matrix

    def are_found(self, weight: Weight) -> bool:
        """True, once the order is known for weights like this one, or its experts. Raises ValueError as
        `find_row_counts`."""
        one = weight.of_expert(0) if len(weight.shape) == 3 else weight
        if one.shape.numel():
            self._counts(weight.format.dequantized(one))
        return True

    def linear(self, x: Input, weight: Weight) -> Tensor:
        """`x W^T`, where x is rounded as the weight's format says: a new tensor of the weight's dtype."""
        values, scale = weight.format.quantize_input(x)
        rows = values if scale is None else dequantize_torch(values, scale)
        matrix = weight.format.dequantized(weight)
        y = self._counts(matrix).product(lambda some: F.linear(some, matrix), rows, matrix.shape)
        return y.to(weight.dtype)

    def _counts(self, matrix: Tensor) -> RowCounts:
        (N, K), dtype = matrix.shape, matrix.dtype
        if (N, K, dtype) not in self._known:
            tried = trial_weight(N, K, dtype)
            found = find_row_counts(lambda x: F.linear(x, tried), N, K, dtype, self._num_threads)
            self._known[N, K, dtype] = found
        return self._known[N, K, dtype]
