"""A store beside the paged KV cache: a state of fixed size for each sequence, in a limited number of cells."""

from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from checkpoints import greedy, make_checkpoint, make_llm, random_prompt
from hypothesis import given
from hypothesis import strategies as st
from invariants import check_scheduler
from schedulers import SIZE, add, make_scheduler, postprocess, step

from nanovllm.engine.features.states.cells import Cells
from nanovllm.engine.prefix_cache import reset_prefix_cache
from nanovllm.layers.stores.store import NUM_SNAPSHOTS, Store
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.utils.context import get_context


def make(num_cells: int, **options):
    return make_scheduler(make_cells=partial(Cells, num_cells, SIZE), **options)


def holders(scheduler) -> set[int]:
    """Ids of the sequences that have a cell."""
    return {seq.seq_id for seq in (*scheduler.waiting, *scheduler.running) if seq.cell is not None}


def run(scheduler) -> None:
    while not scheduler.is_finished():
        step(scheduler)


def test_a_sequence_begins_only_with_a_cell_and_its_end_gives_it_back():
    scheduler = make(2)
    seqs = [add(scheduler, 3, max_tokens=1 + i) for i in range(4)]
    begun, _, finished = step(scheduler)
    assert begun == seqs[:2]
    assert finished == seqs[:1]
    assert holders(scheduler) == {seqs[1].seq_id}
    begun, is_prefill, _ = step(scheduler)
    assert (begun, is_prefill) == ([seqs[2]], True), "the cell is another's now"
    run(scheduler)
    assert [seq.num_completion_tokens for seq in seqs] == [1, 2, 3, 4]
    assert step_of_two(scheduler), "all cells are free again"


def step_of_two(scheduler) -> bool:
    add(scheduler, 3, max_tokens=1)
    add(scheduler, 3, max_tokens=1)
    return len(step(scheduler)[0]) == 2


def test_preemption_gives_the_cell_back():
    scheduler = make(3, num_blocks=6, max_model_len=24)
    seqs = [add(scheduler, 7, max_tokens=12) for _ in range(3)]
    while not scheduler.is_finished():
        step(scheduler)
        has_blocks = {seq.seq_id for seq in (*scheduler.waiting, *scheduler.running) if seq.block_table}
        assert holders(scheduler) == has_blocks, "who has blocks has a cell, and nobody else"
    assert scheduler.num_preemptions > 0
    assert all(seq.num_completion_tokens == 12 for seq in seqs)


def test_a_prompt_in_chunks_keeps_its_cell():
    scheduler = make(1, max_num_batched_tokens=16)
    seq = add(scheduler, 40, max_tokens=2)
    for _ in range(2):
        step(scheduler)
        assert scheduler.waiting[0] is seq
        assert seq.cell.index == 0
    run(scheduler)
    assert seq.cell is None


def test_abort_and_reset_give_cells_back():
    scheduler = make(2)
    seqs = [add(scheduler, 3) for _ in range(3)]
    step(scheduler)
    scheduler.abort([seqs[0].request.request_id, seqs[2].request.request_id])
    assert holders(scheduler) == {seqs[1].seq_id}
    scheduler.reset()
    assert step_of_two(scheduler)


# -- snapshots of states --------------------------------------------------------------------------------------------

BEGINNING = list(range(100, 100 + 2 * SIZE))


def ask(scheduler, prompt: list[int]):
    """A request alone, to its end: how many tokens it need not compute."""
    seq = add(scheduler, prompt, max_tokens=1)
    run(scheduler)
    return seq.completion.num_shared_tokens


def test_the_end_of_a_prompt_is_kept():
    scheduler = make(4)
    assert ask(scheduler, [*BEGINNING, 1]) == 0
    assert ask(scheduler, [*BEGINNING, 1]) == 2 * SIZE
    assert ask(scheduler, [*BEGINNING, 2, 3, 4, 5, 6]) == 2 * SIZE
    assert ask(scheduler, [*BEGINNING, 2, 3, 4, 5, 6]) == 3 * SIZE, "and that of the longer one"


def test_of_a_prompt_of_whole_blocks_the_state_before_the_last_one_is_kept():
    """With the state at its end, the same prompt would have no token left to compute, of which it needs the logits."""
    scheduler = make(4)
    assert [ask(scheduler, BEGINNING), ask(scheduler, BEGINNING)] == [0, SIZE]


def test_the_first_chunk_alone_reads_the_snapshot():
    """The chunks after it go on from the sequence's own state."""
    scheduler = make(4, max_num_batched_tokens=2 * SIZE)
    ask(scheduler, [*BEGINNING, 1])
    seq = add(scheduler, [*BEGINNING, *range(2, 2 + 3 * SIZE)], max_tokens=1)
    reads = []
    while not scheduler.is_finished():
        seqs, _ = scheduler.schedule()
        reads.append(seq.cell.cells_of_step(seq.num_cached_tokens)[0])
        source, cell = seq.cell.source, seq.cell.index
        postprocess(scheduler, seqs, [900])
    assert reads == [source, cell]
    assert source != cell


def test_a_beginning_is_kept_when_it_comes_a_second_time():
    """The keys and values of two blocks are known, but the state only at the end of the first prompt."""
    scheduler = make(4)
    tails = [list(range(1000 * i, 1000 * i + SIZE + 1)) for i in range(4)]
    assert [ask(scheduler, BEGINNING + tail) for tail in tails] == [0, 0, 2 * SIZE, 2 * SIZE]


def test_requests_that_wait_share_a_beginning_at_once():
    scheduler = make(8)
    tails = [list(range(1000 * i, 1000 * i + SIZE + 1)) for i in range(4)]
    seqs = [add(scheduler, BEGINNING + tail, max_tokens=1) for tail in tails]
    assert step(scheduler)[0] == seqs[:1], "the others wait for its state"
    assert step(scheduler)[0] == seqs[1:]
    assert [seq.completion.num_shared_tokens for seq in seqs] == [0, *[2 * SIZE] * 3]


def test_who_shares_less_gets_an_earlier_snapshot():
    scheduler = make(8)
    prompts = [[*BEGINNING, 1, 2, 3, 4, 5, 6], [*BEGINNING, 1, 2, 3, 4, 7, 8], [*BEGINNING, 9, 9, 9, 9, 9]]
    seqs = [add(scheduler, prompt, max_tokens=1) for prompt in prompts]
    step(scheduler)
    step(scheduler)
    assert [seq.completion.num_shared_tokens for seq in seqs] == [0, 2 * SIZE, 2 * SIZE]


def test_nobody_waits_for_a_snapshot_that_will_not_be():
    scheduler = make_scheduler(make_cells=partial(Cells, 8, 64))  # Prompts are shorter than the kernels' chunks.
    seqs = [add(scheduler, [*BEGINNING, n], max_tokens=1) for n in range(3)]
    assert step(scheduler)[0] == seqs
    assert [seq.completion.num_shared_tokens for seq in seqs] == [0, 0, 0]
    scheduler = make(2)  # The first one has a cell, and the second cell is for its snapshot.
    seqs = [add(scheduler, [*BEGINNING, n], max_tokens=9) for n in range(3)]
    run(scheduler)
    assert all(seq.num_completion_tokens == 9 for seq in seqs)


def test_the_snapshot_used_longest_ago_is_dropped():
    scheduler = make(4)
    prompts = [[*range(1000 * i, 1000 * i + SIZE), 1] for i in range(1, 4)]
    for prompt in prompts:  # Beside the sequence's own cell there are three.
        assert ask(scheduler, prompt) == 0
    assert ask(scheduler, prompts[0]) == SIZE
    assert ask(scheduler, list(range(SIZE + 1))) == 0
    assert [ask(scheduler, prompt) for prompt in (prompts[0], prompts[2])] == [SIZE, SIZE]
    assert ask(scheduler, prompts[1]) == 0


def test_sequences_come_before_snapshots():
    scheduler = make(3)
    ask(scheduler, [*BEGINNING, 1])
    seqs = [add(scheduler, 3, max_tokens=2) for _ in range(3)]
    begun = step(scheduler)[0]
    assert begun == seqs[:2], "one stays for whoever may begin with the snapshot"
    run(scheduler)
    assert scheduler.block_manager.cells.num_snapshots == 1


def test_a_snapshot_goes_with_its_blocks():
    scheduler = make(4, num_blocks=6)
    ask(scheduler, [*BEGINNING, 1])
    assert scheduler.block_manager.cells.num_snapshots == 1
    ask(scheduler, [9000 + n for n in range(5 * SIZE)])  # takes the blocks
    assert ask(scheduler, [*BEGINNING, 1]) == 0
    reset_prefix_cache(scheduler.block_manager)
    assert scheduler.block_manager.cells.num_snapshots == 0
    assert ask(scheduler, [*BEGINNING, 1]) == 0


def test_without_a_prefix_cache_there_are_no_snapshots():
    scheduler = make(4, enable_prefix_caching=False)
    assert ask(scheduler, [*BEGINNING, 1]) == ask(scheduler, [*BEGINNING, 1]) == 0
    assert scheduler.block_manager.cells.num_snapshots == 0


def test_chunks_of_a_prompt_end_where_a_snapshot_can_be_taken():
    scheduler = make_scheduler(make_cells=partial(Cells, 4, 4 * SIZE), max_num_batched_tokens=25)
    prompt = list(range(60))
    seq = add(scheduler, prompt, max_tokens=1)
    step(scheduler)
    assert seq.num_cached_tokens == 16
    run(scheduler)
    assert ask(scheduler, prompt) == 48


# -- cells for proposed tokens --------------------------------------------------------------------------------------


def test_the_state_after_the_last_accepted_token_is_kept():
    cells = Cells(6)
    seq, other = (SimpleNamespace(cell=cells.allocate(0, 0, 0)) for _ in range(2))
    for num_accepted in (0, 1, 2, 3):
        assert cells.lend(seq, 3) == 3
        own = [seq.cell.index, *seq.cell.lent]
        assert len({*own, other.cell.index}) == 5
        cells.commit(seq, num_accepted)
        assert seq.cell.index == own[num_accepted]
    assert cells.lend(seq, 9) == 4
    assert cells.lend(other, 1) == 0, "none is left"
    assert not cells.can_allocate()
    cells.commit(seq, 4)
    cells.commit(other, 0)
    assert cells.can_allocate()


def test_proposed_tokens_come_before_snapshots():
    scheduler = make(4)
    ask(scheduler, [*BEGINNING, 1])
    seq = add(scheduler, [1, 2, 3], max_tokens=9)
    step(scheduler)
    cells = scheduler.block_manager.cells
    assert cells.num_snapshots == 1
    assert cells.lend(seq, 2) == 2
    assert cells.num_snapshots == 1
    assert cells.lend(seq, 3) == 3
    assert cells.num_snapshots == 0
    scheduler.abort()
    check_scheduler(scheduler)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=40))
def test_no_cell_is_lost_or_shared(actions):
    """Sequences begin, end, propose, accept and leave snapshots, in any order."""
    cells, held = Cells(6), []
    for content_id, (action, number) in enumerate(actions, 1):
        cell = held[number % len(held)] if held else None
        if action == 0 and cells.can_allocate():
            held.append(cells.allocate(0, 0, 0))
        elif action == 1 and cell:
            held.remove(cell)
            cells.deallocate(cell)
        elif action == 2 and cell:
            assert cells.lend(SimpleNamespace(cell=cell), number) == len(cell.lent)
        elif action == 3 and cell:
            cells.commit(SimpleNamespace(cell=cell), min(number, len(cell.lent)))
        elif action == 4 and cell and cell.snapshot < 0:
            cell.snapshot = cells._take()
            if cell.snapshot >= 0:
                cells.keep_snapshot(cell, content_id)
        numbers = [*cells._free, *cells._snapshots.values()]
        numbers += [number for cell in held for number in (cell.index, *cell.lent)]
        assert sorted(numbers) == list(range(6))


class Counts(Store):
    """A state that counts its sequence's tokens, [cells]."""

    name = "counts"
    bytes_per_cell = 8

    def __init__(self):
        self.counts = None
        self.num_freed = self.num_snapshots = 0

    def allocate(self, num_blocks, num_cells, is_shared=False):
        self.counts = torch.full((num_cells,), -1)

    def free(self):
        self.counts = None
        self.num_freed += 1

    def count(self, module, args):
        """Before a forward pass: every sequence's tokens begin where its state ends."""
        _, positions = args
        context = get_context()
        if not context.is_prefill:
            for cell, position in zip(context.cells.tolist(), positions.tolist(), strict=True):
                assert self.counts[cell] == position
                self.counts[cell] += 1
            return
        bounds = context.cu_seqlens_q.tolist()
        spans = [positions[start:end].tolist() for start, end in pairwise(bounds)]
        before = [0 if cell < 0 else int(self.counts[cell]) for cell in context.cells[0].tolist()]
        assert before == [span[0] for span in spans]
        for i, (_, cell, snapshot, num_tokens) in enumerate(context.cells.T.tolist()):
            self.counts[cell] = before[i] + len(spans[i])
            if snapshot >= 0:
                self.counts[snapshot] = before[i] + num_tokens
                self.num_snapshots += 1


@pytest.mark.parametrize("overlap_steps", [True, False])
def test_an_engine_gives_each_sequence_a_cell(tmp_path, monkeypatch, overlap_steps):
    """With chunks, preemptions, samples of one prompt and requests that share a beginning."""
    make_stores, counts = DecoderForCausalLM.make_stores, Counts()
    path = make_checkpoint(tmp_path)
    beginning = random_prompt(70, seed=1)
    prompts = [random_prompt(n, seed=n) for n in (3, 90, 17, 50)] + [[*beginning, n] for n in range(4)]
    options = {"num_kvcache_blocks": 12, "max_model_len": 160, "max_num_batched_tokens": 72, "max_num_seqs": 4}
    with make_llm(path, **options) as llm:
        expected = [out["token_ids"] for out in llm.generate(prompts, greedy(40), use_tqdm=False)]
    monkeypatch.setattr(DecoderForCausalLM, "make_stores", lambda *args: [*make_stores(*args), counts])
    with make_llm(path, **options, overlap_steps=overlap_steps) as llm:
        assert len(counts.counts) == 4 + NUM_SNAPSHOTS
        llm.model_runner.model.model.register_forward_pre_hook(counts.count)
        found = [out["token_ids"] for out in llm.generate(prompts, greedy(40), use_tqdm=False)]
        assert found == expected
        assert llm.stats()["preemptions"] > 0
        assert counts.num_snapshots > 0
    assert counts.counts is None
    assert counts.num_freed == 1
