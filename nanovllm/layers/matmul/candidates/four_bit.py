"""What the candidates for weights of 4 bits have in common."""

from torch import Tensor

from nanovllm.kernels.matmul.four_bit import FourBit
from nanovllm.kernels.matmul.four_bit_tiles import arrange, rms_norm_arrange, silu_and_mul_arrange
from nanovllm.layers.activation import Gated
from nanovllm.layers.formats.format import Input, Weight, value_of
from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.formats.mxfp4 import Mxfp4
from nanovllm.layers.matmul.problem import is_waiting_norm

FORMATS = (Int4.name, Mxfp4.name)


def four_bit(weight: Weight) -> FourBit:
    """The weight as the kernels take it."""
    assert weight.scale is not None
    return FourBit(weight.values, weight.scale, weight.zero)


def arranged(x: Input) -> Tensor:
    """A product's input in the order in which tiles of words multiply it."""
    if is_waiting_norm(x):
        return rms_norm_arrange(x.residual, x.weight, x.eps)
    if isinstance(x, Gated) and x.of_token is None:
        return silu_and_mul_arrange(x.gate_up)
    return arrange(value_of(x))
