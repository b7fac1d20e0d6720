"""What must hold after every step of the engine's bookkeeping, and a model that fails where it does not.

`SimulatedCache` stands for the KV cache. Where a GPU would hold a token's keys and values, which depend on all
tokens before it, a slot holds the tuple of all tokens up to and including its own: a slot read by the wrong
sequence, too early, or after it was reused shows at once.
"""

import zlib
from collections import Counter
from collections.abc import Iterable

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.cells import NoCells
from nanovllm.engine.features.states.cells import Cells
from nanovllm.engine.features.windows.window_blocks import WindowBlocks
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus


def check_blocks(manager: BlockManager, seqs: Iterable[Sequence]) -> None:
    """Partition, reference counts and hash table, where `seqs` are all sequences that may hold blocks."""
    free, used = set(manager.free_block_ids), set(manager.used_block_ids)
    assert not free & used
    assert free | used == set(range(len(manager.blocks)))
    assert len(manager.free_block_ids) + len(manager.used_block_ids) == len(manager.blocks)

    named = Counter()
    for seq in seqs:
        assert len(set(seq.block_table)) == len(seq.block_table), "a sequence names a block twice"
        named.update(seq.block_table)
    for block in manager.blocks:
        assert block.ref_count == named[block.block_id]
        assert (block.block_id in used) == (block.ref_count > 0)

    for hash, block_id in manager.hash_to_block_id.items():
        assert manager.blocks[block_id].hash == hash
        assert len(manager.blocks[block_id].token_ids) == manager.block_size


def check_scheduler(scheduler: Scheduler) -> None:
    """Invariants between two steps."""
    seqs = [*scheduler.waiting, *scheduler.running]
    assert len({id(seq) for seq in seqs}) == len(seqs), "a sequence is queued twice"
    check_blocks(scheduler.block_manager, seqs)
    for seq in seqs:
        assert seq.num_cached_tokens < seq.num_tokens <= scheduler.max_seq_len
        assert seq.completion.finish_reason is None
    for i, seq in enumerate(scheduler.waiting):
        assert seq.status is SequenceStatus.WAITING
        assert seq.is_prefill
        assert i == 0 or not seq.block_table, "only the head of the queue is prefilled in chunks"
    for seq in scheduler.running:
        assert seq.status is SequenceStatus.RUNNING
        assert not seq.is_prefill
        assert seq.num_cached_tokens == seq.num_tokens - 1, "a decode step computes the last token alone"
    if scheduler.is_finished():
        assert not scheduler.block_manager.used_block_ids
    check_cells(scheduler.block_manager.cells, seqs)


def check_cells(cells: NoCells, seqs: list[Sequence]) -> None:
    """Every slot is free, a sequence's, or a snapshot's. `seqs` are all sequences that may have one."""
    has_places = isinstance(cells, (Cells, WindowBlocks))
    for seq in seqs:
        assert (seq.cell is not None) == (has_places and bool(seq.block_table))
    if isinstance(cells, WindowBlocks):
        check_window_blocks(cells, [seq for seq in seqs if seq.cell is not None])
    if not isinstance(cells, Cells):
        return
    held = [slot for seq in seqs if seq.cell is not None for slot in (seq.cell.index, *seq.cell.lent)]
    held += [seq.cell.snapshot for seq in seqs if seq.cell is not None and seq.cell.snapshot >= 0]
    slots = Counter([*held, *cells._free, *cells._snapshots.values()])
    assert slots == Counter(range(cells.num_cells))


def check_window_blocks(windows: WindowBlocks, seqs: list[Sequence]) -> None:
    """Partition, reference counts, what can be found, and what each sequence holds. seqs: all that hold blocks."""
    free, used = list(windows.free_block_ids), windows.used_block_ids
    assert sorted([*free, *used]) == list(range(windows.num_blocks))
    named = Counter(block_id for seq in seqs for block_id in seq.cell.held)
    assert [named[i] for i in range(windows.num_blocks)] == windows.ref_counts
    assert used == set(named)
    assert windows.known == {content_id: i for i, content_id in enumerate(windows.content_ids) if content_id}
    for seq in seqs:
        assert len(set(seq.cell.held)) == len(seq.cell.held), "a sequence names a block twice"
        assert len(seq.cell.blocks) <= len(seq.block_table)
        assert seq.is_prefill or len(seq.cell.blocks) == len(seq.block_table)
        assert set(seq.cell.blocks) <= {0, *seq.cell.held}, "a passed entry names another's block"
        if not seq.is_prefill:
            extra = len(seq.block_table) - seq.num_blocks  # of proposed tokens
            assert len(seq.cell.held) <= windows.num_before + 1 + max(extra, 0), "a passed block is still held"


class SimulatedCache:
    """slot -> the tokens from the start of the sequence up to the one whose keys and values it holds."""

    def __init__(self, manager: BlockManager):
        self.manager = manager
        self.slots: dict[int, tuple[int, ...]] = {}

    def slot(self, block_table: list[int], position: int) -> int:
        size = self.manager.block_size
        return block_table[position // size] * size + position % size

    def read(self, seq: Sequence, position: int) -> tuple[int, ...] | None:
        return self.slots.get(self.slot(seq.block_table, position))

    def write(self, seq: Sequence, position: int, prefix: tuple[int, ...]) -> None:
        """prefix: the sequence's tokens up to `position`, that one included."""
        slot = self.slot(seq.block_table, position)
        block = self.manager.blocks[slot // self.manager.block_size]
        assert block.ref_count == 1, "a write into a block that another sequence reads, or that is free"
        assert block.hash == -1, "a write into a block that the prefix cache offers"
        self.slots[slot] = prefix

    def check_sequence(self, seq: Sequence) -> None:
        """Every slot that counts as cached holds the sequence's own tokens behind its own prefix."""
        tokens = tuple(seq.token_ids)
        assert seq.num_cached_tokens <= len(seq.block_table) * self.manager.block_size
        for position in range(seq.num_cached_tokens):
            assert self.read(seq, position) == tokens[: position + 1]

    def check_findable(self) -> None:
        """Every block that the prefix cache offers holds what its hash and token_ids say, in all its slots."""
        size = self.manager.block_size
        for hash, block_id in self.manager.hash_to_block_id.items():
            prefix = self.slots[block_id * size + size - 1]
            assert len(prefix) % size == 0
            for offset in range(size):
                assert self.slots[block_id * size + offset] == prefix[: len(prefix) - size + 1 + offset]
            assert list(self.manager.blocks[block_id].token_ids) == list(prefix[-size:])
            chain = -1
            for i in range(0, len(prefix), size):
                chain = self.manager.compute_hash(prefix[i : i + size], chain)
            assert chain == hash


class SimulatedWindows:
    """slot of the layers with a window -> the tokens up to the one whose keys and values it holds."""

    def __init__(self, windows: WindowBlocks):
        self.windows = windows
        self.slots: dict[int, tuple[int, ...]] = {}

    def slot(self, seq: Sequence, position: int) -> int:
        size = self.windows.block_size
        assert position // size >= seq.cell.num_passed, "a read or write of a block that was given back"
        return seq.cell.blocks[position // size] * size + position % size

    def check_sequence(self, seq: Sequence) -> None:
        """Every slot that the step reads and an earlier one has written is the sequence's own."""
        tokens = tuple(seq.token_ids)
        for position in range(max(0, seq.num_cached_tokens - self.windows.window + 1), seq.num_cached_tokens):
            assert self.slots[self.slot(seq, position)] == tokens[: position + 1]

    def write(self, seq: Sequence, position: int, prefix: tuple[int, ...]) -> None:
        slot = self.slot(seq, position)
        block = slot // self.windows.block_size
        assert self.windows.ref_counts[block] == 1, "a write into a block that another sequence reads, or that is free"
        assert not self.windows.content_ids[block], "a write into a block that the prefix cache offers"
        self.slots[slot] = prefix

    def check_findable(self, manager: BlockManager) -> None:
        """A block of this kind that can be found holds the tokens of the manager's block with its content id."""
        size, cache = self.windows.block_size, {}
        for block_id in manager.hash_to_block_id.values():
            cache[manager.blocks[block_id].content_id] = manager.blocks[block_id].token_ids
        for content_id, block_id in self.windows.known.items():
            if content_id in cache:  # Others are forgotten before the next step.
                prefix = self.slots[block_id * size + size - 1]
                assert list(prefix[-size:]) == list(cache[content_id])
                written = [self.slots[block_id * size + offset] for offset in range(size)]
                assert written == [prefix[: len(prefix) - size + 1 + offset] for offset in range(size)]


class SimulatedStates:
    """slot -> the tokens whose state it holds."""

    def __init__(self, manager: BlockManager, cache: SimulatedCache):
        self.manager, self.cache = manager, cache
        self.slots: dict[int, tuple[int, ...]] = {}
        self.num_snapshots_read = 0

    def run(self, seqs: list[Sequence], is_prefill: bool, before: list[tuple], after: list[tuple]) -> None:
        """A step on the states. before, after: the tokens of each sequence's state."""
        if not is_prefill:  # A mixed step begins with copies.
            prompts = [seq for seq in seqs if seq.is_prefill]
            for copy in filter(None, (seq.cell.copy_of_step(seq.num_cached_tokens) for seq in prompts)):
                self.slots[copy[1]] = self.slots[copy[0]]
        plans = [seq.cell.cells_of_step(seq.num_cached_tokens) for seq in seqs]
        if not is_prefill:
            assert all(plan[2] < 0 for plan in plans)
            plans = [(plan[1] if tokens else -1, plan[1], -1, 0) for plan, tokens in zip(plans, before, strict=True)]
        written = [slot for plan in plans for slot in plan[1:3] if slot >= 0]
        assert len(set(written)) == len(written), "two write to a slot"
        for (source, slot, _, _), tokens in zip(plans, before, strict=True):
            assert (self.slots[source] if source >= 0 else ()) == tokens, "the state of another prefix"
            assert source == slot or source not in written, "a slot is read while it is written to"
            self.num_snapshots_read += source not in (slot, -1)
        for seq, (_, slot, snapshot, num_tokens), tokens in zip(seqs, plans, after, strict=True):
            self.slots[slot] = tokens
            if snapshot >= 0:
                assert 0 < num_tokens <= seq.num_scheduled_tokens
                self.slots[snapshot] = tokens[: seq.num_cached_tokens + num_tokens]

    def check_findable(self) -> None:
        """A snapshot is of the tokens that the block with its content id ends."""
        for content_id, slot in self.manager.cells._snapshots.items():
            if content_id in self.manager.lost_content_ids:  # It will be dropped before the next step.
                continue
            blocks = [self.manager.blocks[i] for i in self.manager.hash_to_block_id.values()]
            (block,) = [block for block in blocks if block.content_id == content_id]
            last = (block.block_id + 1) * self.manager.block_size - 1
            assert self.slots[slot] == self.cache.slots[last]


class FakeModel:
    """Computes steps as a ModelRunner would, from the sequences' counts and tables and the simulated cache alone.

    The next token is a function of what the cache holds for the sequence, so that a wrong slot is a wrong output.
    """

    def __init__(self, scheduler: Scheduler, vocab_size: int, noise: int = 0):
        """noise: the token "sampled" where a prefill goes on, which nobody may take."""
        self.cache = SimulatedCache(scheduler.block_manager)
        self.states = SimulatedStates(scheduler.block_manager, self.cache)
        cells = scheduler.block_manager.cells
        self.windows = SimulatedWindows(cells) if isinstance(cells, WindowBlocks) else None
        self.vocab_size = vocab_size
        self.noise = noise
        self.sampled: list[int] = []  # The last step's tokens, where a step finds those that the host has not read.

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        # What a step takes from the cache was written by an earlier one: checked before this one's writes.
        for seq in seqs:
            self.cache.check_sequence(seq)
            if self.windows:
                self.windows.check_sequence(seq)
        prefilled = [seq.is_prefill for seq in seqs]
        if is_prefill:
            assert all(prefilled)
        else:  # A mixed step has the prompts at its end.
            assert not prefilled[0]
            assert prefilled == sorted(prefilled)
        before = [self._state_before(seq) for seq in seqs]
        self.sampled = [self._run_one(seq) for seq in seqs]
        if isinstance(self.cache.manager.cells, Cells):
            self.states.run(seqs, is_prefill, before, [self._state_after(seq) for seq in seqs])
        return self.sampled

    def _state_before(self, seq: Sequence) -> tuple[int, ...]:
        return self.cache.read(seq, seq.num_cached_tokens - 1) if seq.num_cached_tokens else ()

    def _state_after(self, seq: Sequence) -> tuple[int, ...]:
        return self.cache.read(seq, seq.num_cached_tokens + seq.num_scheduled_tokens - 1)

    def _run_one(self, seq: Sequence) -> int:
        start, end = seq.num_cached_tokens, seq.num_cached_tokens + seq.num_scheduled_tokens
        assert start < end <= seq.num_tokens
        if seq.is_prefill:
            assert seq.pending_row < 0, "a prefill feeds tokens that the host knows"
            new = seq.token_ids[start:end]
        else:
            new = [seq.last_token if seq.pending_row < 0 else self.sampled[seq.pending_row]]
        assert len(new) == end - start
        prefix = self.cache.read(seq, start - 1) if start else ()
        for position, token in enumerate(new, start):
            prefix = (*prefix, token)
            self.cache.write(seq, position, prefix)
            if self.windows:
                self.windows.write(seq, position, prefix)
        return next_token(prefix, self.vocab_size) if end == seq.num_tokens else self.noise


def next_token(tokens: tuple[int, ...], vocab_size: int) -> int:
    return zlib.crc32(repr(tuple(tokens)).encode()) % vocab_size


def run_alone(
    prompt: list[int], max_tokens: int, eos: Iterable[int], max_seq_len: int, vocab_size: int
) -> tuple[list[int], str]:
    """Completion and finish reason of a prompt that has the fake model to itself, by a loop and nothing else."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens, vocab_size))
        completion = tokens[len(prompt) :]
        if tokens[-1] in eos:
            return completion, "stop"
        if len(completion) == max_tokens or len(tokens) == max_seq_len:
            return completion, "length"
