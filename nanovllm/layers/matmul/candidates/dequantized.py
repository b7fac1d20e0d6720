"""Products of weights that become tensors of the model's dtype first: right for any format, and slow for few tokens."""

from collections.abc import Iterator

import torch
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
from nanovllm.layers.matmul.table import Key

_MANY_TOKENS = 128  # of an expert, from which on it is worth a trial to dequantize all experts


class Dequantized(Candidate):
    """The product is cuBLAS's, that of experts our tiles'. A CPU dequantizes those experts alone that have a token.
    constants: of `ExpertTiles`, for experts; none for some that work."""

    name = "dequantized"
    operations = ("linear", "linear_silu", "linear_add", "linear_sum", "experts")
    formats = (Int4.name, Mxfp4.name)
    is_default = True
    adds_more = True
    suits_short_prefills = False

    def fitted(self, weight: Weight, constants: tuple) -> tuple | None:
        # Its tiles are of the model's dtype. Only that and the device are asked of the weight.
        return ExpertTiles().fitted(_plain(torch.empty(0, dtype=weight.dtype, device=weight.device)), constants)

    def launch(self, problem: AnyProblem, constants: tuple = ()) -> Tensor:
        if not isinstance(problem, ExpertsProblem):
            return Cublas().launch(problem._replace(weight=dequantized(problem.weight)))
        if use_kernels(problem.logits):
            problem = problem._replace(weight=dequantized(problem.weight), down=dequantized(problem.down))
        return ExpertTiles().launch(problem, constants)

    @classmethod
    def challengers(cls, key: Key, num_tokens: int, top_k: int, num_multiprocessors: int) -> Iterator[tuple]:
        if cls.is_for(key) and key.operation == "experts" and num_tokens * top_k >= _MANY_TOKENS * key.experts:
            yield from ExpertTiles.challengers(key._replace(format="bfloat16"), num_tokens, top_k, num_multiprocessors)


def dequantized(weight: Weight) -> Weight:
    return _plain(weight.format.dequantized(weight))


def _plain(values: Tensor) -> Weight:
    return Unquantized().quantize(values, values.dtype)
