"""Images of jobs on Ray: read by the machine of the job, and handed out in bounded memory."""

import time
from collections import deque

import numpy as np
import pytest
from checkpoints import make_llm, needs_family
from job_files import ReadHere, by_id, read_folder, read_lines, write_lines

ray = pytest.importorskip("ray", reason="needs Ray: pip install '.[ray]'")
pytest.importorskip("PIL", reason="needs the extra images")
from vision_checkpoints import draw_image, make_image_tokenizer, make_vision_checkpoint  # noqa: E402

from nanovllm import PackedImage, SamplingParams  # noqa: E402
from nanovllm.engine.text.image_reader import PackedArray  # noqa: E402
from nanovllm.jobs import ray_job, run_batch, work  # noqa: E402
from nanovllm.jobs.arguments import Arguments, Cluster  # noqa: E402
from nanovllm.jobs.generate_actor import GenerateActor, SharedEngine  # noqa: E402
from nanovllm.jobs.inputs import Inputs  # noqa: E402
from nanovllm.jobs.lines import Line, LineFormat  # noqa: E402
from nanovllm.jobs.prepared import Prepared  # noqa: E402
from nanovllm.jobs.ray_job import RayEngines, _Engine, _Lines  # noqa: E402
from nanovllm.jobs.tasks.generate import Generate  # noqa: E402

ENGINE = {"max_num_seqs": 4, "max_model_len": 200, "kvcache_block_size": 16, "num_kvcache_blocks": 128, "device": "cpu"}
OPTIONS = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory):
    path = make_vision_checkpoint(tmp_path_factory.mktemp("seeing"), "qwen3_vl")
    make_image_tokenizer(path)
    return path


@pytest.fixture
def file(tmp_path):
    """Nine lines about four images, and one about none that is there."""
    for i in range(4):
        draw_image(48, 16 * (i + 1), i).save(tmp_path / f"{i}.png")
    message = [{"role": "user", "content": "read"}]
    lines = [{"id": i, "messages": message, "images": [f"{i % 4}.png"] * (1 + i % 2)} for i in range(9)]
    return write_lines(tmp_path / "lines.jsonl", [*lines, {"id": 9, "messages": message, "images": ["nothing.png"]}])


@pytest.mark.slow
@needs_family("qwen3_vl")
def test_the_same_answers_as_of_one_engine(cluster, seeing, file, tmp_path, monkeypatch):
    """Also one image at a time."""
    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    for name in ("_EXCHANGE_BYTES", "_ENGINE_BYTES"):
        monkeypatch.setattr(ray_job, name, 1)
    run_batch(file, tmp_path / "one", seeing, use_tqdm=False, **OPTIONS, **ENGINE)
    summary = run_batch(file, tmp_path / "ray", seeing, replicas=2, use_tqdm=False, **OPTIONS, **ENGINE)
    assert summary[:3] == (10, 9, 1)
    assert by_id(read_folder(tmp_path / "ray")) == by_id(read_folder(tmp_path / "one"))
    (error,) = read_lines(tmp_path / "ray" / "_errors.jsonl")
    assert "image 'nothing.png': it cannot be read" in error["error"]


def test_a_machine_without_the_model_says_so(seeing, tmp_path, monkeypatch):
    """Without Ray: images are refused before it starts, and lines have errors."""
    draw_image(48, 48, 0).save(tmp_path / "a.png")
    options = {"tokenizer": str(seeing), "replicas": 1, "use_tqdm": False} | ENGINE
    asked = {"images": str(tmp_path / "a.png"), "prompt": "read"}
    reason = "this machine, which would read them, does not have the files of nowhere/model"
    with pytest.raises(ValueError, match=f"images: cannot be read: {reason}"):
        run_batch(None, tmp_path / "answers", "nowhere/model", **asked, **options)
    assert Arguments("nowhere/model", {}).read_plan(Inputs([])).images == reason


@needs_family("qwen3_vl")
def test_lines_with_images_come_back_to_their_blocks(seeing):
    """Without them; their positions are those of the block."""
    llm = make_llm(seeing, skip_tokenizer_init=False)
    read = llm._sequences.image_prompts.reader
    images = [read.read(draw_image(48, 16 * (i + 1), i)) for i in range(3)]
    whole = [read.expand([310, 5 + i], [image]) for i, image in enumerate(images)]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    lines = [
        Prepared(7 * i, i, "a", i, Line(tokens, params, {}, {}, images=(image,), num_images=1), None)
        for i, (tokens, image) in enumerate(zip(whole, images, strict=True))
    ]
    engine = SharedEngine(llm, Generate(LineFormat()))
    found = engine.answer([*lines, Prepared(100, 3, "a", 3, Line([5], params, {}, {}), None)])
    assert [each.position for each, _ in found] == [0, 7, 14, 100]
    assert not any(each.line.images for each, _ in found)
    assert [len(output["token_ids"]) for _, output in found] == [4] * 4


def test_an_actor_of_ray_data_says_what_reads_images(path):
    import pyarrow as pa

    actor = GenerateActor(path, **ENGINE | OPTIONS)
    table = pa.table({"prompt": ["a", "b"], "images": [["x.png"], None]})
    answers = actor(table)
    assert answers["error"].to_pylist() == [
        "has images, and GenerateActor reads none; run_batch does, also with Ray (replicas, ray_address)",
        None,
    ]


# -- bounded memory ----------------------------------------------------------------------------------------------------


def line_of(position, size) -> Prepared:
    """A line with an image of so many bytes; 0: without one."""
    array = PackedArray(np.zeros(size, np.uint8), "uint8")
    images = (PackedImage({"pixel_values": array}, None, 1, bytes(32), {}),) if size else ()
    return Prepared(position, position, "f", position, Line([], SamplingParams(), {}, None, images=images), None)


def test_lines_wait_in_bounded_memory(monkeypatch):
    monkeypatch.setattr(ray_job, "_READ_BYTES", 1000)
    taken = []

    def read(first):
        for i in range(20):
            taken.append(first + i)
            yield line_of(first + i, 300)

    lines = _Lines([read(0), read(100)])
    time.sleep(0.05)
    found = []
    while len(found) < 40:
        # Three are here, and each reader has one more.
        assert len(taken) - len(found) <= 3 + 2
        if (line := lines.take(float("inf"))) is not None:
            found.append(line)
    assert sorted(line.id for line in found) == [*range(20), *range(100, 120)]
    lines.close()


class Engine(_Engine):
    """Takes lines, and answers none."""

    def __init__(self):
        self.lines, self.num_bytes = {}, 0

    def give(self, lines):
        self.lines |= {given.line.position: given for given in lines}
        self.num_bytes += sum(given.num_bytes for given in lines)


def test_engines_have_so_many_bytes_of_images(path, monkeypatch):
    monkeypatch.setattr(ray_job, "_EXCHANGE_BYTES", 500)
    engines = RayEngines(Cluster(1, None), Arguments(str(path), {}), lambda *_: None)
    sizes = [0, 200, 200, 200, 2000, 100, 0]
    waiting = deque(line_of(i, size) for i, size in enumerate(sizes))
    engines._lines = type("Lines", (), {"take": lambda self, last: waiting.popleft() if waiting else None})()
    engines._again, engines._max_ahead, engines._most_bytes = deque(), None, 900
    engines._progress = type("Progress", (), {"hand_out": lambda self, line: None})()
    first, second = Engine(), Engine()

    def take(engine):
        lines = engines._take(engine, 10)
        engine.give(lines)
        return [given.line.id for given in lines]

    assert take(first) == [0, 1, 2]  # 500 bytes at once
    assert take(first) == [3]
    assert take(first) == []  # The next one is too large beside these.
    assert take(second) == [4]  # alone
    assert take(second) == []
    assert take(first) == [5, 6]
    assert (first.num_bytes, second.num_bytes) == (700, 2000)
