"""ImageRoom: how much memory the images may take that an engine has got and not computed yet."""

import weakref
from typing import Any

from nanovllm.utils.host_memory import host_memory

_MOST_BYTES = 16 << 30  # of an engine; more would not keep a card busier
_SHARE = 0.25  # of the memory that is free when the job begins


class ImageRoom:
    """Counts the images that are alive. An engine has them until their answer is complete."""

    def __init__(self, most_bytes: int | None = None, num_engines: int = 1):
        """most_bytes: None: a share of the machine's."""
        self._most = most_bytes or min(num_engines * _MOST_BYTES, int(_SHARE * host_memory().available))
        self._num_bytes = 0
        self._alive: dict[int, weakref.ref[Any]] = {}  # by their ids

    def has_room(self, line: Any) -> bool:
        """Whether a line may go to the engine now. An engine that has none gets one, whatever its size."""
        size = getattr(line, "num_image_bytes", 0)
        return not size or not self._alive or self._num_bytes + size <= self._most

    def take(self, line: Any) -> None:
        """An engine gets this line."""
        for image in getattr(line, "images", ()):
            for array in image.arrays.values():
                self._watch(array.values)

    def _watch(self, values: Any) -> None:
        key, size = id(values), values.nbytes

        def forget(_: object) -> None:
            del self._alive[key]
            self._num_bytes -= size

        self._alive[key] = weakref.ref(values, forget)
        self._num_bytes += size
