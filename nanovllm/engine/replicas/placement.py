"""Placement: which replica completes which sequence."""

import sys
from collections import OrderedDict, deque
from collections.abc import Iterable
from itertools import chain

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.features.images.image_sequence import ImageSequence
from nanovllm.engine.sequence import Sequence

# A replica has at most this many times max_num_seqs sequences: a batch that runs, and one that waits.
BATCHES_GIVEN = 2
# To compute a beginning on one more replica counts this many times its tokens: others that share it often follow, and
# go there too. Replicas become as unequal for it, at most, which is made up for at the end.
BEGINNING_WEIGHT = 8


class Lane:
    """One replica, as the caller sees it.

    Attributes:
        queue: sequences that it is to get, as soon as it has few.
        given: {id: sequence} of those that it has.
        load: tokens that it has to compute for both, at most.
        num_image_bytes: of the images of `given`, which it keeps until their sequences end.
        known: hashes of blocks that it has probably in its prefix cache, those used last at the end.
        num_given: sequences that it has been sent; num_received: how many of them it knew of when it was last heard.
        num_waiting, num_movable: of these, how many had not begun, and how many of those it would give back.
        is_asked: it has been asked for some, and has not answered.
    """

    def __init__(self) -> None:
        self.queue: deque[Sequence] = deque()
        self.given: dict[int, Sequence] = {}
        self.load = self.num_image_bytes = 0
        self.known: OrderedDict[int, None] = OrderedDict()
        self.num_given = self.num_received = self.num_waiting = self.num_movable = 0
        self.is_asked = False


class Placement:
    """Places each sequence where the tokens to be computed, those placed before it and its own, are fewest. The tokens
    of a beginning that a replica knows cost nothing there, and those that only another one knows count several times.
    So sequences that share a beginning stay together, until their replica has much more to do than another.

    A replica without waiting work takes some from another: first what has not been sent, then what the other has not
    begun, half of it. A sequence is asked back once at most, so that none is sent to and fro.

    Attributes:
        lanes: one for each replica.
        moved: ids of the sequences that were asked back.
    """

    def __init__(
        self,
        num_replicas: int,
        max_num_seqs: int,
        max_seq_len: int,
        block_size: int,
        num_blocks: int,
        shares: bool,
        most_image_bytes: int = sys.maxsize,
    ):
        """
        Args:
            max_num_seqs, num_blocks: of a replica.
            shares: whether it has a prefix cache.
            most_image_bytes: of a replica, which gets no further images beyond them. One that has none gets some,
                whatever their size.
        """
        self.lanes = [Lane() for _ in range(num_replicas)]
        self.moved: set[int] = set()
        self._max_num_seqs, self._max_seq_len = max_num_seqs, max_seq_len
        self._block_size, self._num_blocks, self._shares = block_size, num_blocks, shares
        self._most_image_bytes = most_image_bytes
        self._places: dict[int, tuple[int, int]] = {}  # id -> its lane, and its cost there

    def add(self, seq: Sequence) -> None:
        seq.block_size = self._block_size
        hashes = self._hashes(seq)
        costs = [self._cost(seq, lane, hashes) for lane in self.lanes]
        # What is not known here, and known elsewhere, is the difference to the least cost.
        weighed = [cost + (BEGINNING_WEIGHT - 1) * (cost - min(costs)) for cost in costs]
        _, i = min((lane.load + cost, i) for i, (lane, cost) in enumerate(zip(self.lanes, weighed, strict=True)))
        self._put(seq, i, hashes)

    def take(self, i: int) -> list[Sequence]:
        """What replica i is to be sent now."""
        lane, seqs = self.lanes[i], list[Sequence]()
        while lane.queue and len(lane.given) < BATCHES_GIVEN * self._max_num_seqs:
            size = _image_bytes(lane.queue[0])
            if size and lane.num_image_bytes and lane.num_image_bytes + size > self._most_image_bytes:
                break
            seq = lane.queue.popleft()
            lane.given[seq.seq_id] = seq
            lane.num_image_bytes += size
            seqs.append(seq)
        lane.num_given += len(seqs)
        return seqs

    def remove(self, seq: Sequence) -> None:
        """It has ended. Harmless when called again."""
        place = self._places.pop(seq.seq_id, None)
        if place is None:
            return
        lane = self.lanes[place[0]]
        lane.load -= place[1]
        if lane.given.pop(seq.seq_id, None) is None:
            lane.queue.remove(seq)
        else:
            lane.num_image_bytes -= _image_bytes(seq)
        self.moved.discard(seq.seq_id)

    def lane_of(self, seq: Sequence) -> int:
        return self._places[seq.seq_id][0]

    def forget_prefixes(self) -> None:
        """The prefix caches are cleared."""
        for lane in self.lanes:
            lane.known.clear()

    # -- so that none is idle ----------------------------------------------------------------------------------------

    def report(self, i: int, num_received: int, num_waiting: int, num_movable: int) -> None:
        """What replica i has said of itself."""
        lane = self.lanes[i]
        lane.num_received, lane.num_waiting, lane.num_movable = num_received, num_waiting, num_movable

    def balance(self) -> list[tuple[int, int]]:
        """Move work that has not been sent to replicas that have room. Returns (replica, how many sequences) that
        others are to be asked for."""
        asked: list[tuple[int, int]] = []
        for i in self._hungry():
            if self._move_queued(i):
                continue
            donors = [lane for lane in self.lanes if lane.num_movable and not lane.is_asked]
            if not donors or any(lane.is_asked for lane in self.lanes):
                break  # What is under way may do for this one.
            donor = max(donors, key=lambda lane: lane.num_movable)
            donor.is_asked = True
            asked.append((self.lanes.index(donor), (donor.num_movable + 1) // 2))
        return asked

    def take_back(self, i: int, ids: Iterable[int]) -> None:
        """Replica i has given these back."""
        lane = self.lanes[i]
        lane.is_asked, lane.num_movable = False, 0
        hungry = self._hungry() or [k for k in range(len(self.lanes)) if k != i]
        for seq_id in ids:
            seq = lane.given.pop(seq_id, None)
            if seq is None:  # dropped meanwhile
                continue
            lane.load -= self._places.pop(seq_id)[1]
            lane.num_image_bytes -= _image_bytes(seq)
            self.moved.add(seq_id)
            self._put(seq, min(hungry, key=lambda k: self.lanes[k].load), self._hashes(seq))

    def _hungry(self) -> list[int]:
        """Replicas that could begin more than they have, those with the least work first."""
        found = [
            i
            for i, lane in enumerate(self.lanes)
            if not (lane.queue or lane.num_waiting)
            and lane.num_received == lane.num_given
            and len(lane.given) < self._max_num_seqs
        ]
        return sorted(found, key=lambda i: self.lanes[i].load)

    def _move_queued(self, i: int) -> bool:
        """Move work from the longest queue to lane i, up to half of the difference. Returns whether there was any."""
        lane = self.lanes[i]
        donor = max(self.lanes, key=lambda each: each.load if each.queue else -1)
        while donor.queue:
            seq = donor.queue[-1]
            hashes = self._hashes(seq)
            if lane.queue and lane.load + self._cost(seq, lane, hashes) > donor.load - self._places[seq.seq_id][1]:
                break
            donor.queue.pop()
            donor.load -= self._places.pop(seq.seq_id)[1]
            self._put(seq, i, hashes)
        return bool(lane.queue)

    # -- costs -------------------------------------------------------------------------------------------------------

    def _put(self, seq: Sequence, i: int, hashes: list[int]) -> None:
        lane = self.lanes[i]
        cost = self._cost(seq, lane, hashes)
        self._places[seq.seq_id] = i, cost
        lane.load += cost
        lane.queue.append(seq)
        for each in hashes:
            lane.known[each] = None
            lane.known.move_to_end(each)
        while len(lane.known) > self._num_blocks:
            lane.known.popitem(last=False)

    def _cost(self, seq: Sequence, lane: Lane, hashes: list[int]) -> int:
        """Tokens that the replica would compute for the sequence, at most."""
        num_known = next((i for i, each in enumerate(hashes) if each not in lane.known), len(hashes))
        num_tokens = min(seq.num_prompt_tokens + seq.max_tokens, self._max_seq_len)
        return num_tokens - num_known * self._block_size

    def _hashes(self, seq: Sequence) -> list[int]:
        """Of the prompt's blocks that the prefix cache may share, as it knows them: with what images are in them. The
        last token is always computed."""
        if not self._shares:
            return []
        for i in range(len(seq.block_hashes), (seq.num_prompt_tokens - 1) // self._block_size):
            last = seq.block_hashes[-1] if seq.block_hashes else -1
            seq.block_hashes.append(BlockManager.compute_hash(seq.block(i), last))
        return seq.block_hashes

    def all_given(self) -> Iterable[Sequence]:
        return chain.from_iterable(lane.given.values() for lane in self.lanes)


def _image_bytes(seq: Sequence) -> int:
    """Of its prompt's images, which samples that travel together share: at most."""
    return seq.images.num_bytes if isinstance(seq, ImageSequence) else 0
