"""BlockManager: which prefixes are found again, and that nothing is before it is written or after it is gone."""

import pytest
from blocks import SIZE, allocate, compute, decode, sequence, start, tokens
from invariants import check_blocks

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.prefix_cache import reset_prefix_cache
from nanovllm.engine.sequence import Sequence


def test_prompts_of_one_batch_do_not_share_what_is_not_written():
    manager = BlockManager(8, SIZE)
    a, b = sequence(tokens(2, 1)), sequence(tokens(2, 1))
    allocate(manager, a)
    assert manager.hash_to_block_id == {}
    allocate(manager, b)
    assert not set(a.block_table) & set(b.block_table)
    assert (a.num_cached_tokens, b.num_cached_tokens) == (0, 0)
    compute(manager, a)
    compute(manager, b)
    # The first to be written stays the one that is found.
    c = sequence(tokens(2, 1))
    allocate(manager, c)
    assert c.block_table[:2] == a.block_table[:2]
    check_blocks(manager, [a, b, c])


def side_by_side(manager: BlockManager, token_ids: list[int]) -> tuple[Sequence, Sequence]:
    """Two sequences with the same tokens, computed in one batch and so in blocks of their own."""
    a, b = sequence(token_ids), sequence(token_ids)
    allocate(manager, a)
    allocate(manager, b)
    compute(manager, a)
    compute(manager, b)
    return a, b


def test_what_one_of_two_equals_adds_is_found_behind_the_others_blocks():
    manager = BlockManager(12, SIZE)
    a, b = side_by_side(manager, tokens(2))
    for token in range(50, 50 + SIZE):
        decode(manager, b, token)
    c = sequence([*b.token_ids, 1])
    allocate(manager, c)
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
    allocate(manager, a)
    found = []
    for chunk in (3, 1, 6, 3):
        compute(manager, a, chunk)
        probe = sequence(tokens(3, 1))
        allocate(manager, probe)
        found.append(probe.num_cached_tokens // SIZE)
        manager.deallocate(probe)
    assert found == [0, 1, 2, 3]


def test_a_block_that_decoding_fills_is_found_by_the_next_prompt():
    manager = BlockManager(8, SIZE)
    seq = start(manager, tokens(1, 2))
    for token in (90, 91, 92):
        decode(manager, seq, token)
    follow_up = sequence([*seq.token_ids, 1, 2])
    allocate(manager, follow_up)
    assert follow_up.num_cached_tokens == 2 * SIZE
    assert follow_up.block_table[:2] == seq.block_table[:2]


def test_a_full_block_whose_last_token_is_not_yet_computed_is_not_found():
    manager = BlockManager(8, SIZE)
    seq = start(manager, tokens(1, 3))
    seq.append_token(50)
    manager.may_append(seq)
    other = sequence([*seq.token_ids, 1])
    allocate(manager, other)
    assert other.num_cached_tokens == SIZE


@pytest.mark.parametrize(("extra", "cached_blocks"), [(0, 2), (1, 3), (3, 3)])
def test_at_least_one_token_is_left_to_compute(extra, cached_blocks):
    manager = BlockManager(12, SIZE)
    start(manager, tokens(3, 3))
    seq = sequence(tokens(3, extra))
    allocate(manager, seq)
    assert seq.num_cached_tokens == cached_blocks * SIZE < seq.num_tokens
    assert manager.blocks[seq.block_table[-1]].ref_count == 1


def test_a_known_prompt_of_exactly_one_block_is_computed_in_a_block_of_its_own():
    manager = BlockManager(4, SIZE)
    a = start(manager, tokens(1))
    b = sequence(tokens(1))
    allocate(manager, b)
    assert b.num_cached_tokens == 0
    assert a.block_table != b.block_table


def test_the_first_miss_ends_sharing():
    manager = BlockManager(12, SIZE)
    a = start(manager, tokens(3, 1))
    middle_differs = tokens(3, 1)
    middle_differs[SIZE] = 99
    b = sequence(middle_differs)
    allocate(manager, b)
    assert b.num_cached_tokens == SIZE
    assert b.block_table[0] == a.block_table[0]
    assert not set(b.block_table[1:]) & set(a.block_table)


def test_a_block_is_found_only_behind_its_own_prefix():
    manager = BlockManager(12, SIZE)
    start(manager, tokens(2, 1))
    seq = sequence([*tokens(1, first=50), *tokens(1, first=SIZE), 1])
    allocate(manager, seq)
    assert seq.num_cached_tokens == 0


def test_freed_blocks_are_found_again_until_they_are_reused():
    manager = BlockManager(4, SIZE)
    old = start(manager, tokens(2, 1))
    table = old.block_table
    manager.deallocate(old)
    assert not manager.used_block_ids

    again = start(manager, tokens(2, 1))
    assert again.block_table[:2] == table[:2]
    assert again.completion.num_shared_tokens == 2 * SIZE
    check_blocks(manager, [again])
    manager.deallocate(again)

    # The whole cache is taken by another prompt: nothing of the first is left, and no stale hash.
    other = start(manager, tokens(3, 1, first=50))
    assert len(manager.hash_to_block_id) == 3
    check_blocks(manager, [other])
    manager.deallocate(other)
    seq = sequence(tokens(2, 1))
    allocate(manager, seq)
    assert seq.num_cached_tokens == 0


def test_reuse_removes_the_stale_hash_when_the_block_is_taken_and_not_later():
    manager = BlockManager(2, SIZE)
    manager.deallocate(start(manager, tokens(1, 1)))
    hash = BlockManager.compute_hash(tokens(1))
    assert hash in manager.hash_to_block_id
    taker = sequence(tokens(1, 1, first=50))
    allocate(manager, taker)
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
    allocate(manager, seq)
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
    assert seq.completion.num_shared_tokens == 0
    manager.deallocate(seq)
    allocate(manager, seq)
    assert (seq.completion.num_shared_tokens, seq.num_cached_tokens) == (0, 2 * SIZE)


def test_without_prefix_caching_nothing_is_ever_shared():
    manager = BlockManager(8, SIZE, enable_prefix_caching=False)
    a = start(manager, tokens(2, 1))
    b = start(manager, tokens(2, 1))
    assert not set(a.block_table) & set(b.block_table)
    assert (b.completion.num_shared_tokens, manager.hash_to_block_id) == (0, {})
    check_blocks(manager, [a, b])
    assert manager.can_allocate(sequence(tokens(2, 1))) < 0
    manager.deallocate(a)
    assert start(manager, tokens(2, 1)).completion.num_shared_tokens == 0


def test_reset_forgets_every_prefix_and_leaves_the_owners_alone():
    manager = BlockManager(12, SIZE)
    freed = start(manager, tokens(2, 1, first=50))
    manager.deallocate(freed)
    running = start(manager, tokens(2, 1))
    table = list(running.block_table)
    reset_prefix_cache(manager)
    assert manager.hash_to_block_id == {}
    assert {block.hash for block in manager.blocks} == {-1}
    assert running.block_table == table
    for prompt in (tokens(2, 1), tokens(2, 1, first=50)):
        seq = start(manager, prompt)
        assert seq.completion.num_shared_tokens == 0
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
    reset_prefix_cache(manager)
    manager.deallocate(start(manager, tokens(2, 1)))
    assert start(manager, tokens(2, 1)).completion.num_shared_tokens == 2 * SIZE


def test_a_prompt_computed_in_full_is_found_in_full():
    """Also where an entry behind a prefix that is no longer known, and so of use to nobody, has its hash."""
    manager = BlockManager(12, SIZE)
    half_way = sequence(tokens(2, 1))
    allocate(manager, half_way)
    compute(manager, half_way, SIZE)
    reset_prefix_cache(manager)
    compute(manager, half_way)
    manager.deallocate(half_way)

    manager.deallocate(start(manager, tokens(2, 1)))
    assert start(manager, tokens(2, 1)).completion.num_shared_tokens == 2 * SIZE
