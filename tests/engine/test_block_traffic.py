"""BlockManager: random traffic, in which every slot holds what its readers believe."""

from blocks import weaken
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from invariants import SimulatedCache, check_blocks

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.prefix_cache import reset_prefix_cache
from nanovllm.engine.sequence import Sequence


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
            seq = Sequence(prompt)
            seq.block_size = self.block_size
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
        num_shared = self.manager.can_allocate(seq)
        if num_shared < 0:
            assert seq.num_blocks > num_free
            return False
        again = seq.completion.num_shared_tokens >= 0
        self.manager.allocate(seq, num_shared)
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
        seq.num_scheduled_tokens = num_tokens
        self.manager.hash_blocks(seq)
        seq.num_cached_tokens += num_tokens
        seq.num_scheduled_tokens = 0

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
            reset_prefix_cache(self.manager)
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
TestTraffic.settings = settings(max_examples=300, stateful_step_count=40, print_blob=True)
