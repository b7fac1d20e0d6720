"""PagedKVCache: the keys and values of all tokens, in blocks (PagedAttention, Kwon et al. 2023)."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from nanovllm.layers.attention import Attention
from nanovllm.layers.backends.backend import AttentionBackend, AttentionShape
from nanovllm.layers.stores.store import Store
from nanovllm.layers.stores.zeros import store_zeros


class PagedKVCache(Store):
    """One tensor for all layers whose heads are equal in number and size. Each layer holds its slices as `k_cache` and
    `v_cache`.

    Block b of a sequence's block table holds the keys and values of block_size tokens, in the slots from
    b * block_size on.

    Attributes:
        layers: the attention layers, in order.
        shapes: of the layers.
        tensors: [2, layers, blocks, block_size, kv_heads, head_dim] for each shape: keys, values; empty until they are
            allocated.
        scales: float32 [2, kv_heads] of each layer of a float8 cache, of keys and values; None for any other.
        are_scales_calibrated: whether they were chosen by the model's weights.
    """

    name = "KV cache"

    def __init__(self, layers: Sequence[Attention], shapes: Sequence[AttentionShape]):
        self.layers, self.shapes, first = layers, list(shapes), shapes[0]
        self._device, self._dtype = first.device, first.cache_dtype or first.dtype
        numbers = sum(math.prod(self._block_shape(shape)) for shape in shapes)
        self.bytes_per_block = 2 * numbers * self._dtype.itemsize
        self.tensors: list[Tensor] = []
        self.scales: list[Tensor] | None = None
        self.are_scales_calibrated = False
        if first.is_fp8_cache:
            options: dict[str, Any] = {"dtype": torch.float32, "device": first.device}
            self.scales = [torch.ones(2, shape.num_kv_heads, **options) for shape in shapes]

    @staticmethod
    def _block_shape(shape: AttentionShape) -> tuple[int, int, int]:
        return shape.block_size, shape.num_kv_heads, shape.head_dim

    @property
    def windows(self) -> dict[AttentionShape, list[int | None]]:
        """The windows that layers of each shape have, once each."""
        windows: dict[AttentionShape, list[int | None]] = {}
        for layer, shape in zip(self.layers, self.shapes, strict=True):
            of_shape = windows.setdefault(shape, [])
            if layer.window not in of_shape:
                of_shape.append(layer.window)
        return windows

    def use_backend(self, backend: AttentionBackend) -> None:
        """Let it compute the attention of all layers."""
        for layer in self.layers:
            layer.backend = backend

    def allocate(self, num_blocks: int, num_cells: int, is_shared: bool = False) -> None:
        tensors = []
        for shape in dict.fromkeys(self.shapes):
            count = self.shapes.count(shape)
            sizes = (2, 1 if is_shared else count, num_blocks, *self._block_shape(shape))
            tensor = store_zeros(sizes, self._dtype, self._device, self.name)
            tensors.append(tensor.expand(2, count, *sizes[2:]))
        self.use(tensors)

    def free(self) -> None:
        self.use([])

    def use(self, tensors: Sequence[Tensor]) -> None:
        """Give each layer its slices of the cache; an empty list takes them away."""
        self.tensors = list(tensors)
        slices = {shape: iter(x.unbind(1)) for shape, x in zip(dict.fromkeys(self.shapes), self.tensors, strict=False)}
        for i, (layer, shape) in enumerate(zip(self.layers, self.shapes, strict=True)):
            layer.k_cache, layer.v_cache = next(slices[shape]) if slices else torch.empty(2, 0)
            layer.kv_scales = None if not slices or self.scales is None else self.scales[i]
