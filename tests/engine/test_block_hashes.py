"""BlockManager: the hash that a block is stored under, and that a collision is never taken for a hit."""

import struct

import pytest
import xxhash
from blocks import SIZE, allocate, collide, compute, sequence, start, tokens, weaken
from invariants import check_blocks

from nanovllm.engine.block_manager import Block, BlockManager
from nanovllm.engine.prefix_cache import reset_prefix_cache

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


# Collisions


@pytest.mark.parametrize("num_values", [1, 2, 3])
def test_a_collision_is_a_miss(num_values):
    manager = BlockManager(60, SIZE)
    weaken(manager, num_values)
    seqs = [start(manager, tokens(1, 1, first=first)) for first in range(0, 100, 10)]
    assert all(seq.completion.num_shared_tokens == 0 for seq in seqs)
    assert len(manager.hash_to_block_id) <= num_values
    check_blocks(manager, seqs)
    manager.deallocate(seqs[0])
    check_blocks(manager, seqs[1:])


def test_equal_prompts_share_under_a_constant_hash_too():
    manager = BlockManager(8, SIZE)
    weaken(manager, 1)
    a = start(manager, tokens(1, 1))
    b = start(manager, tokens(1, 1))
    assert b.completion.num_shared_tokens == SIZE
    assert a.block_table[0] == b.block_table[0]


def test_a_collision_further_up_the_chain_is_a_miss():
    """The first blocks of two prompts differ and collide; their second blocks are equal, and so are its hashes."""
    manager = BlockManager(40, SIZE)
    front, other_front, back = tokens(1), tokens(1, first=50), tokens(1, first=100)
    collide(manager, front, other_front)
    seq = sequence([*front, *back, 1])
    allocate(manager, seq)
    compute(manager, seq, SIZE)
    # Take the front out of the cache's memory but not the back: `back` is now known, behind `front` alone.
    reset_prefix_cache(manager)
    compute(manager, seq)
    other = start(manager, [*other_front, *back, 1])
    assert other.completion.num_shared_tokens == 0
    third = start(manager, [*other_front, *back, 2])
    assert third.block_table[0] == other.block_table[0]
    assert third.block_table[1] != seq.block_table[1]
    check_blocks(manager, [seq, other, third])


def test_a_collision_in_a_reused_block_is_a_miss():
    """As above, but the new front takes the very block that the old one was in, while `back` stays known."""
    manager = BlockManager(6, SIZE)
    front, other_front, back = tokens(1), tokens(1, first=50), tokens(1, first=100)
    collide(manager, front, other_front)
    a, b = sequence([*front, *back, 1]), sequence([*front, *back, 1])
    allocate(manager, a)
    allocate(manager, b)
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
    allocate(manager, third)
    assert third.block_table[0] == front_block
    assert third.num_cached_tokens == SIZE
    check_blocks(manager, [b, other, third])
