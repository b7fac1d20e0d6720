"""Staging: the way of weights from a memory-mapped file to the device."""

import torch
from torch import Tensor

_BUFFER_BYTES = 4 * 2**20


class Staging:
    """One loading thread's way to the device, used as a context manager; on a CPU there is none to go.

    A copy from pageable memory to a GPU waits for itself and is slow. Here a tensor goes through two pinned buffers in
    turn: while one is on its way, the next part is read from the file into the other.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"

    def __enter__(self) -> "Staging":
        if self.on_gpu:
            # A stream of its own, or it would wait for the other threads' copies too.
            self._stream = torch.cuda.Stream(self.device)
            self._buffers = torch.empty(2, _BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
            self._sent = [torch.cuda.Event(), torch.cuda.Event()]
            self._turn = 0
            self._on_stream = torch.cuda.stream(self._stream)
            self._on_stream.__enter__()
        return self

    def __exit__(self, *exc_info) -> None:
        if self.on_gpu:
            self._on_stream.__exit__(*exc_info)
            self._stream.synchronize()

    def reader(self, loaded) -> "DeviceReader":
        """`loaded`, a safetensors slice, with what is read of it on the device."""
        return DeviceReader(loaded, self) if self.on_gpu else loaded

    def send(self, x: Tensor) -> Tensor:
        """A copy of x, of the host, on the device, ready for the current stream. A row of x (an element, of a vector)
        must not be larger than a buffer."""
        out = torch.empty(x.shape, dtype=x.dtype, device=self.device)
        num_rows = max(1, _BUFFER_BYTES * len(x) // max(1, x.nbytes))
        for part, target in zip(x.split(num_rows), out.split(num_rows), strict=True):
            self._turn ^= 1
            self._sent[self._turn].synchronize()
            staged = self._buffers[self._turn, : part.nbytes].view(x.dtype).view(part.shape)
            target.copy_(staged.copy_(part), non_blocking=True)
            self._sent[self._turn].record()
        return out


class DeviceReader:
    """What a weight_loader slices, as it would the safetensors slice behind it."""

    def __init__(self, loaded, staging: Staging):
        self._loaded, self._staging = loaded, staging

    def __getitem__(self, index) -> Tensor:
        return self._staging.send(self._loaded[index])
