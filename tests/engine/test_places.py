"""A store beside the paged KV cache: a state of fixed size for each sequence, in a limited number of slots."""

from itertools import pairwise

import pytest
import torch
from checkpoints import greedy, make_checkpoint, make_llm, random_prompt
from schedulers import SIZE, add, make_scheduler, step

from nanovllm.engine.places import Slots
from nanovllm.layers.stores.store import Store
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.utils.context import get_context


class SnapshotSlots(Slots):
    """Knows the state after the first block of any prefix."""

    def num_reusable_tokens(self, seq, num_tokens):
        return min(num_tokens, SIZE)


def make(num_slots: int, slots: type[Slots] = Slots, **options):
    return make_scheduler(make_places=[lambda: slots(num_slots)], **options)


def holders(scheduler, num_slots: int) -> set[int]:
    """Ids of the sequences that have a slot, which nobody shares."""
    seqs = [seq for seq in (*scheduler.waiting, *scheduler.running) if seq.places]
    slots = [slot for seq in seqs for slot in seq.places]
    assert len(set(slots)) == len(slots) == len(seqs)
    assert set(slots) <= set(range(num_slots))
    return {seq.seq_id for seq in seqs}


def test_a_sequence_begins_only_with_a_slot_and_its_end_gives_it_back():
    scheduler = make(2)
    seqs = [add(scheduler, 5, max_tokens=1 + i) for i in range(4)]
    begun, _, finished = step(scheduler)
    assert begun == seqs[:2]
    assert finished == seqs[:1]
    assert holders(scheduler, 2) == {seqs[1].seq_id}
    begun, is_prefill, _ = step(scheduler)
    assert (begun, is_prefill) == ([seqs[2]], True), "the slot is another's now"
    while not scheduler.is_finished():
        step(scheduler)
    assert [seq.num_completion_tokens for seq in seqs] == [1, 2, 3, 4]
    assert step_of_two(scheduler), "all slots are free again"


def step_of_two(scheduler) -> bool:
    add(scheduler, 5, max_tokens=1)
    add(scheduler, 5, max_tokens=1)
    return len(step(scheduler)[0]) == 2


def test_preemption_gives_the_slot_back():
    scheduler = make(3, num_blocks=6, max_model_len=24)
    seqs = [add(scheduler, 7, max_tokens=12) for _ in range(3)]
    while not scheduler.is_finished():
        step(scheduler)
        has_blocks = {seq.seq_id for seq in (*scheduler.waiting, *scheduler.running) if seq.block_table}
        assert holders(scheduler, 3) == has_blocks, "who has blocks has a slot, and nobody else"
    assert scheduler.num_preemptions > 0
    assert all(seq.num_completion_tokens == 12 for seq in seqs)


def test_a_prompt_in_chunks_keeps_its_slot():
    scheduler = make(1, max_num_batched_tokens=16)
    seq = add(scheduler, 40, max_tokens=2)
    for _ in range(2):
        step(scheduler)
        assert scheduler.waiting[0] is seq
        assert seq.places == (0,)
    while not scheduler.is_finished():
        step(scheduler)
    assert seq.places == ()


@pytest.mark.parametrize(("slots", "num_shared"), [(Slots, 0), (SnapshotSlots, SIZE)])
def test_a_prefix_is_shared_as_far_as_its_state_is_known(slots, num_shared):
    scheduler = make(4, slots)
    prompt = list(range(100, 100 + 3 * SIZE + 1))
    for expected in (0, num_shared):
        seq = add(scheduler, prompt, max_tokens=1)
        step(scheduler)
        assert seq.num_shared_tokens == expected


def test_abort_and_reset_give_slots_back():
    scheduler = make(2)
    seqs = [add(scheduler, 5) for _ in range(3)]
    step(scheduler)
    scheduler.abort([seqs[0].request_id, seqs[2].request_id])
    assert holders(scheduler, 2) == {seqs[1].seq_id}
    scheduler.reset()
    assert step_of_two(scheduler)


class Counts(Store):
    """A state that counts its sequence's tokens, [slots]."""

    name = "counts"
    bytes_per_sequence = 8

    def __init__(self):
        self.counts = None
        self.num_freed = 0

    def allocate(self, num_blocks, num_seqs, is_shared=False):
        self.counts = torch.full((num_seqs,), -1)

    def free(self):
        self.counts = None
        self.num_freed += 1

    def count(self, module, args):
        """Before a forward pass: every sequence's tokens begin where its state ends."""
        _, positions = args
        context = get_context()
        if context.is_prefill:
            bounds = context.cu_seqlens_q.tolist()
            spans = [positions[start:end].tolist() for start, end in pairwise(bounds)]
        else:
            spans = [[position] for position in positions.tolist()]
        for (slot,), span in zip(context.places.tolist(), spans, strict=True):
            if span[0] == 0:
                self.counts[slot] = 0
            assert self.counts[slot] == span[0]
            self.counts[slot] += len(span)


@pytest.mark.parametrize("overlap_steps", [True, False])
def test_an_engine_gives_each_sequence_a_slot(tmp_path, monkeypatch, overlap_steps):
    """With chunks, preemptions, samples of one prompt and requests that share a beginning."""
    make_stores, counts = DecoderForCausalLM.make_stores, Counts()
    path = make_checkpoint(tmp_path)
    beginning = random_prompt(40, seed=1)
    prompts = [random_prompt(n, seed=n) for n in (3, 90, 17, 50)] + [[*beginning, n] for n in range(4)]
    options = {"num_kvcache_blocks": 12, "max_model_len": 160, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    with make_llm(path, **options) as llm:
        expected = [out["token_ids"] for out in llm.generate(prompts, greedy(40), use_tqdm=False)]
    monkeypatch.setattr(DecoderForCausalLM, "make_stores", lambda *args: [*make_stores(*args), counts])
    with make_llm(path, **options, overlap_steps=overlap_steps) as llm:
        assert len(counts.counts) == 4
        llm.model_runner.model.model.register_forward_pre_hook(counts.count)
        found = [out["token_ids"] for out in llm.generate(prompts, greedy(40), use_tqdm=False)]
        assert found == expected
        assert llm.stats()["preemptions"] > 0
    assert counts.counts is None
    assert counts.num_freed == 1
