"""Products in one order of sums for any number of rows: of `deterministic=True`."""

from torch import Tensor

from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.formats.fixed_order import FixedOrder, FixedOrderReady
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.expert_tiles import experts_twin
from nanovllm.layers.matmul.problem import ExpertsProblem, Problem


class FixedOrderProducts(Candidate):
    """linear_add rounds the product before the sum."""

    name = "fixed-order"
    operations = ("linear", "linear_silu", "linear_add", "linear_sum")
    formats = (FixedOrder.name, FixedOrderReady.name)
    is_default = True
    is_batch_invariant = True

    def launch(self, problem: Problem, constants: tuple = ()) -> Tensor:
        key, x, weight, bias, out = problem
        y = weight.format.linear(x, weight)
        if bias is not None:
            y += bias
        if key.operation == "linear_silu":
            return silu_and_mul(y)
        if out is None:
            return y
        return out.add_(y) if key.operation == "linear_add" else out.copy_(y)


class FixedOrderExperts(Candidate):
    """On a CPU. A token's experts are added in the order of their numbers, whatever other tokens chose."""

    name = "fixed-order-experts"
    operations = ("experts",)
    formats = (FixedOrderReady.name,)
    is_default = True
    is_batch_invariant = True

    def launch(self, problem: ExpertsProblem, constants: tuple = ()) -> Tensor:
        return experts_twin(problem)
