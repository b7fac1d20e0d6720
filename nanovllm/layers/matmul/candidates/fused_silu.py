"""Our kernel for the linear_silu of long prefills."""

from collections.abc import Iterator

from torch import Tensor

from nanovllm.kernels.matmul import linear_silu as kernels
from nanovllm.layers.formats.format import Weight, value_of
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.problem import Problem
from nanovllm.layers.matmul.table import Key


class FusedSilu(Candidate):
    """It has no constants."""

    name = "fused-silu"
    operations = ("linear_silu",)
    formats = (Unquantized.name,)

    def supports(self, key: Key, weight: Weight) -> bool:
        return self.is_for(key) and kernels.can_fuse(weight.values)

    def launch(self, problem: Problem, constants: tuple = ()) -> Tensor:
        return kernels.linear_silu(value_of(problem.x), problem.weight.values)

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        if cls.is_for(key) and key.phase == "prefill":
            yield ()
