"""Staging: copies weights from a memory-mapped file to the device."""

import torch
from torch import Tensor

_BUFFER_BYTES = 4 * 2**20


class Staging:
    """Copies to the device for one loading thread; a context manager. On a CPU it does nothing.

    A copy from pageable memory to a GPU is slow and blocks. Here two pinned buffers take turns: while one is being
    copied, the next part is read from the file into the other.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.on_gpu = device.type == "cuda"

    def __enter__(self) -> "Staging":
        if self.on_gpu:
            # Its own stream, because on a common one it would wait for the other threads' copies.
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
        """A safetensors slice whose parts are on the device once they are read."""
        return DeviceReader(loaded, self) if self.on_gpu else loaded

    def send(self, x: Tensor) -> Tensor:
        """A copy on the device of x, which is on the host; ready for the current stream. A row of x (an element of a
        vector) must fit a buffer."""
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
    """What a weight_loader slices like the safetensors slice behind it."""

    def __init__(self, loaded, staging: Staging):
        self._loaded, self._staging = loaded, staging

    def __getitem__(self, index) -> Tensor:
        return self._staging.send(self._loaded[index])
