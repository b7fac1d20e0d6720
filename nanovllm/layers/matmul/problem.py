"""A product to compute: its key, and its tensors.

Operations, of x `[num_tokens, K]` and a weight W `[N, K]`:

- linear: `x W^T + bias`.
- linear_silu: `silu(x Wg^T) * (x Wu^T)` (SwiGLU, Shazeer 2020). W holds the N / 2 rows of Wg, then those of Wu.
- linear_add: `residual += x W^T + bias`. quack-kernels, and torch in fp8, round the product before the sum; without a
  bias, the others round once.
- linear_sum: linear, as one rank's part of a sum over tensor-parallel ranks.
- experts: a mixture of experts, of weights `[num_experts, N, K]`: `ExpertsProblem`.
"""

from typing import Any, NamedTuple, TypeGuard

from torch import Tensor

from nanovllm.kernels.matmul.linear_checks import MAX_NORM_SIZE
from nanovllm.kernels.silu_and_mul import SWIGLU, Activation
from nanovllm.layers.formats.format import Input, Weight, value_of
from nanovllm.layers.layernorm import Normed
from nanovllm.layers.matmul.table import Key

OPERATIONS = ("linear", "linear_silu", "linear_add", "linear_sum", "experts")


class Problem(NamedTuple):
    """One product of a layer."""

    key: Key
    x: Input
    weight: Weight  # [N, K]
    bias: Tensor | None = None  # [N]
    out: Tensor | None = None  # [num_tokens, N]: linear_add's residual, or where the result goes; None: a new tensor

    def result(self) -> Tensor:
        """Where the result goes."""
        if self.out is not None:
            return self.out
        return self.weight.new_empty(len(self.x), self.key.N // (2 if self.key.operation == "linear_silu" else 1))


class ExpertsProblem(NamedTuple):
    """The weighted sum of each token's experts, `down(activation(gate x, up x))`."""

    key: Key
    x: Tensor | Normed  # [num_tokens, hidden_size]
    logits: Tensor  # [num_tokens, all experts], of the router
    weight: Weight  # [num_experts, 2 * intermediate, hidden_size]: of each expert gate, then up
    down: Weight  # [num_experts, hidden_size, intermediate]
    top_k: int
    normalize: bool  # whether a token's weights are divided by their sum
    out: Tensor  # [num_tokens, hidden_size]
    add: bool  # whether the sum is added to `out`, or written to it
    context_lens: Tensor | None = None  # int32 [num_tokens]; 0 for padding, which gets no expert
    bias: Tensor | None = None  # [num_experts, 2 * intermediate], of gate and up
    down_bias: Tensor | None = None  # [num_experts, hidden_size]
    activation: Activation = SWIGLU
    scales: Tensor | None = None  # [all experts], which multiply the weights; None for ones
    mine: range | None = None  # the experts whose weights and biases these are; None: all. Others add nothing.
    more: Tensor | None = None  # [num_tokens, hidden_size], which is added too

    @property
    def mean_top_k(self) -> int:
        """How many of these experts a token has on average, if all experts are as likely; at least 1."""
        return max(1, round(self.top_k * len(self.weight) / self.logits.shape[1]))


AnyProblem = Problem | ExpertsProblem


def is_waiting_norm(x: Input) -> TypeGuard[Normed]:
    """Whether x is a norm that is not computed yet."""
    return isinstance(x, Normed) and not x.is_computed


def input_and_norm(problem: Problem, computes_norm: bool = True) -> tuple[Tensor, dict[str, Any]]:
    """The input of a kernel that can compute its norm, and the norm as the kernel's options. computes_norm: whether it
    does for this weight. Otherwise, and where there is no norm left to compute, the input is whole."""
    x = problem.x
    # `out` could be the residual stream that x is the norm of.
    if is_waiting_norm(x) and computes_norm and problem.key.K <= MAX_NORM_SIZE and problem.out is None:
        return x.residual, {"norm_weight": x.weight, "eps": x.eps}
    return value_of(x), {}
