"""Sums over tensor-parallel GPUs that map each other's memory.

There are three ways. For the fewest tokens, the product itself writes its part to the other ranks' memory. In long
prefills over two GPUs, one half of the tokens is summed while the other half is multiplied. Otherwise one kernel adds
all parts and computes the norm. See `utils.residual_reducer`.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nanovllm.layers.activation import Gated
from nanovllm.layers.layernorm import Normed, RMSNorm
from nanovllm.utils.context import get_context
from nanovllm.utils.residual_reducer import ResidualReducer


class NormedParts:
    """A `Normed` whose value comes in parts, consecutive tokens each. `parts` can be read once, and computes each part
    when it is asked for."""

    def __init__(self, residual: Tensor, parts: Iterator[Tensor]):
        self.residual, self.parts = residual, parts

    def value(self) -> Tensor:
        return torch.cat(list(self.parts))


def begin_sums(layers: nn.ModuleList, num_tokens: int, reducer: ResidualReducer) -> None:
    """Call this before each forward pass of decoder layers. It decides whether their products write their parts of the
    sums to the other ranks' memory."""
    of_layers = [layer.summed_projections() for layer in layers]
    projections = [projection for of_layer in of_layers for projection in of_layer]
    constants = [posted_constants(each, num_tokens) for each in projections]
    # A family whose sums go another way has fewer than two a layer, which does no harm.
    reducer.begin_pass(2 * len(layers), all(of_layers) and None not in constants)


def posted_constants(proj: Any, num_tokens: int) -> tuple | None:
    """The constants of this projection's first choice, if that writes to the other ranks' memory itself, else None."""
    for candidate, constants in proj.matmul.choices("linear_sum", proj.matrix, num_tokens)[:1]:
        if candidate.posts_sums and isinstance(proj.matrix, Tensor):
            return constants
    return None


def add_over_ranks(
    proj: nn.Module, residual: Tensor, x: Tensor | Gated | Iterable[Tensor | Gated], norm: RMSNorm
) -> Normed | NormedParts:
    """`RowParallelLinear.add` with a reducer, and that of experts. If x comes in parts, the result does too."""
    reducer = proj.tp.reducer
    if isinstance(x, Gated):
        x = x.value()
    if isinstance(x, Tensor) and reducer.takes_parts(len(x)) and get_context().is_prefill:
        x = x.chunk(2)
    if not isinstance(x, Tensor):
        return NormedParts(residual, _add_parts(proj, residual, x, norm))
    if reducer.is_posting:
        reducer.add_linear(residual, x, proj.weight, proj.bias_of_rank, posted_constants(proj, len(x)))
        return Normed(residual, norm)
    if not reducer.takes(len(x)):
        return Normed(proj.add_to(residual, x), norm)
    partial = reducer.partial(len(x))
    proj.part_of_sum(x, partial)
    return Normed(residual, norm, reducer.add_norm(residual, partial, norm.weight, norm.eps))


def _add_parts(proj: nn.Module, residual: Tensor, parts: Iterable[Tensor | Gated], norm: RMSNorm) -> Iterator[Tensor]:
    """Sends all parts when the first result is asked for. The caller works on it while the last part is summed."""
    sums = proj.tp.reducer.long_sums
    under_way, start = [], 0
    for x in parts:
        partial = residual.new_empty(len(x), residual.shape[1])
        proj.part_of_sum(x, partial)
        under_way.append((residual[start : start + len(x)], sums.send(partial)))
        start += len(x)
    for residual_part, sent in under_way:
        yield sums.finish(residual_part, sent, norm.weight, norm.eps)
