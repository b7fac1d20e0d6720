"""WindowBlocks: what a sequence holds in layers with a window, and what it gives back."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from invariants import FakeModel, check_scheduler
from schedulers import SIZE, add, make_scheduler

from nanovllm.engine.features.images.image_sequence import ImageSequence, PlacedImages
from nanovllm.engine.images import ImageInput
from nanovllm.engine.scheduler import MIN_CHUNK_SHARE
from nanovllm.engine.start.schedulers import WholeImagesInWindows
from nanovllm.sampling_params import SamplingParams

WINDOW = 6  # of tokens: a token sees its own block of 4 and up to two before it
BEGINNING = list(range(100, 100 + 4 * SIZE))


def make(num_window_blocks: int, num_blocks: int = 60, **options):
    return make_scheduler(num_blocks, windows=(num_window_blocks, WINDOW), **options)


def run(scheduler, watch=lambda seqs: None) -> None:
    """To the end. The model reads the blocks, and notices wrong ones. watch: is given each step's sequences."""
    model = FakeModel(scheduler, vocab_size=50)
    while not scheduler.is_finished():
        step = scheduler.schedule()
        watch(step.seqs)
        scheduler.postprocess(step.seqs, model.run(*step), step.is_prefill)
        check_scheduler(scheduler)
        model.windows.check_findable(scheduler.block_manager)


def test_a_sequence_holds_what_its_token_sees_and_no_more():
    scheduler = make(10)
    seq, held = add(scheduler, 21, max_tokens=14, ignore_eos=True), []
    run(scheduler, lambda seqs: held.append((seq.num_cached_tokens, seq.cell.num_passed, len(seq.cell.blocks))))
    assert held[0] == (0, 0, 6), "a prefill writes all tokens"
    for num_cached, num_passed, num_blocks in held[1:]:
        assert num_blocks == num_cached // SIZE + 1
        first_seen = num_cached - WINDOW + 1
        of_last_full_block = num_cached // SIZE * SIZE - WINDOW + 1  # It is given back when a block is full.
        assert of_last_full_block // SIZE <= num_passed <= first_seen // SIZE
    assert held[-1][1] == 6


def test_passed_entries_of_a_table_name_a_block_of_the_sequence():
    """A kernel that loads whole tiles may load them: another's numbers may not be finite."""
    scheduler = make(10)
    seq, tables = add(scheduler, 21, max_tokens=14, ignore_eos=True), []
    run(scheduler, lambda seqs: tables.append((seq.cell.num_passed, seq.cell.blocks)))
    assert tables[-1][0] > 0
    for num_passed, blocks in tables:
        assert blocks[:num_passed] == [blocks[num_passed]] * num_passed


def test_a_long_prompt_needs_few_blocks():
    scheduler = make(5, max_num_batched_tokens=64)
    add(scheduler, 100, max_tokens=3, ignore_eos=True)
    chunks = []
    run(scheduler, lambda seqs: chunks.append(seqs[0].num_scheduled_tokens))
    assert chunks[:2] == [3 * SIZE, 3 * SIZE], "five blocks, of which two are seen"
    assert sum(chunks) == 102


def test_no_short_chunks_while_others_run():
    """A long prompt waits until an eighth of the blocks is free, as long as others can go on."""
    scheduler = make(32, num_blocks=200, max_num_batched_tokens=128, max_num_seqs=32)
    others = [add(scheduler, 9, max_tokens=3, ignore_eos=True) for _ in range(14)]
    long, chunks, num_left = add(scheduler, 200, max_tokens=2, ignore_eos=True), [], []

    def watch(seqs):
        chunks.extend(seq.num_scheduled_tokens for seq in seqs if seq is long)
        if not chunks:
            num_left.append(len(scheduler.block_manager.cells.free_block_ids))

    run(scheduler, watch)
    assert chunks[0] >= 128 // MIN_CHUNK_SHARE
    assert 0 < num_left[-1] < 6, "there were some blocks"
    assert all(seq.is_finished for seq in others)
    assert sum(chunks) == 201


def test_both_kinds_are_short():
    """Who finds no block of either kind is preempted, and gives both back."""
    for windows, others in ((8, 60), (60, 9)):
        scheduler = make(windows, others)
        seqs = [add(scheduler, 3, max_tokens=20, ignore_eos=True) for _ in range(4)]
        run(scheduler)
        assert scheduler.num_preemptions > 0
        assert [seq.num_completion_tokens for seq in seqs] == [20] * 4
        assert sorted(scheduler.block_manager.cells.free_block_ids) == list(range(windows))


def ask(scheduler, prompt: list[int]) -> int:
    """A request alone, to its end: how many tokens it need not compute."""
    seq = add(scheduler, prompt, max_tokens=1)
    while not scheduler.is_finished():
        step = scheduler.schedule()
        scheduler.postprocess(step.seqs, [900] * len(step.seqs), step.is_prefill)
        check_scheduler(scheduler)
    return seq.completion.num_shared_tokens


def test_what_was_given_back_is_shared_until_it_is_reused():
    scheduler = make(12)
    assert ask(scheduler, [*BEGINNING, *range(20)]) == 0
    assert ask(scheduler, [*BEGINNING, 1]) == 16, "the beginning of another prompt"
    for i in range(3):  # They reuse all blocks with a window, and none of the others.
        ask(scheduler, list(range(1000 * (i + 1), 1000 * (i + 1) + 17)))
    assert len(scheduler.block_manager.known_blocks(add(scheduler, [*BEGINNING, 1]))) == 4
    scheduler.abort()
    assert ask(scheduler, [*BEGINNING, 1]) == 0
    assert ask(scheduler, [*BEGINNING, 1]) == 16, "it was computed again"


def test_of_a_prefix_only_what_the_next_token_sees_must_be_known():
    scheduler = make(12)
    ask(scheduler, [*BEGINNING, *range(20)])
    manager = scheduler.block_manager
    contents = [manager.blocks[i].content_id for i in manager.known_blocks(add(scheduler, [*BEGINNING, 1]))]
    scheduler.abort()
    manager.cells.forget(contents[0])
    manager.cells.forget(contents[1])
    assert ask(scheduler, [*BEGINNING, 1]) == 16, "the token sees two blocks before its own"
    manager.cells.forget(contents[2])
    assert ask(scheduler, [*BEGINNING, 1]) == 0


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
def test_any_window(window):
    """A token sees its own only, and windows that end with blocks or do not."""
    scheduler = make_scheduler(40, windows=(20, window), max_num_batched_tokens=11)
    for length in (3, 17, 30):
        add(scheduler, length, max_tokens=9, ignore_eos=True)
    run(scheduler)


@pytest.mark.parametrize("num_window_blocks", [6, 9, 12])
def test_images_that_attend_both_ways_are_whole_where_windows_are_short(num_window_blocks):
    """A prompt waits until all rows of its next image have room; alone, it always has. Six blocks are an image, and
    what a token sees before it."""
    num_rows, placeholder = 3 * SIZE, 7
    cells = partial(WholeImagesInWindows, num_rows)
    scheduler = make(num_window_blocks, make_cells=cells, max_num_batched_tokens=20, enable_prefix_caching=False)
    others = [add(scheduler, 5 + i, max_tokens=12, ignore_eos=True) for i in range(4)]
    image = ImageInput(torch.empty(0), None, num_rows, bytes(32))
    tokens = [1] * 9 + [placeholder] * num_rows + [1] * 2 + [placeholder] * num_rows + [1] * 3
    placed = PlacedImages(SimpleNamespace(placeholder_id=placeholder, has_axes=False), tokens, [image, image])
    seeing = [
        ImageSequence(tokens, SamplingParams(max_tokens=3, ignore_eos=True, seed=i), images=placed) for i in range(2)
    ]
    for seq in seeing:
        scheduler.add(seq)
    ends = set()

    def watch(seqs):
        ends.update(seq.num_cached_tokens + seq.num_scheduled_tokens for seq in seqs if isinstance(seq, ImageSequence))

    run(scheduler, watch)
    assert all(seq.is_finished for seq in (*others, *seeing))
    assert not any(each.start < end < each.end for each in placed.each for end in ends)
    assert min(ends) < len(tokens), "there were chunks"
