"""Sums of layers' outputs over the tensor-parallel ranks, added to the residual stream.

Where GPUs map each other's memory, there are three ways besides NCCL. For the fewest tokens, the product itself writes
its part to the other ranks' memory. In long prefills over two GPUs, one half of the tokens is summed while the other
half is multiplied. Otherwise one kernel adds all parts and computes the norm. See `layers.parallel.residual_reducer`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from nanovllm.layers.activation import Gated
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.layers.parallel.residual_reducer import ResidualReducer
from nanovllm.utils.context import get_context


class NormedParts:
    """A `Normed` whose value comes in parts, consecutive tokens each. `parts` can be read once, and computes each part
    when it is asked for."""

    def __init__(self, residual: Tensor, parts: Iterator[Tensor]):
        self.residual, self.parts = residual, parts

    def value(self) -> Tensor:
        return torch.cat(list(self.parts))


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
    # What is posted has no scales.
    return constants if candidate.posts_sums and product.weight.scale is None else None


def add_over_ranks(
    layer: Any, residual: Tensor, x: Any, norm: RMSNorm | None, output_norm: RMSNorm | None
) -> Normed | NormedParts:
    """`RowParallelLinear.add`, and that of a mixture of experts: y is the sum of their `part_of_sum` over all ranks. If
    x comes in parts, the result does too."""
    tp, reducer = layer.tp, layer.tp.reducer
    if output_norm is not None:
        y = tp.all_reduce(layer.part_of_sum("linear", x))
        return Normed(output_norm.add_to(residual, y), norm)
    if reducer is not None and norm is not None:
        if isinstance(x, (Normed, Gated)):
            x = x.value()
        if isinstance(x, Tensor) and reducer.takes_parts(len(x)) and get_context().is_prefill:
            x = x.chunk(2)
        if not isinstance(x, Tensor):
            return NormedParts(residual, _add_parts(layer, residual, x, norm))
        if reducer.is_posting:
            reducer.add_linear(residual, x, layer.weight, layer.bias_of_rank, posted_constants(layer, len(x)))
            return Normed(residual, norm)
        if reducer.takes(len(x)):
            partial = reducer.partial(len(x))
            layer.part_of_sum("linear_sum", x, partial)
            return Normed(residual, norm, reducer.add_norm(residual, partial, norm.weight, norm.eps))
    # One rank, or a sum by NCCL. Rank 0's part contains the residual.
    layer.part_of_sum("linear_add" if tp.rank == 0 else "linear_sum", x, residual)
    return Normed(tp.all_reduce(residual), norm)


def _add_parts(layer: Any, residual: Tensor, parts: Iterable[Tensor | Gated], norm: RMSNorm) -> Iterator[Tensor]:
    """Sends all parts when the first result is asked for. The caller works on it while the last part is summed."""
    sums = layer.tp.reducer.long_sums
    under_way, start = [], 0
    for x in parts:
        partial = residual.new_empty(len(x), residual.shape[1])
        layer.part_of_sum("linear_sum", x, partial)
        under_way.append((residual[start : start + len(x)], sums.send(partial)))
        start += len(x)
    for residual_part, sent in under_way:
        yield sums.finish(residual_part, sent, norm.weight, norm.eps)
