"""Products of weights that become tensors of the model's dtype first: right for any format, and slow for few tokens."""

from torch import Tensor

from nanovllm.kernels import use_kernels
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.formats.unquantized import Unquantized
from nanovllm.layers.matmul.candidate import Candidate
from nanovllm.layers.matmul.candidates.cublas import Cublas
from nanovllm.layers.matmul.candidates.expert_tiles import ExpertTiles
from nanovllm.layers.matmul.problem import AnyProblem, ExpertsProblem


class Dequantized(Candidate):
    """The product is cuBLAS's, that of experts our tiles'. A CPU dequantizes those experts alone that have a token."""

    name = "dequantized"
    operations = ("linear", "linear_silu", "linear_add", "linear_sum", "experts")
    formats = (Int4.name, Mxfp4.name)
    is_default = True

    def launch(self, problem: AnyProblem, constants: tuple = ()) -> Tensor:
        if not isinstance(problem, ExpertsProblem):
            return Cublas().launch(problem._replace(weight=_dequantized(problem.weight)))
        if use_kernels(problem.logits):
            problem = problem._replace(weight=_dequantized(problem.weight), down=_dequantized(problem.down))
        return ExpertTiles().launch(problem)


def _dequantized(weight: Weight) -> Weight:
    return Unquantized().quantize(weight.format.dequantized(weight), weight.dtype)
