"""Products of a layer's input and its weight by whatever is fastest at their shapes: quack-kernels where that is in
use, our kernels for small decode batches, or cuBLAS."""

import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.kernels import HAS_TRITON
from nanovllm.layers import decode_linear
from nanovllm.layers.quack import Quack, Tile
from nanovllm.layers.quack_tiles import Kind, decode_tile, padded_batch, prefill_tile
from nanovllm.utils.context import get_context

if HAS_TRITON:
    from nanovllm.kernels import linear_silu as prefill_kernel


def batch_with_padding(num_seqs: int, gate_up: Tensor, quack: Quack | None) -> int:
    """How many rows a decode step of num_seqs sequences had better have in a model whose gate and up are this weight.
    quack: as for `product`; whether it still works is not asked: it may fail after graphs have been captured."""
    if quack is None or not quack.decodes or not quack.takes_weight(gate_up):
        return num_seqs
    return padded_batch(num_seqs, *gate_up.shape, quack.num_multiprocessors)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    out: Tensor | None = None,
    arrivals: Tensor | None = None,
    quack: Quack | None = None,
) -> Tensor:
    """`x W^T + bias`.

    Args:
        x: `[num_tokens, K]`.
        weight: `[N, K]` of x's dtype.
        bias: `[N]`, or None.
        out: `[num_tokens, N]` for the result, or None.
        arrivals: what `decode_linear.make_arrivals` gave to this layer.
        quack: the package, where it is in use; it takes products without a bias and without `out`.

    Returns:
        `out`, or a new `[num_tokens, N]` of x's dtype.
    """
    tile = None if out is not None else _tile(quack, Kind.LINEAR, x, weight, bias)
    y = None if tile is None else quack.linear(x, weight, tile)
    if y is not None:
        return y
    if decode_linear.is_small_batch(len(x), weight):
        return decode_linear.linear(x, weight, bias, out, arrivals, pdl=True)
    if out is None:
        return F.linear(x, weight, bias)
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def product_silu(
    x: Tensor, weight: Tensor, arrivals: Tensor | None = None, quack: Quack | None = None
) -> Tensor | None:
    """`silu(x Wg^T) * (x Wu^T)` (Shazeer 2020) in one launch, where that is the fast way.

    Args:
        x, arrivals, quack: as for `product`.
        weight: `[2 * intermediate, K]` of x's dtype, the gate's rows and then the up's.

    Returns:
        `[num_tokens, intermediate]`, or None where a product and the activation are faster.
    """
    tile = _tile(quack, Kind.SILU, x, weight)
    y = None if tile is None else quack.linear_silu(x, weight, tile)
    if y is not None:
        return y
    if decode_linear.is_small_batch(len(x), weight):
        return decode_linear.linear_silu(x, weight, arrivals, pdl=True)
    return prefill_kernel.linear_silu(x, weight) if HAS_TRITON and prefill_kernel.can_fuse(x, weight) else None


def add_product(
    residual: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    arrivals: Tensor | None = None,
    quack: Quack | None = None,
) -> Tensor:
    """`residual += x W^T + bias`, which is returned; rounded once where there is no bias, by quack-kernels once more
    before the sum. Arguments as for `product`."""
    tile = _tile(quack, Kind.ADD, x, weight, bias)
    if tile is not None and quack.linear_add(x, weight, residual, tile) is not None:
        return residual
    if decode_linear.is_small_batch(len(x), weight):
        return decode_linear.linear_add(x, weight, residual, bias, arrivals, pdl=True)
    residual.addmm_(x, weight.t())
    return residual if bias is None else residual.add_(bias)


def _tile(quack: Quack | None, kind: Kind, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tile | None:
    """The package's, where it is in use and the fast way."""
    if quack is None or bias is not None or not quack.takes(x, weight):
        return None
    if get_context().is_prefill:
        return prefill_tile(kind, len(x), *weight.shape)
    return decode_tile(kind, len(x), *weight.shape, quack.num_multiprocessors) if quack.decodes else None
