"""BlockManager: who owns which block, from the free list and back to it."""

import pytest
from blocks import SIZE, decode, sequence, start, tokens
from invariants import check_blocks

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

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
    assert manager.can_allocate(sequence(tokens(3))) >= 0
    assert manager.can_allocate(sequence(tokens(3, 1))) < 0
    start(manager, tokens(1, first=50))
    assert manager.can_allocate(sequence(tokens(2))) >= 0
    assert manager.can_allocate(sequence(tokens(2, 1))) < 0


def test_can_allocate_discounts_blocks_that_a_running_sequence_shares():
    manager = BlockManager(4, SIZE)
    start(manager, tokens(2, 1))
    assert manager.can_allocate(sequence(tokens(3))) >= 0
    assert manager.can_allocate(sequence(tokens(3, 1))) < 0
    assert manager.can_allocate(sequence(tokens(2, first=50))) < 0


def test_can_allocate_counts_shared_blocks_that_are_free_only_once():
    manager = BlockManager(4, SIZE)
    holder = start(manager, tokens(2, first=50))
    old = start(manager, tokens(1, 1))
    manager.deallocate(old)
    # Two blocks are free, one of them the prompt's first: it is shared and taken out of the free list.
    assert manager.can_allocate(sequence(tokens(2))) >= 0
    assert manager.can_allocate(sequence(tokens(2, 1))) < 0
    seq = start(manager, tokens(2))
    assert not manager.free_block_ids
    check_blocks(manager, [holder, seq])


def test_can_allocate_changes_nothing():
    manager = BlockManager(4, SIZE)
    manager.deallocate(start(manager, tokens(2, 1)))
    free, known = list(manager.free_block_ids), dict(manager.hash_to_block_id)
    seq = sequence(tokens(2, 2))
    assert manager.can_allocate(seq) >= 0
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
    assert start(manager, tokens(3, 1)).completion.num_shared_tokens == 2 * SIZE


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
