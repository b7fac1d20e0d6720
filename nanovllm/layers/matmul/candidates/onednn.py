"""A CPU's products of packed weights, by oneDNN."""

import torch
from torch import Tensor

from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.formats.packed import Packed
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.problem import Problem


class Onednn(Candidate):
    """linear_add rounds once, also with a bias."""

    name = "onednn"
    operations = ("linear", "linear_silu", "linear_add", "linear_sum")
    formats = (Packed.name,)
    is_default = True

    def launch(self, problem: Problem, constants: tuple = ()) -> Tensor:
        key, x, weight, bias, out = problem
        linear, W = torch.ops.mkldnn._linear_pointwise, weight.values
        x = x if isinstance(x, Tensor) else x.value()
        if key.operation == "linear_add" and out is not None:
            return out.copy_(linear.binary(x, out, W, bias, "add"))
        y = linear(x, W, bias, "none", [], "")
        if key.operation == "linear_silu":
            return silu_and_mul(y)
        return y if out is None else out.copy_(y)
