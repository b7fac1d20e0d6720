"""BlockManager: which sequences own each block of the paged KV cache, and the prefix cache."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass
from itertools import count

import numpy as np
import xxhash

from nanovllm.engine.places import Place, Places
from nanovllm.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Block:
    """`block_size` consecutive token slots of the KV cache."""

    block_id: int  # its index in the cache
    ref_count: int = 0  # number of block tables that contain it; 0 = free
    hash: int = -1  # of all tokens up to its end; -1 if it is not full yet, or forgotten
    token_ids: AbstractSequence[int] = ()  # whose keys and values it holds; empty without a hash
    prefix_id: int = 0  # content_id of the block before it; 0 for a first block
    # Stands for (prefix_id, token_ids): blocks with the same content share it. A hit must match both, so a hash
    # collision, here or in a block before, costs a miss and never a wrong answer.
    content_id: int = 0

    def holds(self, token_ids: AbstractSequence[int], prefix_id: int) -> bool:
        return self.prefix_id == prefix_id and self.token_ids == token_ids

    def update(self, hash: int, token_ids: AbstractSequence[int]) -> None:
        """Mark the block as full, with this hash and these tokens."""
        self.hash = hash
        self.token_ids = token_ids

    def reset(self) -> None:
        """Hand the block to a new owner: one reference, nothing known of its content."""
        self.ref_count = 1
        self.hash = -1
        self.token_ids = ()


class BlockManager:
    """Hands out the KV cache's blocks, shares those with equal prefixes, takes them back.

    `free_block_ids` (first in, first out) and `used_block_ids` partition all ids. A freed block keeps its hash, and can
    be found until it is reused. Every operation is O(1) a block: an OrderedDict drops a key from its middle in O(1).
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, places: Places | None = None
    ):
        """places: in the model's other stores, if there are some. A sequence gets a place and gives it back with its
        blocks."""
        self.places = places
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.used_block_ids: set[int] = set()
        self._content_ids = count(1)

    @staticmethod
    def compute_hash(token_ids: AbstractSequence[int], prefix: int = -1) -> int:
        """xxh64 of the previous block's hash (8 bytes, little endian; none if prefix is -1) and the tokens (8 bytes
        each)."""
        h = xxhash.xxh64()
        if prefix != -1:
            h.update(prefix.to_bytes(8, "little"))
        h.update(np.array(token_ids, np.int64).tobytes())
        return h.intdigest()

    def can_allocate(self, seq: Sequence, reserve: int = 0) -> bool:
        """Whether there are blocks for all of the sequence's tokens, with `reserve` blocks left over."""
        if self.places is not None and not self.places.can_allocate():
            return False
        num_free, num_blocks = len(self.free_block_ids) - reserve, seq.num_blocks
        # Most answers do not depend on how many blocks are shared, and need no look at the prefix cache.
        if num_blocks <= num_free:
            return True
        if num_blocks - self._max_shared_blocks(seq) > num_free:
            return False
        shared = self._find_shared_blocks(seq)
        num_shared_free = sum(self.blocks[i].ref_count == 0 for i in shared)  # They count as free until then.
        return num_blocks - len(shared) + num_shared_free <= num_free

    def allocate(self, seq: Sequence) -> None:
        """Fill the sequence's block table, and set num_cached_tokens to what the prefix cache gave: never all tokens,
        because the logits of the last one are needed. Call can_allocate first."""
        shared = self._find_shared_blocks(seq) if len(seq.tokens) > self.block_size else []
        if self.places is not None:
            seq.place = self._allocate_place(self.places, seq, shared)
        # Shared blocks first: the next free block may be one of them.
        for block_id in shared:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                del self.free_block_ids[block_id]
                self.used_block_ids.add(block_id)
            block.ref_count += 1
        seq.block_table = shared + [self._take_free_block() for _ in range(seq.num_blocks - len(shared))]
        seq.num_cached_tokens = len(shared) * self.block_size
        if seq.num_shared_tokens < 0:
            seq.num_shared_tokens = seq.num_cached_tokens

    def _allocate_place(self, places: Places, seq: Sequence, shared: list[int]) -> Place:
        num_known = len(self._find_known_blocks(seq)) * self.block_size
        content_id = self.blocks[shared[-1]].content_id if shared else 0
        return places.allocate(len(shared) * self.block_size, content_id, num_known)

    def deallocate(self, seq: Sequence) -> None:
        """Drop the sequence's references. Its last block is freed, and so reused, first: the first one is the likeliest
        to be shared again."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids[block_id] = None
        if self.places is not None and seq.place is not None:
            self.places.deallocate(seq.place)
            seq.place = None
        seq.block_table = []
        seq.num_cached_tokens = 0
        seq.num_scheduled_tokens = 0

    def can_append(self, seq: Sequence) -> bool:
        """Whether there is a slot for the sequence's last token, or a free block for it."""
        return seq.num_blocks <= len(seq.block_table) or bool(self.free_block_ids)

    def may_append(self, seq: Sequence) -> None:
        """Give the sequence a block if its last token needs one. Call can_append first."""
        if seq.num_blocks > len(seq.block_table):
            seq.block_table.append(self._take_free_block())

    def extend(self, seq: Sequence, num_tokens: int) -> int:
        """Give the sequence blocks for num_tokens tokens, or for as many as there are free blocks. Returns for how many
        of them it has blocks."""
        while num_tokens > len(seq.block_table) * self.block_size and self.free_block_ids:
            seq.block_table.append(self._take_free_block())
        return min(num_tokens, len(seq.block_table) * self.block_size)

    def hash_blocks(self, seq: Sequence, num_cached_before: int) -> None:
        """Let others find the blocks that became full when the cached tokens grew from `num_cached_before` to
        seq.num_cached_tokens."""
        first, end = num_cached_before // self.block_size, seq.num_cached_tokens // self.block_size
        if not self.enable_prefix_caching or first == end:
            return
        self._extend_hashes(seq, end)
        prefix_id = self.blocks[seq.block_table[first - 1]].content_id if first else 0
        for i in range(first, end):
            hash, tokens = seq.block_hashes[i], seq.block(i)
            block = self.blocks[seq.block_table[i]]
            block.update(hash, tokens)
            block.prefix_id = prefix_id
            # If two sequences have computed the same block side by side, the first one stays findable. A block with
            # this hash and other content is replaced: its prefix is no longer known, or the hashes collide.
            known = self.blocks[self.hash_to_block_id.setdefault(hash, block.block_id)]
            if known is not block and known.holds(tokens, prefix_id):
                block.content_id = known.content_id
            else:
                if self.places is not None and known is not block:
                    self.places.forget(known.content_id)
                block.content_id = next(self._content_ids)
                self.hash_to_block_id[hash] = block.block_id
            prefix_id = block.content_id
        if self.places is not None and seq.place is not None and seq.place.snapshot >= 0:
            last = seq.block_table[seq.place.snapshot_end // self.block_size - 1]
            self.places.keep_snapshot(seq.place, self.blocks[last].content_id)

    def hashes_scheduled(self, seq: Sequence) -> list[int]:
        """Hashes of the blocks that the sequence's scheduled tokens fill."""
        if not self.enable_prefix_caching:
            return []
        first = seq.num_cached_tokens // self.block_size
        end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.block_size
        self._extend_hashes(seq, end)
        return seq.block_hashes[first:end]

    def num_findable_tokens(self, seq: Sequence) -> int:
        """Tokens that `allocate` would find in the prefix cache."""
        return len(self._find_shared_blocks(seq)) * self.block_size

    def is_worth_waiting(self, seq: Sequence, scheduled: Mapping[int, Sequence]) -> bool:
        """Whether the first block that the prefix cache lacks is among `scheduled`, hashes of blocks that this step
        computes, and for whom. After this step the sequence can share it instead of computing it again."""
        num_shared, max_shared = len(self._find_shared_blocks(seq)), self._max_shared_blocks(seq)
        if num_shared == max_shared or self._hash(seq, num_shared) not in scheduled:
            return False
        if self.places is None:
            return True
        # It also needs the state after some of those blocks.
        end = num_shared
        while end < max_shared and self._hash(seq, end) in scheduled:
            other = scheduled[self._hash(seq, end)]
            end += 1
        return self.places.request_snapshot(other, num_shared * self.block_size, end * self.block_size)

    def request_usual_snapshots(self, seqs: Iterable[Sequence]) -> None:
        """Have the step that computes these sequences take snapshots of their states for later ones, in addition to
        those that others wait for."""
        if self.enable_prefix_caching and self.places is not None:
            for seq in seqs:
                self.places.request_usual_snapshot(seq)

    def reset_prefix_cache(self) -> None:
        """Forget every known prefix; blocks in use stay with their owners."""
        self.hash_to_block_id.clear()
        if self.places is not None:
            self.places.forget_all()
        for block in self.blocks:
            block.update(-1, ())

    def forget_blocks(self, seq: Sequence) -> None:
        """Take the free blocks that hold a sequence's tokens out of the prefix cache."""
        for hash in seq.block_hashes:
            block_id = self.hash_to_block_id.get(hash)
            if block_id is not None and self.places is not None:
                self.places.forget(self.blocks[block_id].content_id)
            if block_id is not None and self.blocks[block_id].ref_count == 0:
                del self.hash_to_block_id[hash]
                self.blocks[block_id].update(-1, ())

    def _max_shared_blocks(self, seq: Sequence) -> int:
        """Its full blocks before the first token whose logits are needed. Those of its last token always are."""
        if not self.enable_prefix_caching:
            return 0
        return min(seq.num_tokens - 1, seq.first_needed_logits) // self.block_size

    def _find_shared_blocks(self, seq: Sequence) -> list[int]:
        """Ids of the blocks with its tokens in the prefix cache that it need not compute."""
        found = self._find_known_blocks(seq)
        if self.places is None:
            return found
        return found[: self.places.num_reusable_blocks([self.blocks[i].content_id for i in found])]

    def _find_known_blocks(self, seq: Sequence) -> list[int]:
        """Ids of the blocks with its tokens in the prefix cache, up to the first miss."""
        found = []
        prefix_id = 0
        for i in range(self._max_shared_blocks(seq)):
            self._extend_hashes(seq, i + 1)
            block_id = self.hash_to_block_id.get(seq.block_hashes[i])
            if block_id is None or not self.blocks[block_id].holds(seq.block(i), prefix_id):
                break
            found.append(block_id)
            prefix_id = self.blocks[block_id].content_id
        return found

    def _hash(self, seq: Sequence, i: int) -> int:
        """Of block i."""
        self._extend_hashes(seq, i + 1)
        return seq.block_hashes[i]

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        """Compute the hashes of the first num_blocks blocks. The sequence keeps them, because it is looked up at every
        step while there is no room for it."""
        hashes = seq.block_hashes
        while len(hashes) < num_blocks:
            prefix = hashes[-1] if hashes else -1
            hashes.append(self.compute_hash(seq.block(len(hashes)), prefix))

    def _take_free_block(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        if self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
            if self.places is not None:
                self.places.forget(block.content_id)
        block.reset()
        self.used_block_ids.add(block_id)
        return block_id
