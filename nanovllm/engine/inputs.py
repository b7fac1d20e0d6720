"""The tensors of a step, written as numpy arrays on the host and sent to the device in one copy."""

import numpy as np
import torch

_ALIGN = 16  # bytes; what wide loads on the device want


class PackedArrays:
    """Named arrays in one buffer: numpy views on the host, tensor views on the device.

    One copy instead of one an array: eight small ones cost the host more than the step's other preparations.
    On a CPU both views are the same memory, and `send` has nothing to do.

    Attributes:
        host: {name: numpy array} to write to.
        device: {name: tensor} to read from, after `send`.
    """

    def __init__(self, layout: dict[str, tuple[tuple[int, ...], type]], device: torch.device):
        """layout: {name: (shape, numpy dtype)}."""
        offsets, size = {}, 0
        for name, (shape, dtype) in layout.items():
            offsets[name] = size
            num_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
            size += -(-num_bytes // _ALIGN) * _ALIGN
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.uint8, pin_memory=on_gpu)
        self._device = torch.zeros(size, dtype=torch.uint8, device=device) if on_gpu else self._host
        self.host, self.device = {}, {}
        for name, (shape, dtype) in layout.items():
            start, end = offsets[name], offsets[name] + int(np.prod(shape)) * np.dtype(dtype).itemsize
            self.host[name] = self._host.numpy()[start:end].view(dtype).reshape(shape)
            torch_dtype = torch.from_numpy(np.empty(0, dtype)).dtype
            self.device[name] = self._device[start:end].view(torch_dtype).view(shape)

    def send(self) -> None:
        """Copy host to device, in stream order. The host arrays may be written again once the stream got there."""
        if self._device is not self._host:
            self._device.copy_(self._host, non_blocking=True)


class BlockTables:
    """Block tables as rows of an int32 array, where only rows that changed are written again.

    A sequence's table is appended to, or replaced by a new list when its blocks are handed out anew; so the same
    list object at the same length means the same content.
    """

    def __init__(self, array: np.ndarray):
        """array: [max_num_seqs, max_blocks], int32."""
        self.array = array
        self._written: list[tuple[list[int], int]] = [([], 0)] * len(array)

    def write(self, row: int, block_table: list[int]) -> None:
        table, length = self._written[row]
        new_length = len(block_table)
        if table is not block_table:
            self.array[row, :new_length] = block_table
            self.array[row, new_length:] = -1
        elif length != new_length:
            self.array[row, length:new_length] = block_table[length:]
        else:
            return
        self._written[row] = (block_table, new_length)
