"""torch's products of tensors: cuBLAS on a GPU. The plain twin of the others."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.formats.format import value_of
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.problem import Problem
from nanovllm.layers.matmul.table import Key


class Cublas(Candidate):
    name = "cublas"
    operations = ("linear", "linear_silu", "linear_add", "linear_sum")
    formats = (Unquantized.name,)
    is_default = True

    def launch(self, problem: Problem, constants: tuple = ()) -> Tensor:
        key, x, weight, bias, out = problem
        x, W = value_of(x), weight.values
        if key.operation == "linear_silu":
            return silu_and_mul(F.linear(x, W))
        if out is None:
            return F.linear(x, W, bias)
        if key.operation == "linear_add":
            out.addmm_(x, W.t())
            return out if bias is None else out.add_(bias)
        return torch.mm(x, W.t(), out=out) if bias is None else torch.addmm(bias, x, W.t(), out=out)

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        if cls.is_for(key):
            yield ()
