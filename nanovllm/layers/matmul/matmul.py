"""Matrix products: the candidates that can compute one, and the choice among them, which is a look-up in a table.

Operations, of x `[num_tokens, K]` and a weight W `[N, K]`:

- linear: `x W^T + bias`.
- linear_silu: `silu(x Wg^T) * (x Wu^T)` (SwiGLU, Shazeer 2020). W holds the N / 2 rows of Wg, then those of Wu.
- linear_add: `residual += x W^T + bias`. quack-kernels, and torch in fp8, round the product before the sum; without a
  bias, the others round once.
- linear_sum: linear, as one rank's part of a sum over tensor-parallel ranks.
- experts: a mixture of experts, of weights `[num_experts, N, K]`; see `expert_products`.

W is a tensor of x's dtype, which may be packed for a CPU (`packed_weights`), or in fp8 with scales (`quantization`),
which some candidates do not support.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.layers.activation import Gated
from nanovllm.layers.experts.expert_products import ExpertsProblem, compute_experts
from nanovllm.layers.formats.quantization import Fp8Weight, Weight
from nanovllm.layers.layernorm import Normed
from nanovllm.layers.matmul.fp8_products import compute_fp8
from nanovllm.layers.matmul.packed_weights import compute_packed
from nanovllm.layers.matmul.table import Choice, Key, Row, Table
from nanovllm.utils.context import get_context

logger = logging.getLogger(__name__)

Input = Tensor | Normed | Gated  # [num_tokens, K]; a norm or an activation is computed within the product, or before it
OPERATIONS = ("linear", "linear_silu", "linear_add", "linear_sum", "experts")


class Problem(NamedTuple):
    """One product to compute."""

    operation: str  # one of OPERATIONS
    x: Input
    weight: Any  # a `Weight`, [N, K]
    bias: Tensor | None = None  # [N]
    out: Tensor | None = None  # [num_tokens, N]: linear_add's residual, or where the result goes; None: a new tensor

    @property
    def has_norm(self) -> bool:
        """Whether x is a norm that is not computed yet."""
        return isinstance(self.x, Normed) and not self.x.is_computed

    @property
    def input(self) -> Tensor:
        return self.x if isinstance(self.x, Tensor) else self.x.value()


class Candidate(ABC):
    """One way to compute products."""

    name: str  # in tables
    posts_sums = False  # whether it can write a linear_sum to the other ranks' memory itself
    suits_one_shape = False  # whether its constants in decode steps are useless for other shapes of a weight

    @abstractmethod
    def supports(self, problem: Any) -> bool:
        """Whether it can compute this product on this machine, in this step. The table names it only for operations
        that it has."""

    @abstractmethod
    def launch(self, problem: Any, constants: tuple) -> Tensor | Gated | None:
        """The result, of a linear_silu perhaps before its activation. None if it failed and another candidate must
        compute it. constants: from the table."""

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        """The table's constants, cut to the shared memory of the weight's GPU, which may not be the one that they were
        measured on. None if they cannot be."""
        return constants

    def serves(self, weight: Weight) -> bool:
        """Whether it computes this weight's products in decode steps, if these are padded for it."""
        return True


class Cublas(Candidate):
    """torch's own products, for every problem on any device; the plain twin of the others. With a weight in fp8 x is
    rounded too. It has none for experts: these our own kernels compute, with constants that work."""

    name = "cublas"

    def supports(self, problem: Problem | ExpertsProblem) -> bool:
        return True

    def launch(self, problem: Problem | ExpertsProblem, constants: tuple = ()) -> Tensor | Gated:
        if isinstance(problem, ExpertsProblem):
            return compute_experts(problem)
        if isinstance(problem.weight, Fp8Weight):
            return compute_fp8(problem)
        if problem.weight.is_mkldnn:
            return compute_packed(problem)
        x, weight, bias, out = problem.input, problem.weight, problem.bias, problem.out
        if problem.operation == "linear_silu":
            return Gated(F.linear(x, weight)).value()
        if problem.operation == "linear_add":
            out.addmm_(x, weight.t())
            return out if bias is None else out.add_(bias)
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


class Matmul:
    """Computes a product by the first candidate in the table's row that supports it, otherwise by cuBLAS."""

    def __init__(self, table: Table | None = None, candidates: Sequence[Candidate] = (), model: str = "MODEL"):
        """candidates: besides cuBLAS. model: its name, for the log."""
        self._cublas = Cublas()
        self._table = table or Table()
        self._candidates = {each.name: each for each in (self._cublas, *candidates)}
        self._model = model
        self._rows: dict[tuple, Row] = {}
        self._has_told = False

    @property
    def has_choice(self) -> bool:
        """Whether there are candidates besides cuBLAS."""
        return len(self._candidates) > 1

    def linear(self, x: Input, weight: Weight, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """`x W^T + bias`: `out`, or a new `[num_tokens, N]`."""
        return self.run(Problem("linear", x, weight, bias, out))

    def linear_silu(self, x: Input, weight: Weight) -> Tensor | Gated:
        """`silu(x Wg^T) * (x Wu^T)`: `[num_tokens, N / 2]`. With a weight in fp8 perhaps before its activation."""
        return self.run(Problem("linear_silu", x, weight))

    def run(self, problem: Problem | ExpertsProblem) -> Any:
        for candidate, constants in self.choices(problem.operation, problem.weight, len(problem.x)):
            if candidate.supports(problem):
                y = candidate.launch(problem, constants)
                if y is not None:
                    return y
        return self._cublas.launch(problem)

    def serves(self, name: str, weight: Weight) -> bool:
        """Whether there is a candidate of this name, and it computes this weight's products in decode steps."""
        return name in self._candidates and self._candidates[name].serves(weight)

    def choices(self, operation: str, weight: Weight, num_tokens: int) -> tuple[tuple[Candidate, tuple], ...]:
        """The table's candidates for a product in this step's phase, the best first, with their constants."""
        return self.row(operation, weight)[num_tokens]

    def row(self, operation: str, weight: Weight) -> Row[tuple[Candidate, tuple]]:
        """`choices` for all numbers of tokens."""
        is_prefill = get_context().is_prefill
        short_key = operation, is_prefill, weight.shape, weight.dtype
        if short_key not in self._rows:
            self._rows[short_key] = self._find(Key.of(operation, is_prefill, weight), weight)
        return self._rows[short_key]

    def _find(self, key: Key, weight: Weight) -> Row[tuple[Candidate, tuple]]:
        """The table's row, with the installed candidates instead of their names, and of their constants what fits the
        weight's GPU."""
        row, candidates = self._table.find(key), self._candidates
        if key not in self._table.rows and key.phase == "decode":  # Then the row, if any, is that of another shape.
            candidates = {name: each for name, each in candidates.items() if not each.suits_one_shape}
            # A linear_add may be rank 0's part of a sum, measured as linear_sum. On one GPU a layer's others tell.
            if self.has_choice and key.operation != "linear_add" and not self._has_told:
                self._has_told = True
                text = "%s with a weight [%d, %d] was not measured on this GPU; to measure it: nanovllm tune %s"
                logger.info(text, key.operation, key.N, key.K, self._model)
        buckets = zip(row.bounds, row.choices, strict=True) if row else [(1, ())]

        def usable(choices: Sequence[Choice]) -> Iterator[tuple[Candidate, tuple]]:
            for name, measured in choices:
                candidate = candidates.get(name)
                constants = None if candidate is None else candidate.fitted(weight, measured)
                if constants is not None:
                    yield candidate, constants

        return Row({bound: usable(choices) for bound, choices in buckets})
