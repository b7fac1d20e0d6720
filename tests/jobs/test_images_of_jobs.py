"""The images of jobs' lines: found, told apart, refused, and read ahead of the engine in bounded memory."""

import gc
import sys
import threading

import numpy as np
import pytest
from job_files import by_id, read_folder, read_lines, write_lines

pytest.importorskip("PIL", reason="needs the extra images")
from PIL import Image
from vision_stub import PLACE, stub_reader

from nanovllm import PackedImage, SamplingParams, find_tokenizer
from nanovllm.engine.text.image_reader import PackedArray
from nanovllm.images.rules import ImageRules
from nanovllm.jobs import check_batch, reader, run_batch
from nanovllm.jobs.image_files import find_images, fingerprint_images
from nanovllm.jobs.image_options import ask_images, folder_of, image_rules
from nanovllm.jobs.image_room import ImageRoom
from nanovllm.jobs.lines import Line, LineFormat
from nanovllm.jobs.prepared import Prepared
from nanovllm.jobs.progress import Generated, Progress
from nanovllm.jobs.reader import ImagePlan, ReadAhead, ReadPlan, read
from nanovllm.jobs.tasks.generate import Generate, GeneratePreparer
from nanovllm.utils import threads

TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}[image]{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
PARAMS = SamplingParams()
ASKED = {"images": "x.png", "prompt": "read"}


def save(path, height=2, width=3, colour=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (width, height), (colour, 0, 0)).save(path)
    return path


@pytest.fixture
def folder(tmp_path):
    """Images of 2 to 4 rows."""
    for number, name in enumerate(["a.png", "b.jpg", "inner/c.png"]):
        save(tmp_path / "scans" / name, height=2 + number)
    return tmp_path / "scans"


@pytest.fixture
def sees(monkeypatch):
    """Jobs read images for a stub of a family, whose template is TEMPLATE."""

    def find(model, revision, tokenizer, rules, dtype):
        return stub_reader(tokenizer, rules=rules, dtype=dtype)

    monkeypatch.setattr(reader, "find_image_reader", find)


def plan_of(inputs, rules, path, **options) -> ReadPlan:
    task = Generate(LineFormat(chat_template=TEMPLATE, **options))
    images = ImagePlan(str(path), rules, None)
    return ReadPlan(
        inputs.paths, task, str(path), None, None, 16, None, inputs.names, None, images, inputs.image_prompt
    )


def lines_of(plan) -> dict:
    return {prepared.id: prepared for batch in read(plan) for prepared in batch}


# -- a folder of images ------------------------------------------------------------------------------------------------


def test_each_file_is_a_line_called_by_its_path_below_the_folder(folder, tmp_path, monkeypatch):
    found = find_images(str(folder / "**" / "*.*"))
    assert (found.folder, found.names) == (str(folder), ["a.png", "b.jpg", "inner/c.png"])
    monkeypatch.chdir(tmp_path)
    assert find_images("scans/*.png").names == ["a.png"]
    assert find_images(["scans/inner/*.png", "scans/a.png", "scans/*.png"]).names == ["a.png", "inner/c.png"]
    assert find_images("scans/in*/c.png") == find_images(str(folder / "in*" / "c.png"))
    assert find_images("scans/in*/c.png").names == ["inner/c.png"]
    assert find_images("scans/inner/c.png").names == ["c.png"]


@pytest.mark.parametrize(
    ("patterns", "error", "said"),
    [
        ("nothing/*.png", FileNotFoundError, "images='nothing/.*': there is no such file"),
        ([], ValueError, "must name one file"),
        ("s3://bucket/*.png", ValueError, "must be files of this machine"),
        (".", ValueError, r"must name files, as 'folder/\*.png' does"),
    ],
)
def test_images_that_are_not_there_are_named(patterns, error, said):
    with pytest.raises(error, match=said):
        find_images(patterns)


def test_a_fingerprint_notices_names_sizes_and_contents(folder):
    _, paths, names = find_images(str(folder / "**" / "*.*"))
    before = fingerprint_images(paths, names)
    assert fingerprint_images(paths, names) == before
    assert before[0]["num_files"] == len(before[1]) == 3
    save(folder / "a.png", colour=1)  # The size stays.
    assert fingerprint_images(paths, names) != before
    save(folder / "a.png")
    assert fingerprint_images(paths, names) == before
    assert fingerprint_images(paths, [*names[:2], "inner/d.png"]) != before
    large = np.zeros(100_000, np.uint8)
    seen = set()
    for place in (None, 0, 50_000, 99_999):
        content = large.copy()
        content[place or 0] = 0 if place is None else 1
        (folder / "a.png").write_bytes(content.tobytes())
        seen.add(fingerprint_images(paths, names)[0]["fingerprint"])
    assert len(seen) == 4


def test_a_folder_is_read_with_the_prompt(folder, path, sees):
    inputs, rules = ask_images(
        None, str(folder / "**/*.*"), "read", (None, False, None, None, None), Generate(LineFormat())
    )
    lines = lines_of(plan_of(inputs, rules, path))
    tokenizer = find_tokenizer(str(path))
    asked = tokenizer("read")["input_ids"]
    assert {name: line.line.prompt for name, line in lines.items()} == {
        name: [PLACE] * rows + asked for name, rows in (("a.png", 2), ("b.jpg", 3), ("inner/c.png", 4))
    }
    assert [line.line.num_images for line in lines.values()] == [1, 1, 1]
    assert all(isinstance(line.line.images[0], PackedImage) for line in lines.values())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"images": "x.png"}, "prompt=None: must be what is asked of each image"),
        ({"prompt": "read"}, "prompt: needs images"),
        ({"images": "x.png", "prompt": "read", "input": "lines.jsonl"}, "input: cannot be given with images"),
        ({**ASKED, "task": "embed"}, "task='embed': reads no images; images and prompt"),
        ({**ASKED, "template": "{q}"}, "template='{q}': cannot be given with images and prompt"),
        ({**ASKED, "prompt_column": "q"}, "prompt_column='q': cannot be given with images and prompt"),
        ({**ASKED, "id_column": "q"}, "id_column='q': cannot be given with images and prompt"),
        ({**ASKED, "image_column": "y"}, "image_column='y': cannot be given with images and prompt"),
        ({"input": "lines.jsonl", "image_root": "/nowhere"}, "image_root='/nowhere': must be a folder"),
        ({"input": "lines.jsonl", "max_images": 0}, "max_images=0: must be"),
    ],
)
def test_wrong_options_of_images_are_named(options, said, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "x.png")
    write_lines(tmp_path / "lines.jsonl", [{"prompt": "a"}])
    options = {"input": None} | options
    with pytest.raises(ValueError, match=said):
        run_batch(output=tmp_path / "answers", model=path, **options)
    with pytest.raises(ValueError, match=said):
        check_batch(model=path, **options)
    assert not (tmp_path / "answers").exists()


def test_what_is_no_path_is_named(path, tmp_path):
    file = write_lines(tmp_path / "lines.jsonl", [{"prompt": "a"}])
    right = {"input": file, "output": tmp_path / "answers", "model": path}
    for wrong, said in (
        ({"input": [{"prompt": "x"}]}, r"input=\{'prompt': 'x'\}: must be the path of a file.*each as a line of JSON"),
        ({"input": {"prompt": "x"}}, r"input=\{'prompt': 'x'\}: must be the path of a file"),
        ({"input": None}, "input=None: must be the path of a file"),
        ({"input": None, "images": [3], "prompt": "a"}, "images=3: must be the path of a file"),
        ({"output": None}, "output=None: must be a path"),
        ({"model": 5}, "model=5: must be a path"),
        ({"retry_errors": [{"id": 1}]}, r"retry_errors=\[\{'id': 1\}\]: must be a path"),
    ):
        with pytest.raises(TypeError, match=f"^{said}"):
            run_batch(**right | wrong)
        if not {"output", "retry_errors"} & wrong.keys():
            with pytest.raises(TypeError, match=f"^{said}"):
                check_batch(**{name: value for name, value in (right | wrong).items() if name != "output"})
    assert not (tmp_path / "answers").exists()


# -- lines of a file ---------------------------------------------------------------------------------------------------


def test_lines_name_images_in_several_forms(folder, path, sees, tmp_path):
    part = {"type": "image", "image": "a.png"}
    url = {"type": "image_url", "image_url": {"url": f"file://{folder}/b.jpg"}}
    both = [{"role": "user", "content": [part, {"type": "text", "text": "a"}, url]}]
    rows = [
        {"id": "parts", "messages": both},
        {"custom_id": "openai", "body": {"messages": both}},
        {"id": "column", "messages": [{"role": "user", "content": "a"}], "images": ["a.png", "b.jpg"]},
        {"id": "one", "prompt": "[image]a", "images": "b.jpg"},
        {"id": "ids", "prompt": [7, PLACE], "images": ["a.png"]},
        {"id": "text", "prompt": "a", "images": None},
    ]
    file = write_lines(folder / "lines.jsonl", rows)
    inputs = reader.Inputs([str(file)])
    found = lines_of(plan_of(inputs, ImageRules(image_root=folder_of(inputs.paths)), path))
    assert {each.error for each in found.values()} == {None}
    (a,) = find_tokenizer(str(path))("a")["input_ids"]
    assert {name: each.line.prompt for name, each in found.items()} == {
        "parts": [PLACE] * 2 + [a] + [PLACE] * 3,
        "openai": [PLACE] * 2 + [a] + [PLACE] * 3,
        "column": [PLACE] * 5 + [a],
        "one": [PLACE] * 3 + [a],
        "ids": [7, PLACE, PLACE],
        "text": [a],
    }
    assert [found[name].line.num_images for name in ("parts", "one", "text")] == [2, 1, 0]
    assert not any(each.line.columns for each in found.values())  # They are no data.


def test_wrong_images_are_errors_of_their_lines(folder, path, sees, tmp_path):
    save(tmp_path / "secret.png")
    (folder / "broken.png").write_bytes((folder / "a.png").read_bytes()[:30])
    wrong = {
        "outside": (["../secret.png"], "lies outside the folder"),
        "missing": (["nothing.png"], "image 'nothing.png': it cannot be read"),
        "broken": (["broken.png"], "it is a broken PNG file"),
        "text": (["lines.jsonl"], "it is no image"),
        "remote": (["http://127.0.0.1/a.png"], r"allow_remote \(--allow-remote\) is off"),
        "many": (["a.png", "a.png"], "its prompt has 1 place for images, and it has 2 images"),
        "form": (7, "images=7: must be a path, a URL, or a list of them"),
    }
    rows = [{"id": name, "prompt": "[image]a", "images": images} for name, (images, _) in wrong.items()]
    file = write_lines(folder / "lines.jsonl", [*rows, {"id": "right", "prompt": "[image]", "images": "a.png"}])
    plan = plan_of(reader.Inputs([str(file)]), ImageRules(image_root=str(folder)), path)
    found = lines_of(plan)
    assert found["right"].error is None
    for name, (_, said) in wrong.items():
        with pytest.raises(ValueError, match=said):
            raise ValueError(found[name].error)


def test_a_line_has_so_many_images(folder, path, sees):
    rows = [{"id": n, "prompt": "[image]" * n, "images": ["a.png"] * n} for n in (2, 3)]
    inputs = reader.Inputs([str(write_lines(folder / "lines.jsonl", rows))])
    found = lines_of(plan_of(inputs, image_rules(str(folder), False, None, None, 2, None), path))
    assert found[2].error is None
    assert found[3].error == "it has 3 images; max_images (--max-images) allows a prompt 2"


@pytest.mark.parametrize("options", [{"template": "{q}"}, {"prompt_column": "q"}])
def test_a_text_without_a_place_becomes_a_conversation(folder, path, sees, options):
    """Its images stand before it, where the chat template writes them."""
    rows = [
        {"id": 1, "q": "a", "pic": ["a.png", "b.jpg"]},
        {"id": 2, "q": "a"},
        {"id": 3, "q": "a[image]", "pic": "a.png"},
    ]
    inputs = reader.Inputs([str(write_lines(folder / "lines.jsonl", rows))])
    found = lines_of(plan_of(inputs, ImageRules(image_root=str(folder)), path, image_column="pic", **options))
    (a,) = find_tokenizer(str(path))("a")["input_ids"]
    prompts = {name: each.line.prompt for name, each in found.items()}
    assert prompts[1] == [PLACE] * 5 + [a]
    assert prompts[2] == [a]
    assert prompts[3] == [a, PLACE, PLACE]


def test_without_a_chat_template_a_text_says_where_its_images_are(folder, path):
    tokenizer = find_tokenizer(str(path))
    tokenizer.chat_template = None
    preparer = GeneratePreparer(tokenizer, LineFormat(), None, None, stub_reader(tokenizer))
    row = {"prompt": "a", "images": [str(folder / "a.png")]}
    (line,) = preparer.prepare([(0, reader.Inputs([])._read_line(row, "f", 1))])
    said = "its prompt has 0 places for images, and it has 1 image: each needs one place, which chat templates write"
    assert preparer.read_images(line).error.startswith(said)


def test_a_column_of_a_table_is_data_unless_it_is_named():
    row = {"text": "a", "images": "x.png", "scan": "y.png"}
    assert LineFormat(template="{text}").read(row, 0).columns == {"images": "x.png", "scan": "y.png"}
    line = LineFormat(template="{text}", image_column="scan", system="b").read(row, 0)
    assert line.columns == {"images": "x.png"}
    assert line.prompt[1]["content"] == [{"type": "image", "image": "y.png"}, {"type": "text", "text": "a"}]
    line = LineFormat(line_parameters=False).read({"prompt": "a", "images": "x.png"}, 0)
    assert (line.images, line.columns) == ((), {"images": "x.png"})


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "beside requests"])
def test_a_mistyped_column_of_images_is_refused(kind, llm, path, tmp_path):
    """Otherwise all lines would be answered without their images."""
    file = write_lines(tmp_path / "lines.jsonl", [{"q": "a", "pic": "x.png"}])
    options = {"prompt_column": "q", "image_column": "pics", "system": "b"}
    if kind == "beside requests":
        write_lines(file, [{"q": "a", "pic": "x.png"}, {"custom_id": "b", "body": {"prompt": "c"}}])
    elif kind == "parquet":
        pytest.importorskip("pyarrow", reason="needs the extra jobs")
        import pyarrow.parquet

        file = tmp_path / "lines.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"q": "a", "pic": "x.png"}]), file)
        options = {"template": "{q}", "image_column": "pics"}
    said = r"^image_column='pics': no line has this column; there are: 'q', 'pic'"
    with pytest.raises(ValueError, match=said):
        run_batch(file, tmp_path / "answers", llm, **options, use_tqdm=False)
    with pytest.raises(ValueError, match=said):
        check_batch(file, llm, **options, use_tqdm=False)
    assert not (tmp_path / "answers").exists()


def test_the_root_is_the_one_folder_of_the_input(tmp_path):
    assert folder_of([f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]) == str(tmp_path)
    assert folder_of([f"{tmp_path}/a.jsonl", f"{tmp_path}/c/b.jsonl"]) is None
    assert folder_of(["s3://bucket/a.jsonl"]) is None


@pytest.mark.parametrize(
    ("text_only", "reason"),
    [(False, "this model reads no images"), (True, "with text_only=True the model has no vision tower")],
)
def test_a_model_that_reads_no_images_refuses_lines_with_them(
    text_only, reason, llm, job, answers, tmp_path, monkeypatch
):
    monkeypatch.setattr(llm.config, "text_only", text_only)
    save(tmp_path / "x.png")
    message = {"role": "user", "content": [{"type": "image", "image": "x.png"}]}
    lines = [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "a", "images": ["x.png"]}, {"id": 3, "messages": [message]}]
    summary = job(lines, chat_template=TEMPLATE)
    assert (summary.num_answered, summary.num_failed) == (1, 2)
    errors = by_id(read_lines(answers / "_errors.jsonl"))
    assert [row["id"] for row in errors] == [2, 3]
    assert all(reason in row["error"] for row in errors)
    assert [row["id"] for row in read_folder(answers)] == [1]


# -- on the way to the engine ------------------------------------------------------------------------------------------


def test_images_are_read_ahead_in_order_by_a_few_threads(monkeypatch):
    monkeypatch.setattr(threads, "available_cores", lambda: 2)
    lock, started, most_ahead, num_taken = threading.Lock(), [], 0, 0

    class Slow:
        def read_images(self, line):
            with lock:
                started.append(line)
            return -line

    for value in reader.with_images(range(100), Slow()):
        num_taken += 1
        most_ahead = max(most_ahead, len(started) - num_taken)
        assert value == 1 - num_taken
    assert num_taken == 100
    assert most_ahead <= 4  # two lines a thread


def packed(num_bytes: int) -> PackedImage:
    array = PackedArray(np.zeros(num_bytes, np.uint8), "uint8")
    return PackedImage({"pixel_values": array}, None, 1, bytes(32), {})


def line_of(*sizes: int) -> Line:
    images = tuple(map(packed, sizes))
    return Line([1], PARAMS, {}, None, images=images, num_images=len(images))


def test_the_queue_holds_so_many_bytes_of_images(monkeypatch):
    monkeypatch.setattr(reader, "_QUEUE_BYTES", 1000)
    ahead = ReadAhead.__new__(ReadAhead)
    ahead._queue, ahead._num_bytes, ahead._has_room = reader.queue.Queue(100), 0, threading.Condition()
    ahead._has_ended = threading.Event()
    batches = [[Prepared(i, i, "f", i, line_of(400), None)] for i in range(6)]
    thread = threading.Thread(target=lambda: [ahead._put(each) for each in [*batches, None]])
    thread.start()
    thread.join(0.05)
    assert ahead._queue.qsize() == 2
    assert [prepared.id for prepared in ahead] == list(range(6))
    thread.join()


def test_the_engine_gets_images_while_there_is_room(monkeypatch):
    room = ImageRoom(1000)
    first, second = line_of(300, 300), line_of(500)
    assert room.has_room(first)
    room.take(first)
    assert not room.has_room(second)
    assert room.has_room(Line([1], PARAMS, {}, None))  # without images
    tensors = [image.unpack().pixel_values for image in first.images]
    del first
    gc.collect()
    assert not room.has_room(second)  # The engine still has them.
    del tensors
    gc.collect()
    assert room.has_room(second)
    assert ImageRoom(10).has_room(second)  # One alone always fits.


def test_the_bar_shows_images_a_second():
    now = [0.0]
    progress = Progress(10, 0, 0, False, clock=lambda: now[0])
    progress.begin(lambda: Generated(0, 0))
    assert "images" not in progress.describe()
    now[0] = 4.0
    for _ in range(2):
        progress.add(5, False, Line([1], PARAMS, {}, None, num_images=3))
    progress.add(0, True, Line([1], PARAMS, {}, None, num_images=3))
    assert "tok/s, 1.5 images/s" in progress.describe()


def test_a_preparer_says_what_is_missing(path, monkeypatch):
    preparer = GeneratePreparer(find_tokenizer(str(path)), LineFormat(), None, None, stub_reader())
    monkeypatch.setitem(sys.modules, "PIL", None)
    line = Line([PLACE], PARAMS, {}, None, images=("x.png",), num_images=1)
    with pytest.raises(ImportError):
        preparer.read_images(Prepared(0, 0, "f", 1, line, None))
