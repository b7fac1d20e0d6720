"""WindowedKVCache: the keys and values of layers that see only a window of tokens, without those that they have
passed."""

from collections.abc import Sequence

from nanovllm.layers.attention import Attention
from nanovllm.layers.backends.backend import AttentionShape
from nanovllm.layers.stores.paged_kv_cache import PagedKVCache
from nanovllm.layers.stores.store import StoreLimits
from nanovllm.layers.stores.window_split import WindowSplit
from nanovllm.utils.context import get_window_context


class WindowedKVCache(PagedKVCache):
    """A PagedKVCache with blocks and block tables of its own. A sequence gives its blocks back when no later token sees
    them (`engine.features.windows.window_blocks`). Its layers see the step through `get_window_context`.

    Attributes:
        split: how many blocks it has beside those of the layers without a window, whose number the methods of a
            Store are given.
        bytes_per_block: of each of its own blocks.
    """

    name = "KV cache of layers with a window"

    def __init__(self, layers: Sequence[Attention], shapes: Sequence[AttentionShape], split: WindowSplit):
        super().__init__(layers, shapes)
        self.split = split

    def num_bytes(self, num_blocks, num_cells):
        return self.split.num_blocks(num_blocks) * self.bytes_per_block

    def num_sequences(self, num_blocks, blocks_each):
        return self.split.num_blocks(num_blocks) // min(blocks_each, self.split.per_sequence)

    def description(self, num_blocks):
        num_own, kept = self.split.num_blocks(num_blocks), self.split.per_sequence
        num_tokens = kept * self.shapes[0].block_size
        return (
            f"{num_own} blocks; of a window of {self.split.window} tokens a sequence keeps {kept} ({num_tokens} tokens)"
        )

    def allocate(self, num_blocks: int, num_cells: int, is_shared: bool = False) -> None:
        super().allocate(self.split.num_blocks(num_blocks), num_cells, is_shared)

    def use(self, tensors):
        super().use(tensors)
        for layer in self.layers:
            layer.get_context = get_window_context


def make_kv_caches(
    layers: Sequence[Attention], shapes: Sequence[AttentionShape], limits: StoreLimits
) -> list[PagedKVCache]:
    """The KV caches of a model's layers: one for those that keep all tokens, if there are some, and one for those with
    a window. If those give nothing back, because the usual sequence is too short, one for all.

    shapes: of the layers.
    """
    kinds: dict[bool, tuple[list[Attention], list[AttentionShape]]] = {False: ([], []), True: ([], [])}
    for layer, shape in zip(layers, shapes, strict=True):
        of_kind = kinds[layer.window is not None]
        of_kind[0].append(layer)
        of_kind[1].append(shape)
    windows = [layer.window for layer in layers if layer.window is not None]
    if windows:
        others = [PagedKVCache(*kinds[False])] if kinds[False][0] else []
        own_bytes, other_bytes = PagedKVCache(*kinds[True]).bytes_per_block, sum(x.bytes_per_block for x in others)
        split = WindowSplit.of(max(windows), shapes[0].block_size, other_bytes, own_bytes, limits)
        if split.gives_back:
            return [*others, WindowedKVCache(*kinds[True], split)]
    return [PagedKVCache(layers, shapes)]
