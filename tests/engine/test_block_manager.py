"""BlockManager: who owns which block, what is shared, and that nothing wrong ever is."""

import itertools
import struct

import pytest
import xxhash
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from invariants import SimulatedCache, check_blocks

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.sequence import Sequence

SIZE = 4
seq_ids = itertools.count()


def tokens(num_blocks: int, extra: int = 0, first: int = 0) -> list[int]:
    """Distinct tokens: num_blocks full blocks and `extra` more."""
    return list(range(first, first + num_blocks * SIZE + extra))


def sequence(token_ids: list[int]) -> Sequence:
    return Sequence(next(seq_ids), token_ids, block_size=SIZE)


def compute(manager: BlockManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """What a step does to the books: num_tokens (all that are left) more tokens are in the cache."""
    before = seq.num_cached_tokens
    seq.num_cached_tokens = seq.num_tokens if num_tokens is None else before + num_tokens
    manager.hash_blocks(seq, before)


def start(manager: BlockManager, token_ids: list[int]) -> Sequence:
    """Allocate and compute a new sequence."""
    seq = sequence(token_ids)
    assert manager.can_allocate(seq)
    manager.allocate(seq)
    compute(manager, seq)
    return seq


def decode(manager: BlockManager, seq: Sequence, token: int) -> None:
    seq.append_token(token)
    assert manager.can_append(seq)
    manager.may_append(seq)
    compute(manager, seq)


# compute_hash


@pytest.mark.parametrize("prefix", [None, 0, 1, 0x0123456789ABCDEF, 2**64 - 1])
def test_hash_is_xxh64_of_the_prefix_and_the_tokens(prefix):
    token_ids = [0, 1, 151_935, 7]
    data = b"" if prefix is None else struct.pack("<Q", prefix)
    data += struct.pack("<4q", *token_ids)
    expected = xxhash.xxh64(data).intdigest()
    args = (token_ids,) if prefix is None else (token_ids, prefix)
    assert BlockManager.compute_hash(*args) == expected


def test_blocks_are_stored_under_the_chain_of_hashes():
    manager = BlockManager(4, SIZE)
    seq = start(manager, tokens(2, 1))
    first = BlockManager.compute_hash(tokens(1))
    second = BlockManager.compute_hash(tokens(1, first=SIZE), first)
    a, b, c = seq.block_table
    assert manager.hash_to_block_id == {first: a, second: b}
    assert (manager.blocks[a].hash, manager.blocks[b].hash, manager.blocks[c].hash) == (first, second, -1)
    assert list(manager.blocks[b].token_ids) == tokens(1, first=SIZE)


def test_block_update_and_reset():
    block = Block(3)
    assert (block.block_id, block.ref_count, block.hash) == (3, 0, -1)
    block.update(99, [1, 2])
    assert (block.hash, list(block.token_ids)) == (99, [1, 2])
    block.reset()
    assert (block.ref_count, block.hash, list(block.token_ids)) == (1, -1, [])


# Handing out and taking back


def test_a_new_manager_has_every_block_free_and_nothing_known():
    manager = BlockManager(5, SIZE)
    assert list(manager.free_block_ids) == [0, 1, 2, 3, 4]
    assert manager.used_block_ids == set()
    assert manager.hash_to_block_id == {}
    assert [block.block_id for block in manager.blocks] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (12, 3), (13, 4)])
def test_a_sequence_gets_as_many_blocks_as_its_tokens_take(num_tokens, num_blocks):
    manager = BlockManager(6, SIZE)
    seq = start(manager, list(range(num_tokens)))
    assert len(seq.block_table) == num_blocks
    assert manager.used_block_ids == set(seq.block_table)
    assert len(manager.free_block_ids) == 6 - num_blocks
    check_blocks(manager, [seq])


def test_can_allocate_is_exact_without_sharing():
    manager = BlockManager(3, SIZE)
    assert manager.can_allocate(sequence(tokens(3)))
    assert not manager.can_allocate(sequence(tokens(3, 1)))
    start(manager, tokens(1, first=50))
    assert manager.can_allocate(sequence(tokens(2)))
    assert not manager.can_allocate(sequence(tokens(2, 1)))


def test_can_allocate_discounts_blocks_that_a_running_sequence_shares():
    manager = BlockManager(4, SIZE)
    start(manager, tokens(2, 1))
    assert manager.can_allocate(sequence(tokens(3)))
    assert not manager.can_allocate(sequence(tokens(3, 1)))
    assert not manager.can_allocate(sequence(tokens(2, first=50)))


def test_can_allocate_counts_shared_blocks_that_are_free_only_once():
    manager = BlockManager(4, SIZE)
    holder = start(manager, tokens(2, first=50))
    old = start(manager, tokens(1, 1))
    manager.deallocate(old)
    # Two blocks are free, one of them the prompt's first: it is shared and taken out of the free list.
    assert manager.can_allocate(sequence(tokens(2)))
    assert not manager.can_allocate(sequence(tokens(2, 1)))
    seq = start(manager, tokens(2))
    assert not manager.free_block_ids
    check_blocks(manager, [holder, seq])


def test_can_allocate_changes_nothing():
    manager = BlockManager(4, SIZE)
    manager.deallocate(start(manager, tokens(2, 1)))
    free, known = list(manager.free_block_ids), dict(manager.hash_to_block_id)
    seq = sequence(tokens(2, 2))
    assert manager.can_allocate(seq)
    assert (list(manager.free_block_ids), manager.hash_to_block_id) == (free, known)
    assert (seq.block_table, seq.num_cached_tokens) == ([], 0)
    check_blocks(manager, [])


def test_the_block_freed_longest_ago_is_reused_first():
    manager = BlockManager(5, SIZE)
    a, b, c = (start(manager, tokens(1, first=first)) for first in (0, 10, 20))
    table_a, table_b = a.block_table, b.block_table
    manager.deallocate(b)
    manager.deallocate(a)
    # The two that were never used are free for longer than b's, and b's for longer than a's.
    order = [start(manager, tokens(1, first=first)).block_table for first in (30, 40, 50, 60)]
    assert order == [[3], [4], table_b, table_a]
    assert c.block_table == [2]


def test_a_sequence_is_freed_from_its_last_block_to_its_first():
    manager = BlockManager(4, SIZE)
    seq = start(manager, tokens(4))
    table = seq.block_table
    manager.deallocate(seq)
    assert list(manager.free_block_ids) == table[::-1]
    assert (seq.block_table, seq.num_cached_tokens) == ([], 0)
    # Hence pressure takes the end of a known prompt before its beginning.
    manager.deallocate(start(manager, tokens(2, first=50)))
    assert start(manager, tokens(3, 1)).num_shared_tokens == 2 * SIZE


def test_freeing_drops_one_reference_and_frees_at_zero():
    manager = BlockManager(6, SIZE)
    a = start(manager, tokens(2, 1))
    b = start(manager, tokens(2, 2))
    shared = a.block_table[:2]
    assert b.block_table[:2] == shared
    assert b.block_table[2] != a.block_table[2]
    assert [manager.blocks[i].ref_count for i in shared] == [2, 2]
    manager.deallocate(a)
    assert [manager.blocks[i].ref_count for i in shared] == [1, 1]
    assert set(shared) <= manager.used_block_ids
    check_blocks(manager, [b])
    manager.deallocate(b)
    assert [manager.blocks[i].ref_count for i in shared] == [0, 0]
    assert len(manager.free_block_ids) == 6


# can_append, may_append


def test_a_block_is_appended_exactly_when_the_new_token_opens_one():
    manager = BlockManager(4, SIZE)
    seq = start(manager, tokens(0, 1))
    sizes = []
    for token in range(8):
        decode(manager, seq, token)
        sizes.append(len(seq.block_table))
    # 2, 3, ... 9 tokens.
    assert sizes == [1, 1, 1, 2, 2, 2, 2, 3]
    check_blocks(manager, [seq])


def test_can_append_asks_for_a_free_block_only_where_one_is_needed():
    manager = BlockManager(2, SIZE)
    a = start(manager, tokens(0, 3))
    b = start(manager, tokens(1, first=50))
    a.append_token(1)
    assert manager.can_append(a)
    b.append_token(1)
    assert not manager.can_append(b)
    manager.deallocate(a)
    assert manager.can_append(b)
    manager.may_append(b)
    assert len(b.block_table) == 2
    assert not manager.can_append(start_over_full(b))


def start_over_full(seq: Sequence) -> Sequence:
    """The sequence, grown by a whole block that it has no slots for."""
    for _ in range(SIZE):
        seq.append_token(1)
    return seq


def test_a_block_that_decoding_fills_is_found_by_the_next_prompt():
    manager = BlockManager(8, SIZE)
    seq = start(manager, tokens(1, 2))
    for token in (90, 91, 92):
        decode(manager, seq, token)
    follow_up = sequence([*seq.token_ids, 1, 2])
    manager.allocate(follow_up)
    assert follow_up.num_cached_tokens == 2 * SIZE
    assert follow_up.block_table[:2] == seq.block_table[:2]


def test_a_full_block_whose_last_token_is_not_yet_computed_is_not_found():
    manager = BlockManager(8, SIZE)
    seq = start(manager, tokens(1, 3))
    seq.append_token(50)
    manager.may_append(seq)
    other = sequence([*seq.token_ids, 1])
    manager.allocate(other)
    assert other.num_cached_tokens == SIZE


# The prefix cache


def test_prompts_of_one_batch_do_not_share_what_is_not_written():
    manager = BlockManager(8, SIZE)
    a, b = sequence(tokens(2, 1)), sequence(tokens(2, 1))
    manager.allocate(a)
    assert manager.hash_to_block_id == {}
    manager.allocate(b)
    assert not set(a.block_table) & set(b.block_table)
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 0)
    compute(manager, a)
    compute(manager, b)
    # The first to be written stays the one that is found.
    c = sequence(tokens(2, 1))
    manager.allocate(c)
    assert c.block_table[:2] == a.block_table[:2]
    check_blocks(manager, [a, b, c])


def side_by_side(manager: BlockManager, token_ids: list[int]) -> tuple[Sequence, Sequence]:
    """Two sequences with the same tokens, computed in one batch and so in blocks of their own."""
    a, b = sequence(token_ids), sequence(token_ids)
    manager.allocate(a)
    manager.allocate(b)
    compute(manager, a)
    compute(manager, b)
    return a, b


def test_what_one_of_two_equals_adds_is_found_behind_the_others_blocks():
    manager = BlockManager(12, SIZE)
    a, b = side_by_side(manager, tokens(2))
    for token in range(50, 50 + SIZE):
        decode(manager, b, token)
    c = sequence([*b.token_ids, 1])
    manager.allocate(c)
    assert c.block_table[:3] == [*a.block_table, b.block_table[2]]
    assert c.num_cached_tokens == 3 * SIZE


def test_reusing_one_of_two_equal_blocks_leaves_the_other_known():
    manager = BlockManager(3, SIZE)
    a, b = side_by_side(manager, tokens(1))
    manager.deallocate(b)
    for first in (50, 60):
        start(manager, tokens(1, first=first))
    assert not manager.free_block_ids
    assert manager.hash_to_block_id[BlockManager.compute_hash(tokens(1))] == a.block_table[0]


def test_of_a_prompt_in_chunks_only_the_computed_blocks_are_found():
    manager = BlockManager(12, SIZE)
    a = sequence(tokens(3, 1))
    manager.allocate(a)
    found = []
    for chunk in (3, 1, 6, 3):
        compute(manager, a, chunk)
        probe = sequence(tokens(3, 1))
        manager.allocate(probe)
        found.append(probe.num_cached_tokens // SIZE)
        manager.deallocate(probe)
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize(("extra", "cached_blocks"), [(0, 2), (1, 3), (3, 3)])
def test_at_least_one_token_is_left_to_compute(extra, cached_blocks):
    manager = BlockManager(12, SIZE)
    start(manager, tokens(3, 3))
    seq = sequence(tokens(3, extra))
    manager.allocate(seq)
    assert seq.num_cached_tokens == cached_blocks * SIZE < seq.num_tokens
    assert manager.blocks[seq.block_table[-1]].ref_count == 1


def test_a_known_prompt_of_exactly_one_block_is_computed_in_a_block_of_its_own():
    manager = BlockManager(4, SIZE)
    a = start(manager, tokens(1))
    b = sequence(tokens(1))
    manager.allocate(b)
    assert b.num_cached_tokens == 0
    assert a.block_table != b.block_table


def test_the_first_miss_ends_sharing():
    manager = BlockManager(12, SIZE)
    a = start(manager, tokens(3, 1))
    middle_differs = tokens(3, 1)
    middle_differs[SIZE] = 99
    b = sequence(middle_differs)
    manager.allocate(b)
    assert b.num_cached_tokens == SIZE
    assert b.block_table[0] == a.block_table[0]
    assert not set(b.block_table[1:]) & set(a.block_table)


def test_a_block_is_found_only_behind_its_own_prefix():
    manager = BlockManager(12, SIZE)
    start(manager, tokens(2, 1))
    seq = sequence([*tokens(1, first=50), *tokens(1, first=SIZE), 1])
    manager.allocate(seq)
    assert seq.num_cached_tokens == 0


def test_freed_blocks_are_found_again_until_they_are_reused():
    manager = BlockManager(4, SIZE)
    old = start(manager, tokens(2, 1))
    table = old.block_table
    manager.deallocate(old)
    assert not manager.used_block_ids

    again = start(manager, tokens(2, 1))
    assert again.block_table[:2] == table[:2]
    assert again.num_shared_tokens == 2 * SIZE
    check_blocks(manager, [again])
    manager.deallocate(again)

    # The whole cache is taken by another prompt: nothing of the first is left, and no stale hash.
    other = start(manager, tokens(3, 1, first=50))
    assert len(manager.hash_to_block_id) == 3
    check_blocks(manager, [other])
    manager.deallocate(other)
    seq = sequence(tokens(2, 1))
    manager.allocate(seq)
    assert seq.num_cached_tokens == 0


def test_reuse_removes_the_stale_hash_when_the_block_is_taken_and_not_later():
    manager = BlockManager(2, SIZE)
    manager.deallocate(start(manager, tokens(1, 1)))
    hash = BlockManager.compute_hash(tokens(1))
    assert hash in manager.hash_to_block_id
    taker = sequence(tokens(1, 1, first=50))
    manager.allocate(taker)
    assert manager.hash_to_block_id == {}
    assert all(block.hash == -1 for block in manager.blocks)


def test_a_shared_block_is_not_handed_out_as_a_fresh_one():
    # The prompt's own first block is the one freed longest ago, the next in line for reuse.
    manager = BlockManager(2, SIZE)
    filler = start(manager, tokens(0, 1, first=50))
    old = start(manager, tokens(1))
    table = old.block_table
    manager.deallocate(old)
    manager.deallocate(filler)
    assert next(iter(manager.free_block_ids)) == table[0]
    seq = sequence(tokens(1, 1))
    manager.allocate(seq)
    assert seq.num_cached_tokens == SIZE
    assert seq.block_table[0] == table[0] != seq.block_table[1]
    check_blocks(manager, [seq])


def test_a_block_leaves_the_middle_of_the_free_list_and_the_rest_keeps_its_order():
    manager = BlockManager(9, SIZE)
    starts = (0, 20, 40, 60)
    for seq in [start(manager, tokens(1, 1, first=first)) for first in starts]:
        manager.deallocate(seq)
    before = list(manager.free_block_ids)
    seq = start(manager, tokens(1, 1, first=40))
    assert before.index(seq.block_table[0]) not in (0, len(before) - 1)
    assert list(manager.free_block_ids) == [i for i in before if i not in seq.block_table]


def test_num_shared_tokens_is_that_of_the_first_allocation():
    manager = BlockManager(8, SIZE)
    seq = start(manager, tokens(2, 1))
    assert seq.num_shared_tokens == 0
    manager.deallocate(seq)
    manager.allocate(seq)
    assert (seq.num_shared_tokens, seq.num_cached_tokens) == (0, 2 * SIZE)


def test_without_prefix_caching_nothing_is_ever_shared():
    manager = BlockManager(8, SIZE, enable_prefix_caching=False)
    a = start(manager, tokens(2, 1))
    b = start(manager, tokens(2, 1))
    assert not set(a.block_table) & set(b.block_table)
    assert (b.num_shared_tokens, manager.hash_to_block_id) == (0, {})
    check_blocks(manager, [a, b])
    assert not manager.can_allocate(sequence(tokens(2, 1)))
    manager.deallocate(a)
    assert start(manager, tokens(2, 1)).num_shared_tokens == 0


def test_reset_forgets_every_prefix_and_leaves_the_owners_alone():
    manager = BlockManager(12, SIZE)
    freed = start(manager, tokens(2, 1, first=50))
    manager.deallocate(freed)
    running = start(manager, tokens(2, 1))
    table = list(running.block_table)
    manager.reset_prefix_cache()
    assert manager.hash_to_block_id == {}
    assert {block.hash for block in manager.blocks} == {-1}
    assert running.block_table == table
    for prompt in (tokens(2, 1), tokens(2, 1, first=50)):
        seq = start(manager, prompt)
        assert seq.num_shared_tokens == 0
        assert not set(seq.block_table) & set(table)
        manager.deallocate(seq)
    for token in range(SIZE):
        decode(manager, running, token)
    check_blocks(manager, [running])
    manager.deallocate(running)
    assert len(manager.free_block_ids) == 12


def test_what_is_computed_after_a_reset_is_found_again():
    manager = BlockManager(12, SIZE)
    manager.deallocate(start(manager, tokens(2, 1)))
    manager.reset_prefix_cache()
    manager.deallocate(start(manager, tokens(2, 1)))
    assert start(manager, tokens(2, 1)).num_shared_tokens == 2 * SIZE


def test_a_prompt_computed_in_full_is_found_in_full():
    """Also where an entry behind a prefix that is no longer known, and so of use to nobody, has its hash."""
    manager = BlockManager(12, SIZE)
    half_way = sequence(tokens(2, 1))
    manager.allocate(half_way)
    compute(manager, half_way, SIZE)
    manager.reset_prefix_cache()
    compute(manager, half_way)
    manager.deallocate(half_way)

    manager.deallocate(start(manager, tokens(2, 1)))
    assert start(manager, tokens(2, 1)).num_shared_tokens == 2 * SIZE


# Collisions


def weaken(manager: BlockManager, num_values: int) -> None:
    """Leave compute_hash only num_values different results."""
    manager.compute_hash = lambda token_ids, prefix=-1: BlockManager.compute_hash(token_ids, prefix) % num_values


@pytest.mark.parametrize("num_values", [1, 2, 3])
def test_a_collision_is_a_miss(num_values):
    manager = BlockManager(60, SIZE)
    weaken(manager, num_values)
    seqs = [start(manager, tokens(1, 1, first=first)) for first in range(0, 100, 10)]
    assert all(seq.num_shared_tokens == 0 for seq in seqs)
    assert len(manager.hash_to_block_id) <= num_values
    check_blocks(manager, seqs)
    manager.deallocate(seqs[0])
    check_blocks(manager, seqs[1:])


def test_equal_prompts_share_under_a_constant_hash_too():
    manager = BlockManager(8, SIZE)
    weaken(manager, 1)
    a = start(manager, tokens(1, 1))
    b = start(manager, tokens(1, 1))
    assert b.num_shared_tokens == SIZE
    assert a.block_table[0] == b.block_table[0]


def test_a_collision_further_up_the_chain_is_a_miss():
    """The first blocks of two prompts differ and collide; their second blocks are equal, and so are its hashes."""
    manager = BlockManager(40, SIZE)
    front, other_front, back = tokens(1), tokens(1, first=50), tokens(1, first=100)

    def compute_hash(token_ids, prefix=-1):
        return 7 if list(token_ids) in (front, other_front) else BlockManager.compute_hash(token_ids, prefix)

    manager.compute_hash = compute_hash
    seq = sequence([*front, *back, 1])
    manager.allocate(seq)
    compute(manager, seq, SIZE)
    # Take the front out of the cache's memory but not the back: `back` is now known, behind `front` alone.
    manager.reset_prefix_cache()
    compute(manager, seq)
    other = start(manager, [*other_front, *back, 1])
    assert other.num_shared_tokens == 0
    third = start(manager, [*other_front, *back, 2])
    assert third.block_table[0] == other.block_table[0]
    assert third.block_table[1] != seq.block_table[1]
    check_blocks(manager, [seq, other, third])


def test_a_collision_in_a_reused_block_is_a_miss():
    """As above, but the new front takes the very block that the old one was in, while `back` stays known."""
    manager = BlockManager(6, SIZE)
    front, other_front, back = tokens(1), tokens(1, first=50), tokens(1, first=100)

    def compute_hash(token_ids, prefix=-1):
        return 7 if list(token_ids) in (front, other_front) else BlockManager.compute_hash(token_ids, prefix)

    manager.compute_hash = compute_hash
    a, b = sequence([*front, *back, 1]), sequence([*front, *back, 1])
    manager.allocate(a)
    manager.allocate(b)
    compute(manager, a, SIZE)
    compute(manager, b)
    front_block = a.block_table[0]
    manager.deallocate(a)
    fillers = [start(manager, tokens(0, 1, first=first)) for first in (200, 300)]
    other = start(manager, other_front)
    assert other.block_table == [front_block]
    for filler in fillers:
        manager.deallocate(filler)
    third = sequence([*other_front, *back, 1])
    manager.allocate(third)
    assert third.block_table[0] == front_block
    assert third.num_cached_tokens == SIZE
    check_blocks(manager, [b, other, third])


# Random traffic


class Traffic(RuleBasedStateMachine):
    """Sequences come, are computed in chunks, grow, are preempted and end, in any order.

    Two tokens and short blocks make equal beginnings common; few blocks make reuse common; hashes of one or two
    values, in some runs, make collisions common. SimulatedCache says whether every slot holds what its readers
    believe.
    """

    @initialize(
        num_blocks=st.sampled_from([12, 9, 7, 5, 3, 1]),
        block_size=st.integers(1, 3),
        caching=st.sampled_from([True] * 7 + [False]),
        num_hashes=st.sampled_from([None, None, 1, 2]),
    )
    def set_up(self, num_blocks, block_size, caching, num_hashes):
        self.manager = BlockManager(num_blocks, block_size, caching)
        if num_hashes:
            weaken(self.manager, num_hashes)
        self.caching, self.block_size = caching, block_size
        self.capacity = num_blocks * block_size
        self.cache = SimulatedCache(self.manager)
        self.waiting: list[Sequence] = []
        self.holding: list[Sequence] = []
        self.past: list[list[int]] = []  # Prompts, and the tokens of what had blocks.

    @rule(
        start=st.integers(0, 20),
        more=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        known=st.booleans(),
        steps=st.integers(0, 4),
        share=st.floats(0.2, 1),
    )
    def arrive(self, start, more, known, steps, share):
        """A new prompt, or one that begins as an earlier sequence did; its first steps follow at once."""
        beginning = self.past[start % len(self.past)] if known and self.past else []
        prompt = [*beginning, *more]
        if len(prompt) < self.capacity:
            seq = Sequence(next(seq_ids), prompt, block_size=self.block_size)
            self.waiting.append(seq)
            self.past.append(prompt)
            self._advance(seq, steps, share, token=more[0])

    @rule(which=st.integers(0, 20), steps=st.integers(1, 4), share=st.floats(0.2, 1), token=st.integers(0, 1))
    def advance(self, which, steps, share, token):
        seqs = [*self.holding, *self.waiting]
        if seqs:
            self._advance(seqs[which % len(seqs)], steps, share, token)

    def _advance(self, seq, steps, share, token):
        """What comes next for a sequence: allocation, (a share of) its prefill, a token more."""
        for _ in range(steps):
            num_left = seq.num_tokens - seq.num_cached_tokens
            if seq in self.waiting:
                if not self._allocate(seq):
                    return
            elif num_left:
                self._compute(seq, max(1, round(share * num_left)))
            elif seq.num_tokens < self.capacity:
                self._append(seq, token)

    def _allocate(self, seq):
        num_free = len(self.manager.free_block_ids)
        if not self.manager.can_allocate(seq):
            assert seq.num_blocks > num_free
            return False
        again = seq.num_shared_tokens >= 0
        self.manager.allocate(seq)
        assert len(seq.block_table) == seq.num_blocks
        assert seq.num_cached_tokens < seq.num_tokens
        assert self.caching or seq.num_cached_tokens == 0
        if seq.num_cached_tokens:
            event("preempted, and found blocks again" if again else "shared a beginning")
        if any(self.manager.blocks[i].ref_count > 1 for i in seq.block_table):
            event("several readers of a block")
        self.waiting.remove(seq)
        self.holding.append(seq)
        return True

    def _append(self, seq, token):
        num_blocks, num_free = len(seq.block_table), len(self.manager.free_block_ids)
        opens_a_block = seq.num_tokens % self.block_size == 0
        seq.append_token(token)
        assert self.manager.can_append(seq) == (not opens_a_block or num_free > 0)
        if not self.manager.can_append(seq):
            event("no block for a token")
            self._release(seq)
            self.waiting.append(seq)
            return
        self.manager.may_append(seq)
        assert len(seq.block_table) == num_blocks + opens_a_block
        self._compute(seq, 1)

    def _compute(self, seq, num_tokens):
        before = seq.num_cached_tokens
        for position in range(before, before + num_tokens):
            self.cache.write(seq, position, tuple(seq.token_ids[: position + 1]))
        seq.num_cached_tokens += num_tokens
        self.manager.hash_blocks(seq, before)

    @rule(which=st.integers(0, 20), preempted=st.booleans())
    def leave(self, which, preempted):
        if self.holding:
            seq = self.holding[which % len(self.holding)]
            self._release(seq)
            if preempted:
                self.waiting.append(seq)

    def _release(self, seq):
        self.past.append(seq.token_ids)
        self.manager.deallocate(seq)
        self.holding.remove(seq)
        assert seq.block_table == []

    @rule(dice=st.integers(1, 6))
    def reset(self, dice):
        if dice == 6:
            self.manager.reset_prefix_cache()
            assert not self.manager.hash_to_block_id

    @invariant()
    def books_are_right(self):
        check_blocks(self.manager, self.holding)
        self.cache.check_findable()
        for seq in self.holding:
            self.cache.check_sequence(seq)

    def teardown(self):
        if hasattr(self, "manager"):
            for seq in self.holding:
                self.manager.deallocate(seq)
            check_blocks(self.manager, [])


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=300, stateful_step_count=40, deadline=None, print_blob=True)
