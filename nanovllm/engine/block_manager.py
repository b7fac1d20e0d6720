"""BlockManager: which sequences own each block of the paged KV cache, and which blocks equal beginnings share."""

from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import xxhash

from nanovllm.engine.cells import NoCells
from nanovllm.engine.free_blocks import FreeBlocks
from nanovllm.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Block:
    """`block_size` consecutive token slots of the KV cache."""

    block_id: int  # its index in the cache
    ref_count: int = 0  # number of block tables that contain it; 0 = free
    hash: int = -1  # of all tokens up to its end; -1 if it is not full yet, or forgotten
    token_ids: AbstractSequence[int] = field(default_factory=list)  # whose keys and values it holds, if it has a hash
    prefix_id: int = 0  # content_id of the block before it; 0 for a first block
    # Stands for (prefix_id, token_ids): blocks with equal content share it. A hit must match both, so a hash collision,
    # here or in an earlier block, costs a miss and never a wrong answer.
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
        self.token_ids = []


class BlockManager:
    """Hands out the KV cache's blocks, shares those with equal prefixes, takes them back.

    `free_block_ids` (first in, first out) and `used_block_ids` partition all ids. A freed block keeps its hash, and can
    be found until it is reused. Every operation is O(1) a block. What the prefix cache can do beyond that is in
    `prefix_cache`.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True, cells: NoCells | None = None
    ):
        """cells: in the model's other stores, if there are some. A sequence gets a cell and gives it back with its
        blocks."""
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.cells = cells or NoCells()
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids = FreeBlocks(range(num_blocks))
        self.used_block_ids: set[int] = set()
        self.lost_content_ids: list[int] = []  # of blocks that were reused since the cells were last asked
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

    def _allocate_block(self) -> int:
        """The block that has been free for the longest. What it holds cannot be found any more."""
        block_id = self.free_block_ids.popleft()
        block = self.blocks[block_id]
        if self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
            self.lost_content_ids.append(block.content_id)
        block.reset()
        self.used_block_ids.add(block_id)
        return block_id

    def _deallocate_block(self, block_id: int) -> None:
        self.used_block_ids.remove(block_id)
        self.free_block_ids.append(block_id)

    # -- a sequence's blocks -------------------------------------------------------------------------------------------

    def can_allocate(self, seq: Sequence, reserve: int = 0) -> int:
        """How many blocks the sequence would share, if there are blocks for all of its tokens and `reserve` are left
        over; else -1."""
        num_free, num_blocks = len(self.blocks) - len(self.used_block_ids) - reserve, seq.num_blocks
        if num_blocks > num_free and num_blocks - self.max_shared_blocks(seq) > num_free:
            return -1
        if not self.cells.can_allocate():
            return -1
        shared = self.shared_blocks(seq) if seq.num_tokens > self.block_size else []
        num_in_use = sum(self.blocks[i].ref_count > 0 for i in shared)  # The others count as free until then.
        return len(shared) if num_blocks - num_in_use <= num_free else -1

    def allocate(self, seq: Sequence, num_cached_blocks: int) -> None:
        """Fill the sequence's block table, and set num_cached_tokens to what the prefix cache gave: never all tokens,
        because the logits of the last one are needed. num_cached_blocks: as can_allocate said."""
        shared = [self.hash_to_block_id[self.block_hash(seq, i)] for i in range(num_cached_blocks)]
        self.cells.begin(seq, self, shared)
        # Shared blocks first: the next free block may be one of them.
        for block_id in shared:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                self.free_block_ids.remove(block_id)
                self.used_block_ids.add(block_id)
            block.ref_count += 1
        seq.block_table = shared + [self._allocate_block() for _ in range(seq.num_blocks - len(shared))]
        seq.num_cached_tokens = len(shared) * self.block_size
        if seq.completion.num_shared_tokens < 0:
            seq.completion.num_shared_tokens = seq.num_cached_tokens

    def deallocate(self, seq: Sequence) -> None:
        """Drop the sequence's references. Its last block is freed, and so reused, first: the first one is the likeliest
        to be shared again."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._deallocate_block(block_id)
        self.cells.end(seq)
        seq.block_table = []
        seq.num_cached_tokens = seq.num_scheduled_tokens = 0

    def can_append(self, seq: Sequence) -> bool:
        """Whether there is a slot for the sequence's last token, or a free block for it."""
        return seq.num_blocks <= len(seq.block_table) or bool(self.free_block_ids)

    def may_append(self, seq: Sequence) -> None:
        """Give the sequence a block if its last token needs one. Call can_append first."""
        if seq.num_blocks > len(seq.block_table):
            seq.block_table.append(self._allocate_block())

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        """Give the sequence blocks for num_tokens tokens, or for as many as there are free blocks."""
        while num_tokens > len(seq.block_table) * self.block_size and self.free_block_ids:
            seq.block_table.append(self._allocate_block())

    # -- equal beginnings ----------------------------------------------------------------------------------------------

    def hash_blocks(self, seq: Sequence) -> None:
        """Let others find the blocks that the scheduled tokens fill. Their keys and values must have been launched."""
        first = seq.num_cached_tokens // self.block_size
        end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.block_size
        if not self.enable_prefix_caching or first == end:
            return
        prefix_id = self.blocks[seq.block_table[first - 1]].content_id if first else 0
        for i in range(first, end):
            hash, token_ids = self.block_hash(seq, i), seq.block(i)
            block = self.blocks[seq.block_table[i]]
            block.update(hash, token_ids)
            block.prefix_id = prefix_id
            # If two sequences have each computed this content, the first copy stays findable. A block with this hash
            # but other content is replaced: its prefix is no longer known, or the hashes collide.
            known = self.blocks[self.hash_to_block_id.setdefault(hash, block.block_id)]
            if known is not block and known.holds(token_ids, prefix_id):
                block.content_id = known.content_id
            else:
                if known is not block:
                    self.lost_content_ids.append(known.content_id)
                block.content_id = next(self._content_ids)
                self.hash_to_block_id[hash] = block.block_id
            prefix_id = block.content_id
        self.cells.keep(seq, self)

    def max_shared_blocks(self, seq: Sequence) -> int:
        """Its full blocks before the first token whose logits are needed. Those of its last token always are."""
        if not self.enable_prefix_caching:
            return 0
        return min(seq.num_tokens - 1, seq.completion.first_needed_logits) // self.block_size

    def shared_blocks(self, seq: Sequence) -> list[int]:
        """Ids of the blocks with its tokens in the cache that it need not compute."""
        return self.cells.reusable(self, self.known_blocks(seq))

    def known_blocks(self, seq: Sequence) -> list[int]:
        """Ids of the blocks with its tokens in the cache, up to the first miss."""
        found, prefix_id = [], 0
        for i in range(self.max_shared_blocks(seq)):
            block_id = self.hash_to_block_id.get(self.block_hash(seq, i))
            if block_id is None or not self.blocks[block_id].holds(seq.block(i), prefix_id):
                break
            found.append(block_id)
            prefix_id = self.blocks[block_id].content_id
        return found

    def block_hash(self, seq: Sequence, i: int) -> int:
        """Of full block i. The sequence keeps it, because it is looked up at every step while there is no room."""
        hashes = seq.block_hashes
        while len(hashes) <= i:
            hashes.append(self.compute_hash(seq.block(len(hashes)), hashes[-1] if hashes else -1))
        return hashes[i]
