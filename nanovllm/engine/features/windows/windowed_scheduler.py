"""The scheduler and the block manager of a model whose windowed layers give blocks back."""

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.features.mixed import MixedAdmission
from nanovllm.engine.features.windows.window_blocks import WindowBlocks
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence


class WindowedBlockManager(BlockManager):
    """A BlockManager of the layers that see all tokens. What sequences have in the layers with a window is in `cells`,
    a WindowBlocks: every block is given out together with one of that kind, and only that kind gives back early."""

    cells: WindowBlocks

    def can_allocate(self, seq: Sequence, reserve: int = 0) -> int:
        num_shared = super().can_allocate(seq, reserve)
        if num_shared < 0:
            return -1
        shared = [self.blocks[self.hash_to_block_id[self.block_hash(seq, i)]].content_id for i in range(num_shared)]
        return num_shared if self.cells.has_room(seq, reserve, shared) else -1

    def can_append(self, seq: Sequence) -> bool:
        has_free = bool(self.free_block_ids) and bool(self.cells.free_block_ids)
        return has_free or seq.num_blocks <= len(seq.block_table)

    def may_append(self, seq: Sequence) -> None:
        super().may_append(seq)
        self.cells.extend(seq, len(seq.block_table))

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        room = (len(seq.block_table) + len(self.cells.free_block_ids)) * self.block_size
        super().extend(seq, min(num_tokens, room))
        self.cells.extend(seq, len(seq.block_table))

    def hash_blocks(self, seq: Sequence) -> None:
        super().hash_blocks(seq)
        self.cells.give_back(seq)


class WindowedScheduler(Scheduler):
    """A Scheduler over a WindowedBlockManager. Chunks of prompts are no longer than the windowed layers have free
    blocks for: they need all tokens of a chunk while it is computed."""

    block_manager: WindowedBlockManager

    def _schedule_prefill(self, budget: int, mixed: MixedAdmission | None = None) -> list[Sequence]:
        budget = self.block_manager.cells.limit_prefill(self.waiting[0], budget, is_alone=not self.running)
        return super()._schedule_prefill(budget, mixed)
