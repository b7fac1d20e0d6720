"""Sums of layers' outputs over the tensor-parallel ranks, added to the residual stream.

Where GPUs map each other's memory, there are two ways besides NCCL. For the fewest tokens, the product itself writes
its part to the other ranks' memory. Otherwise one kernel adds all parts and computes the norm. See
`layers.parallel.residual_reducer`.
"""

from typing import Any

from torch import Tensor

from nanovllm.layers.formats.format import Input, value_of
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.parallel.residual_reducer import ResidualReducer


def begin_sums(layers: Any, num_tokens: int, reducer: ResidualReducer) -> None:
    """Call this before each forward pass of decoder layers. It decides whether their products write their parts of the
    sums to the other ranks' memory."""
    of_layers = [layer.summed_projections() for layer in layers]
    projections = [projection for of_layer in of_layers for projection in of_layer]
    constants = [posted_constants(each, num_tokens) for each in projections]
    # A family whose sums go another way has fewer than two a layer, which does no harm.
    reducer.begin_pass(2 * len(layers), all(of_layers) and None not in constants)


def posted_constants(proj: Any, num_tokens: int) -> tuple | None:
    """The constants of this projection's first choice, if that writes to the other ranks' memory itself, else None."""
    product = proj.products["linear_sum"]
    _, row = product.row
    candidate, constants = row[num_tokens][0]
    return constants if candidate.posts_sums else None


def add_over_ranks(layer: Any, residual: Tensor, x: Input, norm: RMSNorm | None, output_norm: RMSNorm | None) -> Normed:
    """`RowParallelLinear.add`, and that of a mixture of experts: y is the sum of their `part_of_sum` over all ranks."""
    tp, reducer = layer.tp, layer.tp.reducer
    if output_norm is not None:
        y = tp.all_reduce(layer.part_of_sum("linear", x))
        return Normed(output_norm.add_to(residual, y), norm)
    if reducer is not None and norm is not None:
        x = value_of(x)
        if reducer.is_posting:
            reducer.add_linear(residual, x, layer.matrix, layer.bias_of_rank, posted_constants(layer, len(x)))
            return Normed(residual, norm)
        if reducer.takes(len(x)):
            partial = reducer.partial(len(x))
            layer.part_of_sum("linear_sum", x, partial)
            return Normed(residual, norm, reducer.add_norm(residual, partial, norm.weight, norm.eps))
    # One rank, or a sum by NCCL. Rank 0's part contains the residual.
    layer.part_of_sum("linear_add" if tp.rank == 0 else "linear_sum", x, residual)
    return Normed(tp.all_reduce(residual), norm)
