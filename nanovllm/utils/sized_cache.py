"""SizedCache: what was computed before, for as long as it fits."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class SizedCache(Generic[Key, Value]):
    """Like functools.lru_cache, bounded by bytes instead of entries.

    The newest value is always kept, also if it is too large for the others to stay.
    """

    def __init__(self, make: Callable[[Key], Value], num_bytes: Callable[[Key, Value], int], max_bytes: int):
        """make: computes a value. num_bytes: about what it takes, with its key."""
        self._make, self._num_bytes, self._max_bytes = make, num_bytes, max_bytes
        self._values: OrderedDict[Key, tuple[Value, int]] = OrderedDict()  # the least recently used first
        self._total = 0
        self._last: tuple[Key, Value] | None = None

    def get(self, key: Key) -> Value:
        """The key's value. Raises what `make` raises."""
        # Requests of a batch mostly share one key, and the hash of a large key takes long.
        if self._last is not None and self._last[0] is key:
            return self._last[1]
        if key in self._values:
            self._values.move_to_end(key)
            value = self._values[key][0]
        else:
            value = self._make(key)
            size = self._num_bytes(key, value)
            self._values[key] = value, size
            self._total += size
            while self._total > self._max_bytes and len(self._values) > 1:
                self._total -= self._values.popitem(last=False)[1][1]
        self._last = key, value
        return value

    def drop(self, key: Key) -> None:
        """Forget a key's value, if there is one."""
        self._total -= self._values.pop(key, (None, 0))[1]
        self._last = None
