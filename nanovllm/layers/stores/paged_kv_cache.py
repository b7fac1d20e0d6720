"""PagedKVCache: the keys and values of all tokens, in blocks (PagedAttention, Kwon et al. 2023)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.layers.attention.attention import Attention, AttentionShape
from nanovllm.layers.stores.store import Store
from nanovllm.layers.stores.zeros import store_zeros


class PagedKVCache(Store):
    """One tensor for all layers, each of which holds its slices of it as `k_cache` and `v_cache`.

    Block b of a sequence's block table holds the keys and values of block_size tokens, in the slots from
    b * block_size on.

    Attributes:
        layers: the attention layers, in order.
        tensor: [2, layers, blocks, block_size, kv_heads, head_dim]: keys, values; None until it is allocated.
        scales: float32 [layers, 2, kv_heads] of a float8 cache, of keys and values; None for any other.
    """

    name = "KV cache"

    def __init__(self, layers: Sequence[Attention], shape: AttentionShape):
        self.layers, self._device = layers, shape.device
        self._dtype = shape.cache_dtype or shape.dtype
        self._block_shape = shape.block_size, shape.num_kv_heads, shape.head_dim
        self.bytes_per_block = 2 * len(layers) * math.prod(self._block_shape) * self._dtype.itemsize
        self.tensor: Tensor | None = None
        self.scales: Tensor | None = None
        if shape.is_fp8_cache:
            sizes = len(layers), 2, shape.num_kv_heads
            self.scales = torch.ones(*sizes, dtype=torch.float32, device=shape.device)

    def allocate(self, num_blocks: int, num_slots: int, is_shared: bool = False) -> None:
        num_layers = 1 if is_shared else len(self.layers)
        shape = (2, num_layers, num_blocks, *self._block_shape)
        tensor = store_zeros(shape, self._dtype, self._device, self.name)
        self.use(tensor.expand(2, len(self.layers), *shape[2:]))

    def free(self) -> None:
        self.use(None)

    def use(self, tensor: Tensor | None) -> None:
        """Give each layer its slices of the cache; None takes them away."""
        self.tensor = tensor
        for i, layer in enumerate(self.layers):
            layer.k_cache, layer.v_cache = (None, None) if tensor is None else tensor[:, i]
            layer.kv_scales = None if tensor is None or self.scales is None else self.scales[i]
