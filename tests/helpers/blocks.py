"""Small sequences, and what the scheduler and a step do for them with a BlockManager, without either."""

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

SIZE = 4


def tokens(num_blocks: int, extra: int = 0, first: int = 0) -> list[int]:
    """Distinct tokens: num_blocks full blocks and `extra` more."""
    return list(range(first, first + num_blocks * SIZE + extra))


def sequence(token_ids: list[int]) -> Sequence:
    seq = Sequence(token_ids)
    seq.block_size = SIZE
    return seq


def compute(manager: BlockManager, seq: Sequence, num_tokens: int | None = None) -> None:
    """What a step does to the block manager: num_tokens (all that are left) more tokens are in the cache."""
    seq.num_scheduled_tokens = seq.num_tokens - seq.num_cached_tokens if num_tokens is None else num_tokens
    manager.hash_blocks(seq)
    seq.num_cached_tokens += seq.num_scheduled_tokens
    seq.num_scheduled_tokens = 0


def allocate(manager: BlockManager, seq: Sequence) -> None:
    num_shared = manager.can_allocate(seq)
    assert num_shared >= 0
    manager.allocate(seq, num_shared)


def start(manager: BlockManager, token_ids: list[int]) -> Sequence:
    """Allocate and compute a new sequence."""
    seq = sequence(token_ids)
    allocate(manager, seq)
    compute(manager, seq)
    return seq


def decode(manager: BlockManager, seq: Sequence, token: int) -> None:
    seq.append_token(token)
    assert manager.can_append(seq)
    manager.may_append(seq)
    compute(manager, seq)


def weaken(manager: BlockManager, num_values: int) -> None:
    """Leave compute_hash only num_values different results."""
    manager.compute_hash = lambda token_ids, prefix=-1: BlockManager.compute_hash(token_ids, prefix) % num_values


def collide(manager: BlockManager, *blocks: list[int]) -> None:
    """Give blocks of these tokens one hash, whatever stands before them."""
    manager.compute_hash = lambda token_ids, prefix=-1: (
        7 if list(token_ids) in blocks else BlockManager.compute_hash(token_ids, prefix)
    )
