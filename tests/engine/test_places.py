"""A store beside the paged KV cache: a state of fixed size for each sequence, in a limited number of slots."""

import pytest
from schedulers import SIZE, add, make_scheduler, step

from nanovllm.engine.places import Places


class Slots(Places):
    """Slots of a state, each of one sequence."""

    def __init__(self, num_slots: int):
        self.free, self.owners = list(range(num_slots)), {}

    def can_allocate(self, seq):
        assert seq.seq_id not in self.owners
        return bool(self.free)

    def allocate(self, seq):
        assert seq.seq_id not in self.owners
        self.owners[seq.seq_id] = self.free.pop()

    def deallocate(self, seq):
        if seq.seq_id in self.owners:
            self.free.append(self.owners.pop(seq.seq_id))


class SnapshotSlots(Slots):
    """Knows the state after the first block of any prefix."""

    def num_reusable_tokens(self, seq, num_tokens):
        return min(num_tokens, SIZE)


def make(num_slots: int, slots: type[Slots] = Slots, **options):
    scheduler = make_scheduler(make_places=[lambda: slots(num_slots)], **options)
    (places,) = scheduler.block_manager.others
    return scheduler, places


def test_a_sequence_begins_only_with_a_slot_and_its_end_gives_it_back():
    scheduler, slots = make(2)
    seqs = [add(scheduler, 5, max_tokens=1 + i) for i in range(4)]
    begun, _, finished = step(scheduler)
    assert begun == seqs[:2]
    assert finished == seqs[:1]
    assert set(slots.owners) == {seqs[1].seq_id}
    begun, is_prefill, _ = step(scheduler)
    assert (begun, is_prefill) == ([seqs[2]], True), "the slot is another's now"
    while not scheduler.is_finished():
        step(scheduler)
    assert (len(slots.free), slots.owners) == (2, {})
    assert [seq.num_completion_tokens for seq in seqs] == [1, 2, 3, 4]


def test_preemption_gives_the_slot_back():
    scheduler, slots = make(3, num_blocks=6, max_model_len=24)
    seqs = [add(scheduler, 7, max_tokens=12) for _ in range(3)]
    held = set()
    while not scheduler.is_finished():
        step(scheduler)
        running = {seq.seq_id for seq in scheduler.running} | {s.seq_id for s in scheduler.waiting if s.block_table}
        assert set(slots.owners) == running, "who runs has a slot, and nobody else"
        held |= {(seq_id, slot) for seq_id, slot in slots.owners.items()}
    assert scheduler.num_preemptions > 0
    assert len(slots.free) == 3
    assert all(seq.num_completion_tokens == 12 for seq in seqs)


def test_a_prompt_in_chunks_keeps_its_slot():
    scheduler, slots = make(1, max_num_batched_tokens=16)
    seq = add(scheduler, 40, max_tokens=2)
    step(scheduler)
    assert scheduler.waiting[0] is seq
    assert set(slots.owners) == {seq.seq_id}
    while not scheduler.is_finished():
        step(scheduler)
    assert slots.free == [0]


@pytest.mark.parametrize(("slots", "num_shared"), [(Slots, 0), (SnapshotSlots, SIZE)])
def test_a_prefix_is_shared_as_far_as_its_state_is_known(slots, num_shared):
    scheduler, _ = make(4, slots)
    prompt = list(range(100, 100 + 3 * SIZE + 1))
    for expected in (0, num_shared):
        seq = add(scheduler, prompt, max_tokens=1)
        step(scheduler)
        assert seq.num_shared_tokens == expected


def test_abort_and_reset_give_slots_back():
    scheduler, slots = make(2)
    seqs = [add(scheduler, 5) for _ in range(3)]
    step(scheduler)
    scheduler.abort([seqs[0].request_id, seqs[2].request_id])
    assert set(slots.owners) == {seqs[1].seq_id}
    scheduler.reset()
    assert len(scheduler.block_manager.others[0].free) == 2
