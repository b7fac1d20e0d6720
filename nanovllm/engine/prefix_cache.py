"""What the prefix cache can do beyond finding blocks: wait for one that is being computed, and forget them."""

from collections.abc import Mapping

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence


def num_findable_tokens(manager: BlockManager, seq: Sequence) -> int:
    """Tokens that `allocate` would find."""
    return len(manager.shared_blocks(seq)) * manager.block_size


def hashes_scheduled(manager: BlockManager, seq: Sequence) -> list[int]:
    """Hashes of the blocks that the sequence's scheduled tokens fill."""
    if not manager.enable_prefix_caching:
        return []
    first = seq.num_cached_tokens // manager.block_size
    end = (seq.num_cached_tokens + seq.num_scheduled_tokens) // manager.block_size
    return [manager.block_hash(seq, i) for i in range(first, end)]


def is_worth_waiting(manager: BlockManager, seq: Sequence, scheduled: Mapping[int, Sequence]) -> bool:
    """Whether the first block that the cache lacks is among `scheduled`, hashes of blocks that this step computes, and
    for whom. After this step the sequence can share it instead of computing it again."""
    num_shared, max_shared = len(manager.shared_blocks(seq)), manager.max_shared_blocks(seq)
    if num_shared == max_shared or manager.block_hash(seq, num_shared) not in scheduled:
        return False
    return manager.cells.is_worth_waiting(manager, seq, num_shared, scheduled)


def reset_prefix_cache(manager: BlockManager) -> None:
    """Forget every known prefix; blocks in use stay with their owners."""
    manager.hash_to_block_id.clear()
    manager.cells.forget_all()
    for block in manager.blocks:
        block.update(-1, [])


def forget_blocks(manager: BlockManager, seq: Sequence) -> None:
    """Take the free blocks that hold a sequence's tokens out of the cache."""
    for hash in seq.block_hashes:
        block_id = manager.hash_to_block_id.get(hash)
        if block_id is None:
            continue
        manager.cells.forget(manager.blocks[block_id].content_id)
        if manager.blocks[block_id].ref_count == 0:
            del manager.hash_to_block_id[hash]
            manager.blocks[block_id].update(-1, [])
