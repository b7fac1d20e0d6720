"""Places: which sequence has which place in a store beside the KV cache."""

from abc import ABC, abstractmethod

from nanovllm.engine.sequence import Sequence


class Places(ABC):
    """The scheduler's side of a store (`layers.stores`) beside the paged KV cache: a state of fixed size for each
    sequence, of which there is a limited number.

    BlockManager keeps the places of the KV cache, and asks the others whenever a sequence begins or ends. A sequence
    has a place in all stores or in none. It holds them from its first step to its end, or to its preemption, after
    which its state is computed again.
    """

    @abstractmethod
    def can_allocate(self, seq: Sequence) -> bool:
        """Whether there is a place for a sequence that has none."""

    @abstractmethod
    def allocate(self, seq: Sequence) -> int:
        """Give the sequence a place, and return it. Its state there begins with token num_cached_tokens. Call
        can_allocate first."""

    @abstractmethod
    def deallocate(self, seq: Sequence) -> None:
        """Take the sequence's place back, if it has one. The step in flight may still use it; its next owner writes to
        it in a later step."""

    def num_reusable_tokens(self, seq: Sequence, num_tokens: int) -> int:
        """How many of the sequence's first tokens need not be computed, if the KV cache knows the first num_tokens: the
        longest beginning whose state is known. None, unless the store keeps states of earlier sequences."""
        return 0


class Slots(Places):
    """One slot of a state for each sequence. A prefix's state is not kept."""

    def __init__(self, num_slots: int):
        self._free = list(range(num_slots))
        self._slots: dict[int, int] = {}  # of each sequence, by seq_id

    def can_allocate(self, seq: Sequence) -> bool:
        return bool(self._free)

    def allocate(self, seq: Sequence) -> int:
        self._slots[seq.seq_id] = slot = self._free.pop()
        return slot

    def deallocate(self, seq: Sequence) -> None:
        if seq.seq_id in self._slots:
            self._free.append(self._slots.pop(seq.seq_id))
