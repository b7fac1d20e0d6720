"""The choice among the candidates that can compute a product: a look-up in a table, once for each layer."""

import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import Tensor

from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.format import Input, Weight
from nanovllm.layers.layernorm import Normed, NormOfSum, RMSNorm
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates import make_candidates
from nanovllm.layers.matmul.problem import AnyProblem, Problem
from nanovllm.layers.matmul.row import Row
from nanovllm.layers.matmul.table import Choice, Key, Table
from nanovllm.utils.context import get_context

logger = logging.getLogger(__name__)

Bound = tuple[Candidate, tuple]  # a candidate with its constants


class Matmul:
    """The table and the candidates of one engine. Handed to every layer with a product."""

    def __init__(self, table: Table | None = None, candidates: Sequence[Candidate] | None = None, model: str = "MODEL"):
        """candidates: torch's own by default. model: its name, for the log."""
        self.table = table or Table()
        self._candidates = {each.name: each for each in candidates or make_candidates()}
        self._model = model
        self._rows: dict[Key, Row[Bound]] = {}
        self._has_told = False

    @property
    def has_choice(self) -> bool:
        """Whether there is more than one candidate for a product."""
        return not all(each.is_default for each in self._candidates.values())

    def run(self, problem: AnyProblem) -> Tensor | Gated:
        return compute(problem, self.row(problem.key, problem.weight)[len(problem.x)])

    def row(self, key: Key, weight: Weight) -> Row[Bound]:
        """The table's candidates for a product, as far as they are there and support it, with constants that fit the
        weight's GPU. The last one is the default."""
        if key not in self._rows:
            self._rows[key] = self._find(key, weight)
        return self._rows[key]

    def _find(self, key: Key, weight: Weight) -> Row[Bound]:
        row, is_measured = self.table.find(key), key in self.table.rows
        supporting = {name: each for name, each in self._candidates.items() if each.supports(key, weight)}
        default = next(each for each in supporting.values() if each.is_default)
        is_choice = len(supporting) > 1
        if not is_measured and key.phase == "decode":  # Then the row, if any, is that of another shape.
            supporting = {name: each for name, each in supporting.items() if not each.suits_one_shape}
            # A linear_add may be rank 0's part of a sum, measured as linear_sum. On one GPU a layer's others tell.
            if is_choice and key.operation != "linear_add" and not self._has_told:
                self._has_told = True
                text = "%s with a weight [%d, %d] was not measured on this GPU; to measure it: nanovllm tune %s"
                logger.info(text, key.operation, key.N, key.K, self._model)

        def usable(choices: Sequence[Choice]) -> Iterator[Bound]:
            for name, measured in choices:
                candidate = supporting.get(name)
                constants = None if candidate is None else candidate.fitted(weight, measured)
                if candidate is not None and constants is not None:
                    yield candidate, constants
            yield default, ()

        buckets = zip(row.bounds, row.choices, strict=True) if row else [(1, ())]
        return Row({bound: usable(choices) for bound, choices in buckets})


class Product:
    """A layer's product, bound to who computes it in each phase and for each number of tokens."""

    def __init__(
        self, matmul: Matmul, operation: str, weight: Weight, bias: Tensor | None = None, num_experts: int | None = None
    ):
        """num_experts: as in `Products`."""
        self.weight, self.bias = weight, bias
        self._matmul, self._operation, self._num_experts = matmul, operation, num_experts
        self._rows: dict[bool, tuple[Key, Row[Bound]]] = {}  # by whether it is a prefill

    def __call__(self, x: Input, out: Tensor | None = None) -> Any:
        """The result: `out`, or a new tensor. With a weight in fp8 a linear_silu is perhaps before its activation."""
        key, row = self.row
        return compute(Problem(key, x, self.weight, self.bias, out), row[len(x)])

    def addend(self, x: Input) -> Tensor | None:
        """What a linear_add would add, if its first candidate computes that before the sum; else None."""
        key, row = self.row
        choices = row[len(x)]
        if not choices[0][0].adds_apart:
            return None
        return compute(Problem(key._replace(operation="linear"), x, self.weight, self.bias), choices)

    def norm_of_sum(self, x: Input, residual: Tensor, norm: RMSNorm) -> Normed:
        """norm of a linear_add's sum, which whoever reads it first computes where the product does not."""
        addend = self.addend(x)
        return Normed(self(x, residual), norm) if addend is None else NormOfSum(residual, norm, addend)

    @property
    def row(self) -> tuple[Key, Row[Bound]]:
        """The key in this step's phase, and the candidates for each number of tokens, the best first."""
        is_prefill = get_context().is_prefill
        if is_prefill not in self._rows:
            key = Key.of(self._operation, is_prefill, self.weight)
            key = key._replace(experts=self._num_experts or key.experts)
            self._rows[is_prefill] = key, self._matmul.row(key, self.weight)
        return self._rows[is_prefill]


class HasMatrix(Protocol):
    """A layer with one weight."""

    @property
    def matrix(self) -> Weight: ...


class Products(dict[str, Product]):
    """The products of one layer's weight, by operation, each bound when it is first asked for."""

    def __init__(
        self, matmul: Matmul | None, layer: HasMatrix, bias: Tensor | None = None, num_experts: int | None = None
    ):
        """matmul: None for one with torch's candidates alone. layer: its `matrix` is the weight. num_experts: of all
        ranks, if this is one's part: a row of the table is for so many, because it tells tokens of an expert. None: the
        weight's."""
        super().__init__()
        self._num_experts = num_experts
        # Weak, because the layer has this: its weights would outlive the engine until Python looks for cycles.
        self._matmul, self._layer, self._bias = matmul, weakref.proxy(layer), bias

    def __missing__(self, operation: str) -> Product:
        args = operation, self._layer.matrix, self._bias, self._num_experts
        found = self[operation] = Product(self._matmul or Matmul(), *args)
        return found


def compute(problem: AnyProblem, choices: tuple[Bound, ...]) -> Any:
    """The result, by the first candidate that has one."""
    for candidate, constants in choices:
        y = candidate.launch(problem, constants)
        if y is not None:
            return y
    raise RuntimeError(f"no candidate computes {problem.key}")
