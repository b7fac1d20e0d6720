"""FreeBlocks: the queue of a BlockManager's free blocks."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex


class FreeBlocks(deque):
    """Distinct block ids, first in, first out, of which one may also leave from the middle in O(1).

    Such an id only counts as gone. It stays in the deque until it gets to the front, or until most of the ids in the
    deque are gone, which makes the deque anew.
    """

    def __init__(self, block_ids: Iterable[int] = ()):
        super().__init__(block_ids)
        self._num_gone: Counter[int] = Counter()  # of each id: how many of its entries, the first ones, are gone
        self._length = super().__len__()

    def append(self, block_id: int) -> None:
        super().append(block_id)
        self._length += 1

    def popleft(self) -> int:
        block_id = super().popleft()
        while self._num_gone[block_id]:
            self._num_gone[block_id] -= 1
            block_id = super().popleft()
        self._length -= 1
        return block_id

    def remove(self, block_id: int) -> None:
        """Take out an id, which must be there."""
        self._num_gone[block_id] += 1
        self._length -= 1
        if super().__len__() > 2 * self._length + 64:
            left = list(self)
            self.clear()
            self.__init__(left)  # type: ignore[misc]

    def __len__(self) -> int:
        return self._length

    def __bool__(self) -> bool:  # Python 3.10's deque has its own, which counts the gone ids too
        return self._length > 0

    def __iter__(self) -> Iterator[int]:
        num_gone = self._num_gone.copy()
        for block_id in super().__iter__():
            if num_gone[block_id]:
                num_gone[block_id] -= 1
            else:
                yield block_id

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        return list(self)[index]

    def __contains__(self, block_id: object) -> bool:
        return block_id in list(self)
