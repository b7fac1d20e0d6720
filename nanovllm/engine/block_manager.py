"""BlockManager: which block of the paged KV cache belongs to whom, and the prefix cache over them."""

from array import array
from collections import OrderedDict
from collections.abc import Container
from collections.abc import Sequence as AbstractSequence
from itertools import count

import numpy as np
import xxhash

from nanovllm.engine.sequence import Sequence


class Block:
    """`block_size` consecutive token slots of the KV cache.

    Attributes:
        block_id: its index in the cache; slots block_id * block_size ... + block_size - 1.
        ref_count: block tables that name it; 0 = free.
        hash: chain hash of the full prefix that ends with this block, -1 = open or unhashed.
        token_ids: the tokens whose keys and values it holds, once hashed.
        prefix_id: the content_id of the block before it, 0 for a first block.
        content_id: names one (prefix_id, token_ids): blocks that hold the same content share it. A hit must
            match token_ids and prefix_id, so a hash collision, be it here or further up the chain, costs a
            miss and never a wrong answer.
    """

    __slots__ = ("block_id", "content_id", "hash", "prefix_id", "ref_count", "token_ids")

    def __init__(self, block_id: int):
        self.block_id = block_id
        self.ref_count = 0
        self.hash = -1
        self.token_ids: AbstractSequence[int] = ()
        self.prefix_id = 0
        self.content_id = 0

    def holds(self, token_ids: AbstractSequence[int], prefix_id: int) -> bool:
        """Whether it holds these tokens after that prefix."""
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

    `free_block_ids` (first in, first out) and `used_block_ids` are at all times a partition of all ids. A
    freed block keeps its hash, so that it can be found again until it is reused. Every operation is O(1) a
    block: the free list is a linked hash map, which gives up a block in its middle as fast as its first.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True):
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.hash_to_block_id: dict[int, int] = {}
        self.free_block_ids: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.used_block_ids: set[int] = set()
        self._content_ids = count(1)

    @staticmethod
    def compute_hash(token_ids: AbstractSequence[int], prefix: int = -1) -> int:
        """xxh64 of the previous block's hash (8 bytes, little endian; nothing where prefix is -1) and the
        tokens (8 bytes each): equal hashes mean equal prefixes."""
        h = xxhash.xxh64()
        if prefix != -1:
            h.update(prefix.to_bytes(8, "little"))
        h.update(np.array(token_ids, np.int64).tobytes())
        return h.intdigest()

    def can_allocate(self, seq: Sequence, reserve: int = 0) -> bool:
        """Whether the free blocks suffice for all of the sequence's tokens, shared blocks discounted, and leave that
        many free."""
        num_free = len(self.free_block_ids) - reserve
        # Most answers need no look at the prefix cache: there is room even if no block is shared, or none even if every
        # block is that may be.
        if seq.num_blocks <= num_free:
            return True
        if seq.num_blocks - self._max_shared_blocks(seq) > num_free:
            return False
        shared = self._find_shared_blocks(seq)
        num_taken_back = sum(self.blocks[i].ref_count == 0 for i in shared)
        return seq.num_blocks - len(shared) + num_taken_back <= num_free

    def allocate(self, seq: Sequence) -> None:
        """Fill the sequence's block table and set num_cached_tokens to what the prefix cache gave.

        At least one token is always left to compute, also where every block of the prompt is known: the
        logits of the last token are needed. Call can_allocate first.
        """
        shared = self._find_shared_blocks(seq)
        # Shared blocks first: a fresh one is the block freed longest ago, which may be one of them.
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

    def deallocate(self, seq: Sequence) -> None:
        """Drop the sequence's references. Last block first, so that of a freed sequence the front, which
        others are likeliest to ask for, is reused last."""
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self.used_block_ids.remove(block_id)
                self.free_block_ids[block_id] = None
        seq.block_table = []
        seq.num_cached_tokens = 0
        seq.num_scheduled_tokens = 0

    def can_append(self, seq: Sequence) -> bool:
        """Whether the slot for the sequence's last token exists or can be made."""
        return seq.num_blocks <= len(seq.block_table) or bool(self.free_block_ids)

    def may_append(self, seq: Sequence) -> None:
        """Give the sequence a fresh block where its last token opens one. Call can_append first."""
        if seq.num_blocks > len(seq.block_table):
            seq.block_table.append(self._take_free_block())

    def hash_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Make the blocks findable that became full when the cached tokens grew from `num_tokens` to
        seq.num_cached_tokens. Only now: before, another prompt would have read what was not yet written."""
        if not self.enable_prefix_caching:
            return
        first, end = num_tokens // self.block_size, seq.num_cached_tokens // self.block_size
        if first == end:
            return
        self._extend_hashes(seq, end)
        prefix_id = self.blocks[seq.block_table[first - 1]].content_id if first else 0
        for i in range(first, end):
            hash, tokens = seq.block_hashes[i], self._block_tokens(seq, i)
            block = self.blocks[seq.block_table[i]]
            block.update(hash, tokens)
            block.prefix_id = prefix_id
            # Where two sequences computed the same block side by side, the first stays the findable one. One that
            # holds something else gives way: its prefix is no longer known, or the hashes collide.
            known = self.blocks[self.hash_to_block_id.setdefault(hash, block.block_id)]
            if known is not block and known.holds(tokens, prefix_id):
                block.content_id = known.content_id
            else:
                block.content_id = next(self._content_ids)
                self.hash_to_block_id[hash] = block.block_id
            prefix_id = block.content_id

    def hashes_scheduled(self, seq: Sequence) -> list[int]:
        """Hashes of the blocks that become full with the tokens that are scheduled for the sequence."""
        if not self.enable_prefix_caching:
            return []
        first = seq.num_cached_tokens // self.block_size
        end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.block_size
        self._extend_hashes(seq, end)
        return seq.block_hashes[first:end]

    def num_findable_tokens(self, seq: Sequence) -> int:
        """Tokens that allocate would find in the prefix cache for a sequence without blocks."""
        return len(self._find_shared_blocks(seq)) * self.block_size

    def is_worth_waiting(self, seq: Sequence, scheduled: Container[int]) -> bool:
        """Whether the first block that the cache cannot give the sequence is among the hashes that others have
        scheduled: after this step the sequence can share it instead of computing it again."""
        if not scheduled:
            return False
        num_shared = len(self._find_shared_blocks(seq))
        return num_shared < self._max_shared_blocks(seq) and seq.block_hashes[num_shared] in scheduled

    def reset_prefix_cache(self) -> None:
        """Forget every known prefix; blocks in use stay with their owners."""
        self.hash_to_block_id.clear()
        for block in self.blocks:
            block.update(-1, ())

    def forget_blocks(self, seq: Sequence) -> None:
        """Let nobody find the blocks that hold what a sequence began with, unless another one uses them."""
        for hash in seq.block_hashes:
            block_id = self.hash_to_block_id.get(hash)
            if block_id is not None and self.blocks[block_id].ref_count == 0:
                del self.hash_to_block_id[hash]
                self.blocks[block_id].update(-1, ())

    def _max_shared_blocks(self, seq: Sequence) -> int:
        if not self.enable_prefix_caching or seq.needs_prompt_logits:
            return 0
        return (seq.num_tokens - 1) // self.block_size

    def _find_shared_blocks(self, seq: Sequence) -> list[int]:
        """Ids of the known blocks from the front; the first miss ends the walk."""
        found = []
        prefix_id = 0
        for i in range(self._max_shared_blocks(seq)):
            self._extend_hashes(seq, i + 1)
            block_id = self.hash_to_block_id.get(seq.block_hashes[i])
            if block_id is None or not self.blocks[block_id].holds(self._block_tokens(seq, i), prefix_id):
                break
            found.append(block_id)
            prefix_id = self.blocks[block_id].content_id
        return found

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        """Compute the chain up to num_blocks full blocks. Kept on the sequence: the head of the waiting queue
        is looked up again at every step that has no room for it."""
        hashes = seq.block_hashes
        while len(hashes) < num_blocks:
            prefix = hashes[-1] if hashes else -1
            hashes.append(self.compute_hash(self._block_tokens(seq, len(hashes)), prefix))

    def _block_tokens(self, seq: Sequence, i: int) -> array:
        return seq.tokens[i * self.block_size : (i + 1) * self.block_size]

    def _take_free_block(self) -> int:
        block_id, _ = self.free_block_ids.popitem(last=False)
        block = self.blocks[block_id]
        if self.hash_to_block_id.get(block.hash) == block_id:
            del self.hash_to_block_id[block.hash]
        block.reset()
        self.used_block_ids.add(block_id)
        return block_id
