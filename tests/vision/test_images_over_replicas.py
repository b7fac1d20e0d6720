"""Prompts with images on several engines: what one answers, in memory that is bounded. The replicas are threads."""

import numpy as np
import pytest

pytest.importorskip("PIL", reason="needs the extra images")
import torch
from checkpoints import complete, generate, greedy, make_llm, needs_family, random_prompt
from thread_replicas import ThreadReplicas
from vision_checkpoints import BEGIN, END, IMAGE, draw_image

from nanovllm import SamplingParams
from nanovllm.engine.features.images.image_sequence import ImageSequence
from nanovllm.engine.images import ImageInput, ImagePrompt
from nanovllm.engine.replicas import replicated_engine
from nanovllm.engine.replicas.messages import WORK, Work, pack, unpack
from nanovllm.engine.replicas.placement import Placement

pytestmark = needs_family("qwen3_vl")
SIZES = [(48, 48), (128, 48), (16, 32), (64, 64), (32, 64)]


@pytest.fixture(scope="module")
def one(path):
    with make_llm(path) as llm:
        yield llm


@pytest.fixture(scope="module")
def several(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicated_engine, "Replicas", ThreadReplicas)
        with make_llm(path, data_parallel_size=2, max_num_seqs=2) as llm:
            yield llm


def ask(images, seed=0):
    tokens = random_prompt(5, seed, 300)
    for _ in images:
        tokens += [BEGIN, IMAGE, END, *random_prompt(5, seed + 1, 300)]
    return {"prompt": tokens, "images": images}


def prompts():
    images = [draw_image(*size, seed) for seed, size in enumerate(SIZES)]
    asked = [ask([image], seed) for seed, image in enumerate(images)]
    return [*asked, ask(images[:3]), ask([]), ask(images[1::2], 7), ask(images[:1], 3)]


def test_answers_are_those_of_one_engine(several, one):
    """Also of samples, whose images are sent once."""
    asked = prompts()
    params = [greedy(6 + i) if i % 2 else SamplingParams(max_tokens=5, n=2, seed=i) for i in range(len(asked))]
    expected, found = (generate(llm, asked, params) for llm in (one, several))
    for output, right in zip(found, expected, strict=True):
        assert [each["token_ids"] for each in output.get("samples", [output])] == [
            each["token_ids"] for each in right.get("samples", [right])
        ]
    assert all(several.model_runner.told), "each replica has answered"
    assert not any(lane.num_image_bytes or lane.given for lane in several.scheduler._placement.lanes)


def test_processes(path, one):
    asked = prompts()
    with make_llm(path, data_parallel_size=2, max_num_seqs=2) as llm:
        assert complete(llm, asked, greedy(6)) == complete(one, asked, greedy(6))


def test_wrong_images_are_errors_of_their_request(several):
    asked = prompts()
    with pytest.raises(ValueError, match=r"prompts\[1\]: images\[0\]: image '/nowhere.png': it cannot be read"):
        generate(several, [asked[0], asked[0] | {"images": ["/nowhere.png"]}], greedy(2))


def test_replicas_get_images_while_they_have_room(several, one):
    """One at a time here; none waits for ever."""
    several.scheduler._most_image_bytes = 1
    several.scheduler.reset()
    sent = several.model_runner.sent
    sent.clear()
    try:
        asked = prompts()
        assert complete(several, asked, greedy(4)) == complete(one, asked, greedy(4))
    finally:
        several.scheduler._most_image_bytes = 1 << 30
        several.scheduler.reset()
    numbers = [len(work.images) for _, kind, work in sent if kind == WORK]
    assert set(numbers) <= {0, 1}
    assert sum(numbers) == 8


# -- messages ----------------------------------------------------------------------------------------------------------


def sequence_of(engine, prompt, max_tokens=4):
    (seq,) = engine._sequences.make_one(prompt, greedy(max_tokens))
    return seq


def test_equal_images_of_a_message_are_sent_once(one):
    """Those of other prompts too, and pixels are not copied."""
    image, same = draw_image(512, 512, 1), draw_image(512, 512, 1)
    seqs = [sequence_of(one, ask([each], seed)) for seed, each in enumerate([image, same])]
    assert all(isinstance(seq, ImageSequence) for seq in seqs)
    message = pack(WORK, Work.of(seqs))
    assert len(message.arrays) == 1
    pixels = seqs[0].images.each[0].image.pixel_values
    assert np.shares_memory(np.frombuffer(message.arrays[0], np.uint8), pixels.numpy())
    _, work = unpack(message)
    made = work.make(one._sequences)
    for seq, right in zip(made, seqs, strict=True):
        assert list(seq.token_ids) == list(right.token_ids)
        assert seq.images.each[0].image.content_hash == right.images.each[0].image.content_hash
        assert torch.equal(seq.images.each[0].image.pixel_values, pixels)
        assert (seq.images.positions == right.images.positions).all()


# -- placement ---------------------------------------------------------------------------------------------------------


def prepared(engine, content, question=()):
    """A prompt with an image of 64 rows. content: what tells it from others."""
    (placed,) = engine._sequences.image_prompts.read(ask([draw_image(128, 128, 0)])).images.each
    image = ImageInput.of(placed.image.processed, bytes([content]) * 32)
    return ImagePrompt([BEGIN, *[IMAGE] * 64, END, *question], [image])


def test_equal_images_go_to_one_replica_and_others_do_not(one):
    placed = Placement(2, 4, 1000, 16, 64, True)
    contents = [1, 2, 1, 2, 2, 1]
    seqs = [sequence_of(one, prepared(one, content, [5, 6, i])) for i, content in enumerate(contents)]
    for seq in seqs:
        placed.add(seq)
    lanes = [placed.lane_of(seq) for seq in seqs]
    assert lanes == [0, 1, 0, 1, 1, 0]


def test_a_replica_has_so_many_bytes_of_images(one):
    placed = Placement(2, 8, 1000, 16, 64, True)
    placed.lanes[1].load = 10**6  # All begin in the first one's queue.
    seqs = [sequence_of(one, prepared(one, i)) for i in range(4)]
    text = sequence_of(one, [1, 2])
    size = seqs[0].images.num_bytes
    placed._most_image_bytes = 2 * size
    for seq in [*seqs[:2], text, *seqs[2:]]:
        placed.add(seq)
    assert placed.take(0) == [*seqs[:2], text]
    assert placed.take(0) == []
    placed.remove(seqs[0])
    assert placed.take(0) == [seqs[2]]
    assert placed.take(0) == []
    placed.take_back(0, [seqs[1].seq_id])
    assert placed.take(0) == [seqs[3]]
    assert placed.take(1) == [seqs[1]]
    for seq in seqs[1:]:
        placed.remove(seq)
    assert [lane.num_image_bytes for lane in placed.lanes] == [0, 0]
