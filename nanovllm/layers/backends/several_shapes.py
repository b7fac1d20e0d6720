"""Attention of a model whose layers have different heads: a back end for each shape."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from nanovllm.layers.backends.backend import AttentionBackend, AttentionShape

T = TypeVar("T")
Heads = tuple[int, int]  # KV heads of this rank, head_dim


class SeveralShapes(AttentionBackend):
    """Hands each layer to the back end of its KV heads and head_dim. Arrays of the back ends have names that begin with
    those heads, and `Context.attention` is {heads: the back end's own}."""

    name = "several"

    def __init__(self, backends: Mapping[AttentionShape, AttentionBackend]):
        self._backends: dict[Heads, AttentionBackend] = {
            (shape.num_kv_heads, shape.head_dim): backend for shape, backend in backends.items()
        }
        self.supports_cuda_graphs = all(backend.supports_cuda_graphs for backend in backends.values())

    @property
    def description(self) -> str:
        names = {backend.description for backend in self._backends.values()}
        if len(names) == 1:
            return names.pop()
        return ", ".join(f"head_dim {heads[1]}: {x.description}" for heads, x in self._backends.items())

    @classmethod
    def obstacle(cls, shape):
        return None

    def prepare(self, shape, windows, sizes, table):
        backend = self._backends[shape.num_kv_heads, shape.head_dim]
        backend.prepare(shape, windows, sizes, table)
        self.shares_reads |= backend.shares_reads

    def layout(self):
        return {
            _name(heads, name): array
            for heads, backend in self._backends.items()
            for name, array in backend.layout().items()
        }

    def host_arrays(self, arrays, num_rows):
        return {
            _name(heads, name): array
            for heads, backend in self._backends.items()
            for name, array in backend.host_arrays(_own(arrays, heads), num_rows).items()
        }

    def arguments(self, arrays, num_rows, shares_reads=False):
        return {heads: x.arguments(_own(arrays, heads), num_rows, shares_reads) for heads, x in self._backends.items()}

    def prefill(self, layer, q, k, v, context):
        return self._backends[k.shape[1], k.shape[2]].prefill(layer, q, k, v, context)

    def decode(self, layer, q, context):
        heads = layer.k_cache.shape[2], layer.k_cache.shape[3]
        if context.attention is not None:
            context = replace(context, attention=context.attention[heads])
        return self._backends[heads].decode(layer, q, context)


def _name(heads: Heads, name: str) -> str:
    return f"{heads[0]}x{heads[1]} {name}"


def _own(arrays: Mapping[str, T], heads: Heads) -> dict[str, T]:
    """A step's arrays, and those of one back end under its own names."""
    beginning = _name(heads, "")
    return dict(arrays) | {
        name.removeprefix(beginning): array for name, array in arrays.items() if name.startswith(beginning)
    }
