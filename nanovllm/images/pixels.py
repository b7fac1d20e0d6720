"""ImagePixels: an image that has been decoded."""

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256

import numpy as np


@dataclass(frozen=True, eq=False)
class ImagePixels:
    """An image as models see it: upright, in RGB, over white where it was transparent.

    Attributes:
        pixels: uint8 [height, width, 3], which nobody may write.
    """

    pixels: np.ndarray

    def __post_init__(self) -> None:
        self.pixels.setflags(write=False)

    def __repr__(self) -> str:
        return f"ImagePixels({self.width} x {self.height})"

    @property
    def width(self) -> int:
        return self.pixels.shape[1]

    @property
    def height(self) -> int:
        return self.pixels.shape[0]

    @property
    def num_bytes(self) -> int:
        """Of the pixels."""
        return self.pixels.nbytes

    @cached_property
    def sha256(self) -> bytes:
        """Of the size and the pixels, 32 bytes: equal images have equal ones, whatever file they came from."""
        digest = sha256(b"%d %d " % (self.width, self.height))
        digest.update(np.ascontiguousarray(self.pixels).data)
        return digest.digest()
