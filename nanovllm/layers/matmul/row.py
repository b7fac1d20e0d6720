"""Row: what was measured for a few numbers of tokens, for all numbers of tokens."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class Row(Generic[T]):
    """Choices by the number of tokens: a table's `Choice`s, or candidates with their constants."""

    def __init__(self, buckets: Mapping[int, Iterable[T]]):
        """buckets: the largest number of tokens -> choices, the best first."""
        self.bounds = sorted(buckets)
        self.choices = [tuple(buckets[bound]) for bound in self.bounds]
        self._limits = self.bounds[:-1]  # The last choices are for all larger numbers.

    def __getitem__(self, num_tokens: int) -> tuple[T, ...]:
        return self.choices[bisect_left(self._limits, num_tokens)]
