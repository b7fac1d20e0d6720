"""Cells: which sequence has which cell in the stores beside the KV cache, and which cells hold snapshots."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from dataclasses import dataclass, field

from nanovllm.engine.cells import KnownBlocks, NoCells
from nanovllm.engine.sequence import Sequence
from nanovllm.kernels.linear_attention.gated_delta import CHUNK


@dataclass(slots=True, eq=False)
class Cell:
    """A sequence's cell.

    A snapshot is its state after `snapshot_end` tokens, which the step being scheduled writes to another cell.
    """

    index: int
    source: int = -1  # the cell of the snapshot that it begins with; -1 for none
    num_reused: int = 0  # the tokens that this snapshot is of
    # Tokens that the KV cache knew when it began. If it had to begin without a state, others may share these tokens.
    num_known: int = 0
    snapshot: int = -1  # cell; -1 for no snapshot
    snapshot_end: int = 0
    lent: list[int] = field(default_factory=list)  # cells for the states after proposed tokens, in their order

    def cells_of_step(self, num_cached: int) -> tuple[int, int, int, int]:
        """A column of `Context.cells` for a prefill that begins after num_cached tokens."""
        first = -1 if num_cached == 0 else self.source if num_cached == self.num_reused else self.index
        return first, self.index, self.snapshot, self.snapshot_end - num_cached if self.snapshot >= 0 else 0

    def copy_of_step(self, num_cached: int) -> tuple[int, int] | None:
        """What a mixed step that begins after num_cached tokens copies first: the snapshot's cell, and its own one. Its
        kernels read only cells that they write to. None: nothing."""
        is_first = self.source >= 0 and num_cached == self.num_reused
        return (self.source, self.index) if is_first else None


class Cells(NoCells):
    """The scheduler's side of the stores (`layers.stores`) beside the paged KV cache: a state of fixed size for each
    sequence. Their number is limited.

    A sequence holds a cell from its first step to its end, or to its preemption, after which its state is computed
    again. The other cells may hold snapshots: states after a known prefix, with which other sequences begin. They read
    the snapshot and write to their own cell, so nothing is copied. When cells are short, the snapshot used longest ago
    is dropped.

    A step that computes proposed tokens (speculation) writes the state after each of them to a cell that the sequence
    has for this step alone. The cell with the state after the last accepted token becomes the sequence's own.

    A snapshot is known by the content id of the block that its prefix ends with (`block_manager.Block`), which stands
    for all tokens up to there.
    """

    def __init__(self, num_cells: int, chunk: int = CHUNK):
        """chunk: a prefill's kernels compute the state once every `chunk` new tokens."""
        self.num_cells = num_cells
        self.chunk = chunk
        self._free = list(range(num_cells))
        self._snapshots: OrderedDict[int, int] = OrderedDict()  # content id -> cell; used longest ago first
        self._sources: set[int] = set()  # cells that the step being scheduled reads
        self._is_open = True  # for snapshots

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    # -- what a Scheduler and its BlockManager call --------------------------------------------------------------------

    def begin_step(self, manager: KnownBlocks, takes_snapshots: bool) -> None:
        """The step before has been launched, so what it reads may be overwritten."""
        self._sources.clear()
        self._is_open = takes_snapshots
        for content_id in manager.lost_content_ids:
            self.forget(content_id)
        manager.lost_content_ids.clear()

    def begin(self, seq: Sequence, manager: KnownBlocks, shared: list[int]) -> None:
        num_known = len(manager.known_blocks(seq)) * manager.block_size
        content_id = manager.blocks[shared[-1]].content_id if shared else 0
        seq.cell = self.allocate(len(shared) * manager.block_size, content_id, num_known)

    def end(self, seq: Sequence) -> None:
        if seq.cell is not None:
            self.deallocate(seq.cell)
            seq.cell = None

    def reusable(self, manager: KnownBlocks, block_ids: list[int]) -> list[int]:
        """Up to the last one whose state is known."""
        return block_ids[: self.num_reusable_blocks([manager.blocks[i].content_id for i in block_ids])]

    def is_worth_waiting(
        self, manager: KnownBlocks, seq: Sequence, num_shared: int, scheduled: Mapping[int, Sequence]
    ) -> bool:
        """It also needs the state after some of those blocks, of which the step has to take a snapshot."""
        end, most = num_shared, manager.max_shared_blocks(seq)
        while end < most and manager.block_hash(seq, end) in scheduled:
            other = scheduled[manager.block_hash(seq, end)]
            end += 1
        return self.request_snapshot(other, num_shared * manager.block_size, end * manager.block_size)

    def request_snapshots(self, manager: KnownBlocks, seqs: Iterable[Sequence]) -> None:
        if manager.enable_prefix_caching:
            for seq in seqs:
                self.request_usual_snapshot(seq)

    def keep(self, seq: Sequence, manager: KnownBlocks) -> None:
        """`keep_snapshot`, if that step writes one of this sequence."""
        if seq.cell is not None and seq.cell.snapshot >= 0:
            last = seq.block_table[seq.cell.snapshot_end // manager.block_size - 1]
            self.keep_snapshot(seq.cell, manager.blocks[last].content_id)

    # -- cells -------------------------------------------------------------------------------------------------------

    def can_allocate(self) -> bool:
        """Whether there is a cell for a sequence that has none, also if it begins with one of the snapshots."""
        return bool(self._free) or len(self._snapshots.keys()) - len(self._sources) > 1

    def allocate(self, num_reused: int, content_id: int, num_known: int) -> Cell:
        """A cell for a sequence. Call can_allocate first.

        num_reused: the tokens of the snapshot that it begins with, which has this content id; 0 for none. num_known:
        the tokens that the KV cache knows.
        """
        source = -1
        if num_reused:
            source = self._snapshots[content_id]
            self._snapshots.move_to_end(content_id)
            self._sources.add(source)
        return Cell(self._take(), source, num_reused, num_known)

    def deallocate(self, cell: Cell) -> None:
        """Take the cell back. The step in flight may still use it; its next owner writes to it in a later step."""
        self._free += [cell.index, *cell.lent]
        cell.lent = []
        if cell.snapshot >= 0:
            self._free.append(cell.snapshot)

    def lend(self, seq: Sequence, count: int) -> int:
        """Give a sequence cells for the states after the tokens that the next step proposes: `count`, or as many as
        there are. Returns the number. `commit` ends it, or `deallocate`."""
        cell = seq.cell
        while len(cell.lent) < count and (index := self._take()) >= 0:
            cell.lent.append(index)
        return len(cell.lent)

    def commit(self, seq: Sequence, num_accepted: int) -> None:
        """Let the state after the first num_accepted proposed tokens be the sequence's, and take the other cells
        back."""
        cell = seq.cell
        cells = [cell.index, *cell.lent]
        cell.index, cell.lent = cells.pop(num_accepted), []
        self._free += cells

    def num_reusable_blocks(self, content_ids: AbstractSequence[int]) -> int:
        """How many of a sequence's first blocks need not be computed: the longest beginning whose state is known.
        content_ids: of the first blocks, as far as the KV cache knows them."""
        for i in range(len(content_ids) - 1, -1, -1):
            if content_ids[i] in self._snapshots:
                return i + 1
        return 0

    def align_chunk(self, seq: Sequence) -> None:
        """Let the chunk of a prompt that is scheduled end where a kernel's chunk does, if it is long enough: then the
        next step can take snapshots."""
        end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // self.chunk * self.chunk
        if end > seq.num_cached_tokens:
            seq.num_scheduled_tokens = end - seq.num_cached_tokens

    # -- snapshots ---------------------------------------------------------------------------------------------------

    def request_snapshot(self, seq: Sequence, first: int, end: int) -> bool:
        """Have the step that is being scheduled write a snapshot of the sequence, after as many tokens as possible,
        more than `first` and at most `end`. If it already takes one, that may move to an earlier token. Returns
        whether there will be one."""
        cell = seq.cell
        if cell is None or not self._is_open:
            return False
        if cell.snapshot >= 0 and cell.snapshot_end <= end:
            return cell.snapshot_end > first
        unit = math.lcm(self.chunk, seq.block_size)
        end = min(end, seq.num_cached_tokens + seq.num_scheduled_tokens) // unit * unit
        if end <= max(first, seq.num_cached_tokens) or (end - seq.num_cached_tokens) % self.chunk:
            return False
        index = cell.snapshot if cell.snapshot >= 0 else self._take()
        if index < 0:
            return False
        cell.snapshot, cell.snapshot_end = index, end
        return True

    def request_usual_snapshot(self, seq: Sequence) -> None:
        """At the end of its prompt. But a sequence that begins with no snapshot, though the KV cache knows its
        beginning, is the second one with this beginning: there may be more of them."""
        cell = seq.cell
        if cell is None or cell.snapshot >= 0:
            return
        if cell.num_known > cell.num_reused == 0 and self.request_snapshot(seq, 0, cell.num_known):
            return
        self.request_snapshot(seq, 0, seq.num_tokens - 1)

    def keep_snapshot(self, cell: Cell, content_id: int) -> None:
        """Let others begin with the snapshot that a launched step writes. content_id: of its last block."""
        index, cell.snapshot = cell.snapshot, -1
        if content_id in self._snapshots:
            self._free.append(index)
        else:
            self._snapshots[content_id] = index
        self._snapshots.move_to_end(content_id)

    def forget(self, content_id: int) -> None:
        """Drop the snapshot with this content id, if there is one."""
        index = self._snapshots.pop(content_id, None)
        if index is not None:
            self._free.append(index)

    def forget_all(self) -> None:
        self._free += self._snapshots.values()
        self._snapshots.clear()

    def _take(self) -> int:
        """A free cell, or that of a snapshot, which is dropped; -1 if there is none."""
        if self._free:
            return self._free.pop()
        unread = (content_id for content_id, index in self._snapshots.items() if index not in self._sources)
        content_id = next(unread, None)
        return -1 if content_id is None else self._snapshots.pop(content_id)
