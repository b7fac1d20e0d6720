"""Numpy arrays of the host that go to the device in one copy."""

import math
from functools import cache

import numpy as np
import torch

from nanovllm.layers.backends.backend import Layout

_ALIGN = 16  # bytes; what wide loads on the device want


class PackedArrays:
    """Named arrays in one buffer: `host`, {name: numpy array} to write to, and `device`, {name: tensor} to read from
    after `send`. `host_bytes` and `device_bytes`, uint8, are all of it, padded to 16 bytes. On a CPU both are the same
    memory."""

    def __init__(self, layout: Layout, device: torch.device, device_bytes: torch.Tensor | None = None):
        """device_bytes: uint8, packed_size(layout) of them, to send to instead of memory of its own."""
        size = packed_size(layout)
        on_gpu = device.type == "cuda"
        if device_bytes is None:
            device_bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.device_bytes = device_bytes
        self.host_bytes = torch.zeros(size, dtype=torch.uint8, pin_memory=True) if on_gpu else device_bytes
        host_bytes = self.host_bytes.numpy()
        self.host: dict[str, np.ndarray] = {}
        self.device: dict[str, torch.Tensor] = {}
        start = 0
        for name, (shape, dtype) in layout.items():
            end = start + math.prod(shape) * np.dtype(dtype).itemsize
            # Not as views of a tensor: making those costs ten times as much.
            self.host[name] = host_bytes[start:end].view(dtype).reshape(shape)
            self.device[name] = device_bytes[start:end].view(_torch_dtype(dtype)).view(shape)
            start += _padded_bytes(shape, dtype)

    def send(self) -> None:
        """Copy host to device, in stream order. The host arrays may be written again once the stream got there."""
        if self.device_bytes is not self.host_bytes:
            self.device_bytes.copy_(self.host_bytes, non_blocking=True)


def send_arrays(arrays: dict[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Copies of the host's arrays on the device, sent as one."""
    packed = PackedArrays({name: (values.shape, values.dtype.type) for name, values in arrays.items()}, device)
    for name, values in arrays.items():
        packed.host[name][...] = values
    packed.send()
    return packed.device


def packed_size(layout: Layout) -> int:
    return sum(_padded_bytes(shape, dtype) for shape, dtype in layout.values())


def _padded_bytes(shape: tuple[int, ...], dtype: type) -> int:
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN


@cache
def _torch_dtype(dtype: type) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
