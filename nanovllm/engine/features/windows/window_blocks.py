"""WindowBlocks: which sequence has which block of the windowed layers' keys and values, and what it gives back."""

import sys
from dataclasses import dataclass

from nanovllm.engine.admission import RESERVED_SHARE
from nanovllm.engine.cells import KnownBlocks, NoCells
from nanovllm.engine.free_blocks import FreeBlocks
from nanovllm.engine.scheduler import MIN_CHUNK_SHARE
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.stores.window_split import num_blocks_before


@dataclass(slots=True, eq=False)
class WindowTable:
    """A sequence's blocks in the layers with a window, as its block_table is in the others.

    Of a prompt that is computed in chunks it ends with the last chunk that was scheduled.
    """

    blocks: list[int]  # Its passed entries repeat the first one that is held, so that each names a block of its own.
    num_passed: int = 0  # how many of the first blocks it has given back, or never had

    @property
    def held(self) -> list[int]:
        return self.blocks[self.num_passed :]


class WindowBlocks(NoCells):
    """The scheduler's side of `WindowedKVCache`. A block is as long as those of the BlockManager beside it, and a
    sequence gets both at once. But it gives a block of this kind back as soon as no later token sees it.

    What a block holds is known by the content id of the BlockManager's block of the same tokens (`Block.content_id`),
    which stands for all tokens up to its end. A block that was given back keeps it until it is reused. A sequence can
    begin behind a known prefix if, of this kind, the blocks that its next token sees are known too.

    `free_block_ids` (first in, first out) and `used_block_ids` partition all ids.
    """

    def __init__(self, num_blocks: int, window: int, block_size: int):
        """window: the most keys that a token of such a layer sees, its own included."""
        self.num_blocks, self.window, self.block_size = num_blocks, window, block_size
        self.num_before = num_blocks_before(window, block_size)
        self.free_block_ids = FreeBlocks(range(num_blocks))
        self.used_block_ids: set[int] = set()
        self.ref_counts = [0] * num_blocks
        self.content_ids = [0] * num_blocks  # of what each block holds; 0 if nobody can find it
        self.known: dict[int, int] = {}  # content id -> block
        self._step_tokens = sys.maxsize  # that the step being scheduled may prefill

    # -- what a BlockManager asks of any cells -------------------------------------------------------------------------

    def begin_step(self, manager: KnownBlocks, takes_snapshots: bool) -> None:
        for content_id in manager.lost_content_ids:
            self.forget(content_id)
        manager.lost_content_ids.clear()

    def begin(self, seq: Sequence, manager: KnownBlocks, shared: list[int]) -> None:
        first = self._num_passed(len(shared) * self.block_size)
        blocks = [self.known[manager.blocks[i].content_id] for i in shared[first:]]
        for block_id in blocks:  # before fresh ones are taken: the next free block may be one of them
            if self.ref_counts[block_id] == 0:
                self.free_block_ids.remove(block_id)
                self.used_block_ids.add(block_id)
            self.ref_counts[block_id] += 1
        blocks += [self._take() for _ in range(self._num_begun(seq, len(shared)) - len(shared))]
        seq.cell = WindowTable([blocks[0]] * first + blocks, first)

    def end(self, seq: Sequence) -> None:
        if seq.cell is not None:
            for block_id in reversed(seq.cell.held):
                self._drop(block_id)
            seq.cell = None

    def reusable(self, manager: KnownBlocks, block_ids: list[int]) -> list[int]:
        """The longest beginning behind which this kind holds what the next token sees."""
        best = num_held = 0
        for i, block_id in enumerate(block_ids):
            num_held = num_held + 1 if manager.blocks[block_id].content_id in self.known else 0
            if num_held >= min(self.num_before, i + 1):
                best = i + 1
        return block_ids[:best]

    def keep(self, seq: Sequence, manager: KnownBlocks) -> None:
        """Let others find the blocks that the scheduled tokens fill."""
        first = seq.num_cached_tokens // self.block_size
        end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.block_size
        for i in range(first, end):
            content_id, block_id = manager.blocks[seq.block_table[i]].content_id, seq.cell.blocks[i]
            if content_id not in self.known:  # If two have computed it, the first copy stays findable.
                self.known[content_id] = block_id
                self.content_ids[block_id] = content_id

    def forget(self, content_id: int) -> None:
        block_id = self.known.pop(content_id, None)
        if block_id is not None:
            self.content_ids[block_id] = 0

    def forget_all(self) -> None:
        for content_id in list(self.known):
            self.forget(content_id)

    # -- what a WindowedBlockManager asks ------------------------------------------------------------------------------

    def has_room(self, seq: Sequence, num_reserved: int, shared: list[int]) -> bool:
        """Whether a sequence can begin, and blocks are left over for those that run.

        num_reserved: the BlockManager's blocks that stay free for them. shared: content ids of the blocks of the
        prefix that it need not compute.
        """
        num_new = self._num_begun(seq, len(shared)) - len(shared)
        seen = shared[self._num_passed(len(shared) * self.block_size) :]
        num_new += sum(self.ref_counts[self.known[content_id]] == 0 for content_id in seen)
        return num_new <= len(self.free_block_ids) - min(num_reserved, self.num_blocks // RESERVED_SHARE)

    def extend(self, seq: Sequence, num_blocks: int) -> None:
        """Let the sequence's table have num_blocks entries. There must be free blocks for that."""
        blocks = seq.cell.blocks
        blocks += [self._take() for _ in range(num_blocks - len(blocks))]

    def give_back(self, seq: Sequence) -> None:
        """The step that computes the scheduled tokens has been launched: give back what no later token sees. That step
        may still read it. The next owner writes to it in a later step."""
        table = seq.cell
        end = min(self._num_passed(seq.num_cached_tokens + seq.num_scheduled_tokens), len(table.blocks))
        if end <= table.num_passed:
            return
        for block_id in table.blocks[table.num_passed : end]:
            self._drop(block_id)
        held = table.blocks[end:]
        # A new list: whoever has written the old one to the device must write all of it again.
        table.blocks, table.num_passed = [held[0] if held else 0] * end + held, end

    def limit_prefill(self, head: Sequence, budget: int, is_alone: bool) -> int:
        """How many of `budget` tokens the step being scheduled may prefill; 0 if the running sequences should go on,
        and end, before there is room for more than a short chunk.

        head: the first in the queue, which gets blocks for its next chunk if it is between two of them. is_alone:
        whether no sequence runs.
        """
        size, num_free, num_left = self.block_size, len(self.free_block_ids), head.num_tokens - head.num_cached_tokens
        if head.block_table:
            room = (len(head.cell.blocks) + num_free) * size - head.num_cached_tokens
        else:  # What its first token sees may be shared, but free.
            room = (num_free - min(self.num_before, head.num_blocks - 1)) * size
        least = min(num_left, budget // MIN_CHUNK_SHARE, self.num_blocks * size // MIN_CHUNK_SHARE)
        budget = 0 if room < least and not is_alone else max(0, min(budget, room))
        if head.block_table:
            self.extend(head, -(-(head.num_cached_tokens + min(budget, num_left)) // size))
        self._step_tokens = budget
        return budget

    # -- blocks --------------------------------------------------------------------------------------------------------

    def _num_passed(self, num_cached: int) -> int:
        """How many of a sequence's first blocks neither the token after num_cached others nor a later one sees."""
        return max(0, num_cached - self.window + 1) // self.block_size

    def _num_begun(self, seq: Sequence, num_shared: int) -> int:
        """Entries of its table for its first step, behind num_shared blocks."""
        cached = num_shared * self.block_size
        return -(-min(seq.num_tokens, cached + self._step_tokens) // self.block_size)

    def _take(self) -> int:
        """The block that has been free for the longest. What it holds cannot be found any more."""
        block_id = self.free_block_ids.popleft()
        self.forget(self.content_ids[block_id])
        self.ref_counts[block_id] = 1
        self.used_block_ids.add(block_id)
        return block_id

    def _drop(self, block_id: int) -> None:
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            self.used_block_ids.remove(block_id)
            self.free_block_ids.append(block_id)
