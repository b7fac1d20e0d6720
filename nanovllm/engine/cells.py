"""NoCells: what the scheduler asks of the stores beside the KV cache, where a model has none."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AbstractSequence
from typing import Protocol

from nanovllm.engine.sequence import Sequence


class KnownBlock(Protocol):
    """What is asked of a `Block`."""

    content_id: int


class KnownBlocks(Protocol):
    """What is asked of a BlockManager."""

    block_size: int
    enable_prefix_caching: bool
    lost_content_ids: list[int]

    @property
    def blocks(self) -> AbstractSequence[KnownBlock]: ...

    def known_blocks(self, seq: Sequence) -> list[int]: ...

    def max_shared_blocks(self, seq: Sequence) -> int: ...

    def block_hash(self, seq: Sequence, i: int) -> int: ...


class NoCells:
    """The sequences' cells in the stores beside the KV cache, for a model without such stores. So nobody has to ask
    whether there are any. `features.states.cells.Cells` is for a model
    that has some.

    Each method is called once for a step, or once for a sequence that begins or ends. manager: the BlockManager.

    Attributes:
        chunk: a prefill's kernels compute the states once every `chunk` new tokens. A shorter chunk of a prompt ends
            where no state can be kept.
    """

    chunk = 0

    def begin_step(self, manager: KnownBlocks, takes_snapshots: bool) -> None:
        """Prompts are about to be scheduled. takes_snapshots: whether by the kernels of a prefill."""
        manager.lost_content_ids.clear()

    def can_allocate(self) -> bool:
        """Whether one more sequence can begin."""
        return True

    def begin(self, seq: Sequence, manager: KnownBlocks, shared: list[int]) -> None:
        """Give a sequence a cell with its blocks. shared: ids of the blocks that it need not compute."""

    def end(self, seq: Sequence) -> None:
        """Take it back, if there is one."""

    def reusable(self, manager: KnownBlocks, block_ids: list[int]) -> list[int]:
        """Those of a sequence's known blocks that it need not compute."""
        return block_ids

    def is_worth_waiting(
        self, manager: KnownBlocks, seq: Sequence, num_shared: int, scheduled: Mapping[int, Sequence]
    ) -> bool:
        """Whether after this step the sequence can begin behind blocks that it computes. scheduled: their hashes, and
        for whom they are computed. num_shared: the blocks that the sequence could share now."""
        return True

    def align_chunk(self, seq: Sequence) -> None:
        """Let the chunk of a prompt that is scheduled end where its state can be kept."""

    def request_snapshots(self, manager: KnownBlocks, seqs: Iterable[Sequence]) -> None:
        """The step that has been scheduled computes these prompts: have it keep states that others may begin with."""

    def keep(self, seq: Sequence, manager: KnownBlocks) -> None:
        """The step that computes the sequence's newest blocks has been launched."""

    def lend(self, seq: Sequence, count: int) -> int:
        """Make room for the states after `count` proposed tokens, or for as many as there is room for. Returns the
        number."""
        return count

    def commit(self, seq: Sequence, num_accepted: int) -> None:
        """The first num_accepted proposed tokens were right."""

    def forget(self, content_id: int) -> None:
        """What is known of the prefix that ends with this content (`Block.content_id`) is wrong."""

    def forget_all(self) -> None:
        """No prefix is known any more."""
