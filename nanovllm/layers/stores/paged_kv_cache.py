"""PagedKVCache: the keys and values of all tokens, in blocks (PagedAttention, Kwon et al. 2023)."""

import math
import mmap
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from nanovllm.layers.attention.attention import Attention, AttentionShape
from nanovllm.layers.stores.store import Store

_GIB = 2**30


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

    def allocate(self, num_blocks: int, num_seqs: int, is_shared: bool = False) -> None:
        num_layers = 1 if is_shared else len(self.layers)
        shape = (2, num_layers, num_blocks, *self._block_shape)
        if self._device.type == "cpu":
            num_bytes = math.prod(shape) * self._dtype.itemsize
            tensor = _zeros_when_touched(num_bytes).view(self._dtype).view(shape)
        else:
            tensor = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self.use(tensor.expand(2, len(self.layers), *shape[2:]))

    def free(self) -> None:
        self.use(None)

    def use(self, tensor: Tensor | None) -> None:
        """Give each layer its slices of the cache; None takes them away."""
        self.tensor = tensor
        for i, layer in enumerate(self.layers):
            layer.k_cache, layer.v_cache = (None, None) if tensor is None else tensor[:, i]
            layer.kv_scales = None if tensor is None or self.scales is None else self.scales[i]


def _zeros_when_touched(num_bytes: int) -> Tensor:
    """uint8 zeros on the host. A page becomes memory when it is written, because to write gigabytes of zeros would take
    seconds. Raises MemoryError if the system refuses.

    The pages are small ones (4 KiB). In one of 2 MiB a sequence's first tokens in one layer would cost the time to fill
    all of it with zeros: docs/notebook.md, "On a CPU".
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        remedy = "lower num_kvcache_blocks or kvcache_gib"
        raise MemoryError(f"no {num_bytes / _GIB:.1f} GiB for the KV cache ({error}): {remedy}") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # Linux, which may be set to use large pages unasked
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
