"""StateCells: the states of the layers with linear attention, of fixed size, in cells."""

import math
from collections.abc import Sequence

import torch

from nanovllm.layers.linear_attention import GatedDeltaNet
from nanovllm.layers.stores.store import Store
from nanovllm.layers.stores.zeros import store_zeros


class StateCells(Store):
    """A cell is a state of all layers: a sequence's own, or a snapshot that others may begin with. Each layer holds its
    slices, as `tails` and `states`."""

    name = "states"

    def __init__(
        self, layers: Sequence[GatedDeltaNet], dtype: torch.dtype, device: torch.device, state_dtype: torch.dtype
    ):
        """dtype: of the layers' inputs, as the tails are. state_dtype: float32, float16 or bfloat16."""
        self.layers, self._device = layers, device
        self._dtypes = dtype, state_dtype
        for layer in layers:
            layer.state_dtype = state_dtype
        sizes = zip(layers[0].state_shapes, self._dtypes, strict=True)
        self.bytes_per_cell = len(layers) * sum(math.prod(shape) * dtype.itemsize for shape, dtype in sizes)

    def allocate(self, num_blocks: int, num_cells: int, is_shared: bool = False) -> None:
        num_layers = 1 if is_shared else len(self.layers)
        of_layers = [
            store_zeros((num_layers, num_cells, *shape), dtype, self._device, self.name)
            for shape, dtype in zip(self.layers[0].state_shapes, self._dtypes, strict=True)
        ]
        for i, layer in enumerate(self.layers):
            layer.tails, layer.states = (tensor[0 if is_shared else i] for tensor in of_layers)

    def free(self) -> None:
        for layer in self.layers:
            layer.tails = layer.states = None

    def copy(self, source: int, target: int) -> None:
        """Copy one cell to another, in stream order."""
        for layer in self.layers:
            for tensor in (layer.tails, layer.states):
                if tensor is not None:
                    tensor[target].copy_(tensor[source])
