"""Matrix products: the candidates that can compute one, and the choice among them, which is a look-up in a table.

Operations, of x `[num_tokens, K]` and a weight `[N, K]`:

- linear: `x W^T + bias`.
- linear_silu: `silu(x Wg^T) * (x Wu^T)` (SwiGLU, Shazeer 2020), the gate's N / 2 rows before the up's.
- linear_add: `residual += x W^T + bias`.
- linear_sum: linear, this rank's part of a sum over tensor-parallel ranks.

x is a tensor or a `Normed`, which a candidate computes as part of the product or first.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.tuning.table import Key, Row, Table
from nanovllm.utils.context import get_context

logger = logging.getLogger(__name__)

OPERATIONS = ("linear", "linear_silu", "linear_add", "linear_sum")
_silu_and_mul = SiluAndMul()


class Problem(NamedTuple):
    """One product.

    Attributes:
        operation: one of OPERATIONS.
        x: `[num_tokens, K]`.
        weight: `[N, K]` of x's dtype.
        bias: `[N]`, or None.
        out: `[num_tokens, N]`: of linear_add the residual, otherwise where the result goes, or None for a new tensor.
    """

    operation: str
    x: Tensor | Normed
    weight: Tensor
    bias: Tensor | None = None
    out: Tensor | None = None

    @property
    def has_norm(self) -> bool:
        """Whether x is a norm that is still to be computed."""
        return isinstance(self.x, Normed) and not self.x.is_computed

    @property
    def input(self) -> Tensor:
        """x as a tensor."""
        return self.x.value() if isinstance(self.x, Normed) else self.x


class LayerProduct(NamedTuple):
    """A product that each layer of a model computes, for any number of tokens; norm: the one ahead of it, if any."""

    operation: str
    weight: Tensor
    bias: Tensor | None = None
    norm: RMSNorm | None = None

    def problem(self, num_tokens: int) -> Problem:
        """A problem of so many tokens, on new tensors that may hold anything."""
        N, K = self.weight.shape
        x = self.weight.new_empty(num_tokens, K)
        out = self.weight.new_empty(num_tokens, N) if self.operation in ("linear_add", "linear_sum") else None
        return Problem(self.operation, Normed(x, self.norm) if self.norm else x, self.weight, self.bias, out)


class Candidate(ABC):
    """One way to compute products.

    Attributes:
        name: in tables.
        posts_sums: whether it can post a linear_sum to the other ranks itself, through the reducer.
        suits_one_shape: whether constants for decode steps that suit one shape of a weight do not suit its neighbours.
    """

    name: str
    posts_sums = False
    suits_one_shape = False

    @abstractmethod
    def supports(self, problem: Problem) -> bool:
        """Whether it can compute this, here and now."""

    @abstractmethod
    def launch(self, problem: Problem, constants: tuple) -> Tensor | None:
        """The result, or None if it failed and another candidate has to compute it. constants: those of the table."""

    def serves(self, weight: Tensor) -> bool:
        """Whether decode steps that are padded for this candidate gain by it."""
        return True


class Cublas(Candidate):
    """torch's own products, on any device and for every problem; the plain twin of the others."""

    name = "cublas"

    def supports(self, problem: Problem) -> bool:
        return True

    def launch(self, problem: Problem, constants: tuple = ()) -> Tensor:
        x, weight, bias, out = problem.input, problem.weight, problem.bias, problem.out
        if problem.operation == "linear_silu":
            return _silu_and_mul(F.linear(x, weight))
        if problem.operation == "linear_add":
            out.addmm_(x, weight.t())
            return out if bias is None else out.add_(bias)
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


class Matmul:
    """Computes products by the first candidate of the table's row that supports them, otherwise by cuBLAS.

    Args:
        table: None for cuBLAS alone.
        candidates: those that this engine has, besides cuBLAS.
        model: to name in the log where the table has no rows for a product.
    """

    def __init__(self, table: Table | None = None, candidates: Sequence[Candidate] = (), model: str = "MODEL"):
        self._cublas = Cublas()
        self._table = table or Table()
        self._candidates = {each.name: each for each in (self._cublas, *candidates)}
        self._model = model
        self._rows: dict[tuple, Row] = {}
        self._has_told = False

    def linear(self, x: Tensor | Normed, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None):
        """`x W^T + bias`, arguments as in `Problem`: `out`, or a new `[num_tokens, N]`."""
        return self.run(Problem("linear", x, weight, bias, out))

    def linear_silu(self, x: Tensor | Normed, weight: Tensor) -> Tensor:
        """`silu(x Wg^T) * (x Wu^T)`: `[num_tokens, N / 2]`."""
        return self.run(Problem("linear_silu", x, weight))

    def linear_add(self, residual: Tensor, x: Tensor | Normed, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`residual += x W^T + bias`, which is returned. quack-kernels round the product before the sum, the others
        round once where there is no bias."""
        return self.run(Problem("linear_add", x, weight, bias, residual))

    def linear_sum(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        """`x W^T + bias` into `out`, this rank's part of a sum."""
        return self.run(Problem("linear_sum", x, weight, bias, out))

    def run(self, problem: Problem) -> Tensor:
        """The result, which is `out` where there is one."""
        for candidate, constants in self.choices(problem.operation, problem.weight, len(problem.x)):
            if candidate.supports(problem):
                y = candidate.launch(problem, constants)
                if y is not None:
                    return y
        return self._cublas.launch(problem)

    def choices(self, operation: str, weight: Tensor, num_tokens: int) -> tuple[tuple[Candidate, tuple], ...]:
        """What the table names for a product in this step's phase: candidates with their constants, the best first."""
        return self._row(operation, weight)[num_tokens]

    def token_counts(self, operation: str, weight: Tensor, most_tokens: int) -> list[int]:
        """Numbers of tokens, up to the most, among which is one for every bucket of the row of this product."""
        bounds = self._row(operation, weight).bounds
        return [bound for bound in bounds if bound < most_tokens] + [most_tokens]

    def _row(self, operation: str, weight: Tensor) -> Row:
        is_prefill = get_context().is_prefill
        short_key = operation, is_prefill, weight.shape, weight.dtype
        if short_key not in self._rows:
            self._rows[short_key] = self._find(Key.of(operation, is_prefill, weight))
        return self._rows[short_key]

    def _find(self, key: Key) -> Row:
        """The table's row, with the candidates that are here instead of their names."""
        row, candidates = self._table.find(key), self._candidates
        if key not in self._table.rows and key.phase == "decode":  # The row is that of another shape, if there is one.
            self._tell_once(key)
            row = None if key.operation == "padding" else row
            candidates = {name: each for name, each in candidates.items() if not each.suits_one_shape}
        buckets = zip(row.bounds, row.choices, strict=True) if row else [(1, ())]
        return Row(
            {
                bound: [(candidates[name], constants) for name, constants in choices if name in candidates]
                for bound, choices in buckets
            }
        )

    def _tell_once(self, key: Key) -> None:
        if len(self._candidates) > 1 and key.operation in OPERATIONS and not self._has_told:
            self._has_told = True
            text = "%s with a weight [%d, %d] was not measured on this GPU; to measure it: nanovllm tune %s"
            logger.info(text, key.operation, key.N, key.K, self._model)

    def posted_constants(self, weight: Tensor, num_tokens: int) -> tuple | None:
        """The constants with which this linear_sum posts its result to the other ranks itself, otherwise None."""
        for candidate, constants in self.choices("linear_sum", weight, num_tokens)[:1]:
            if candidate.posts_sums:
                return constants
        return None

    def padded_batch(self, num_seqs: int, gate_up: Tensor) -> int:
        """The rows, padding included, with which a decode step of num_seqs sequences takes the least time, in a model
        whose gate and up projection is this weight."""
        for candidate, (num_rows,) in self.choices("padding", gate_up, num_seqs):
            if candidate.serves(gate_up):
                return max(num_rows, num_seqs)
        return num_seqs
