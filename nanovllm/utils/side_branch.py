"""Work of a step that its other kernels need not wait for."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideBranch:
    """A second stream beside the one that a step is computed on; where the step is captured, a branch of its graph."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._is_open = False

    @contextmanager
    def fork(self) -> Iterator[None]:
        """What is launched in this block waits for what the current stream has so far, and for earlier blocks; what the
        current stream gets afterwards does not wait for it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        self._is_open = True
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        """Have what the current stream gets from now on wait for all blocks; at the latest at the end of a capture."""
        if self._is_open:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            self._is_open = False
