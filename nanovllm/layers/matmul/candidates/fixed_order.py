"""Products in one order of sums for any number of rows: of `deterministic=True`."""

from torch import Tensor

from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.formats.fixed_order import DequantizedProducts, FixedOrder, FixedOrderReady
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.fp8 import Fp8, Fp8Blocks
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.expert_tiles import experts_twin
from nanovllm.layers.matmul.problem import AnyProblem, ExpertsProblem, Problem
from nanovllm.layers.matmul.table import Key

OF_LAYERS = ("linear", "linear_silu", "linear_add", "linear_sum")
QUANTIZED = (Fp8.name, Fp8Blocks.name, Int4.name, Mxfp4.name)


class FixedOrderProducts(Candidate):
    """linear_add rounds the product before the sum."""

    name = "fixed-order"
    operations = OF_LAYERS
    formats = (FixedOrder.name, FixedOrderReady.name)
    is_default = True
    is_batch_invariant = True

    def launch(self, problem: Problem, constants: tuple = ()) -> Tensor:
        return _finished(problem, problem.weight.linear(problem.x))


class FixedOrderExperts(Candidate):
    """On a CPU. A token's experts are added in the order of their numbers, whatever other tokens chose."""

    name = "fixed-order-experts"
    operations = ("experts",)
    formats = (FixedOrderReady.name,)
    is_default = True
    is_batch_invariant = True

    def launch(self, problem: ExpertsProblem, constants: tuple = ()) -> Tensor:
        return experts_twin(problem)


class FixedOrderDequantized(Candidate):
    """On a CPU, of weights that are not plain: they become so in each product, as they do without this mode."""

    name = "fixed-order-dequantized"
    operations = (*OF_LAYERS, "experts")
    formats = QUANTIZED
    is_default = True
    is_batch_invariant = True

    def __init__(self, num_threads: int):
        """num_threads: of a product, at most."""
        self._products = DequantizedProducts(num_threads)

    def supports(self, key: Key, weight: Weight) -> bool:
        return self.is_for(key) and self._products.are_found(weight)

    def launch(self, problem: AnyProblem, constants: tuple = ()) -> Tensor:
        if isinstance(problem, ExpertsProblem):
            return experts_twin(problem, self._products.linear)
        return _finished(problem, self._products.linear(problem.x, problem.weight))


def _finished(problem: Problem, y: Tensor) -> Tensor:
    """The result of a product that is y without a bias."""
    key, _, _, bias, out = problem
    if bias is not None:
        y += bias
    if key.operation == "linear_silu":
        return silu_and_mul(y)
    if out is None:
        return y
    return out.add_(y) if key.operation == "linear_add" else out.copy_(y)


def make_fixed_order_candidates(num_threads: int) -> list[Candidate]:
    """All that a CPU's engine with `deterministic=True` has. num_threads: of a product, at most."""
    return [FixedOrderProducts(), FixedOrderExperts(), FixedOrderDequantized(num_threads)]
