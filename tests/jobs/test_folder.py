"""The folder of answers: what is left of it wherever a crash happens, and that no row is lost or doubled."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_files import read_lines

from nanovllm.jobs import folder as folder_module
from nanovllm.jobs import part_writer
from nanovllm.jobs.folder import ERRORS, MANIFEST, FolderLost, JobFolder, job_status, read_answers
from nanovllm.jobs.inputs import Inputs, hash_id, scan
from nanovllm.jobs.lines import LineFormat
from nanovllm.jobs.parquet import ParquetFormat
from nanovllm.jobs.part_writer import PartWriter
from nanovllm.jobs.tasks.generate import Generate


def answer(number: int) -> str:
    row = {"id": f"line-{number}", "text": "grün", "finish_reason": "stop"}
    return json.dumps(row | {"num_prompt_tokens": 1, "num_completion_tokens": 2}, ensure_ascii=False)


A_MANIFEST = {"job": {}, "num_lines": 3, "input": [], "progress": {"seconds": 0.0}}


def error(number: int) -> str:
    return json.dumps({"id": f"line-{number}", "file": "a.jsonl", "line": number, "error": "bad"})


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(part_writer, "PART_LINES", 4)


@pytest.fixture
def parquet(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id": "line-{i}", "prompt": "a"}}\n' for i in range(12)))
    inputs = Inputs([str(tmp_path / "in.jsonl")])
    return ParquetFormat(inputs, Generate(LineFormat()), scan(inputs))


def seen_of(folder) -> list[bytes]:
    seen = []
    counts = folder.read(seen.append)
    assert counts.answered + counts.failed == len(seen)
    return seen


def work(folder, parquet, numbers) -> None:
    """What a job does: recover, then write what has no row yet, some of it as errors. Each batch is early for a while,
    as in a job that keeps the order."""
    folder.recover(parquet)
    done = set(seen_of(folder))
    left = [number for number in numbers if hash_id(f"line-{number}") not in done]
    parts = PartWriter(folder, parquet)
    for start in range(0, len(left), 3):
        batch = left[start : start + 3]
        good = [answer(number) for number in batch if number % 5]
        parts.keep_early(good)
        parts.sync()
        parts.write(good, [error(number) for number in batch if number % 5 == 0])
        parts.sync()
        parts.forget_early()
    parts.close()
    folder.finish()


@given(st.data())
def test_an_open_part_keeps_its_whole_lines(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("answers")
    whole = "".join(f"{answer(i)}\n" for i in range(3)).encode()
    size = data.draw(st.integers(0, len(whole)))
    # What a crash of the machine may leave after them: nothing, zeros, or something old.
    rest = data.draw(st.sampled_from([b"", bytes(50), b"{}garbage\n", b"{}\n"]))
    folder = JobFolder(path)
    folder.open_part(0).write_bytes(whole[:size] + rest)
    folder.recover(None)
    num_whole = whole[:size].count(b"\n")
    assert folder.read().answered == num_whole
    assert len(folder.parts()) == (num_whole > 0)


def test_a_row_without_its_line_feed_is_torn(tmp_path):
    """Though it is whole otherwise: its line is answered again."""
    folder = JobFolder(tmp_path)
    folder.open_part(0).write_text(f"{answer(0)}\n{answer(1)}")
    folder.recover(None)
    (part,) = folder.parts()
    assert part.read_text() == f"{answer(0)}\n"


def test_a_part_of_parquet_has_its_name_when_it_is_whole(tmp_path, parquet, monkeypatch):
    """Other programs may read the folder at any moment."""
    folder, write = JobFolder(tmp_path / "answers"), parquet.write
    folder.path.mkdir()
    folder.open_part(0).write_text(f"{answer(0)}\n")

    def write_and_look(source, target):
        write(source, target)
        assert folder.parts() == []

    monkeypatch.setattr(parquet, "write", write_and_look)
    folder.complete(folder.open_part(0), 0, parquet)
    assert [path.name for path in folder.parts()] == ["part-00000.parquet"]
    assert [path.name for path in folder.path.iterdir()] == ["part-00000.parquet"]


def test_errors_lose_a_torn_line(tmp_path):
    (tmp_path / ERRORS).write_text(f"{error(1)}\n{error(2)[:20]}")
    folder = JobFolder(tmp_path)
    assert folder.read().failed == 1
    folder.recover(None)
    assert (tmp_path / ERRORS).read_text() == f"{error(1)}\n"


def test_parts_have_a_bounded_number_of_lines(tmp_path):
    folder = JobFolder(tmp_path)
    parts = PartWriter(folder, None)
    for numbers in (range(3), range(3, 10)):  # The second batch begins within a part.
        parts.write([answer(i) for i in numbers], [])
    assert [path.name for path in folder.parts()] == ["part-00000.jsonl", "part-00001.jsonl"]
    assert folder.open_part(2).exists()
    assert folder.read().answered == 8
    assert folder.read_all().answered == 10
    with open(folder.open_part(2), "a") as file:
        file.write(answer(10)[:20])  # still being written
    assert folder.read_all().answered == 10
    os.truncate(folder.open_part(2), 2 * len(f"{answer(8)}\n".encode()))
    parts.close()
    assert [row.id for path in folder.parts() for row in read_answers(path)] == [f"line-{i}" for i in range(10)]
    assert folder.next_part() == 3


def test_a_damaged_part_is_named(tmp_path, parquet):
    for name, content in (("part-00000.jsonl", b"no\n"), ("part-00000.jsonl", b"{}\n"), ("part-00001.parquet", b"no")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}"):
            JobFolder(tmp_path).read()
        (tmp_path / name).unlink()


def test_one_process_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "_LOCK_SECONDS", 0.1)
    folder = JobFolder(tmp_path / "answers")
    assert not folder.is_locked()
    with folder:
        assert JobFolder(folder.path).is_locked()
        with pytest.raises(ValueError, match="another process works on this folder"), JobFolder(folder.path):
            pass
    assert not folder.is_locked()
    with JobFolder(folder.path):
        pass


def test_a_folder_of_something_else_is_refused(tmp_path):
    folder = JobFolder(tmp_path)
    assert folder.read_manifest() is None
    (tmp_path / "thesis.tex").write_text("all my work")
    with pytest.raises(ValueError, match=r"holds 'thesis.tex' and no _manifest.json"):
        folder.read_manifest()
    folder.write_manifest(A_MANIFEST)
    assert folder.read_manifest() == A_MANIFEST
    (tmp_path / "part-00000.jsonl").touch()
    folder.clear()
    assert sorted(os.listdir(tmp_path)) == [MANIFEST, "thesis.tex"]
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json: is damaged"):
        folder.read_manifest()


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"job": []}, "job"),
        ({"num_lines": "3"}, "num_lines"),
        ({"input": [{"name": "a"}]}, "input"),
        ({"progress": {}}, "progress"),
        ({"progress": None}, "progress"),
        ({"model_files": 1}, "model_files"),
    ],
    ids=str,
)
def test_a_strange_manifest_is_named(tmp_path, change, key):
    (tmp_path / MANIFEST).write_text(json.dumps(A_MANIFEST | change))
    with pytest.raises(ValueError, match=rf"_manifest.json: is damaged: '{key}' is missing or wrong"):
        job_status(tmp_path)


@pytest.mark.parametrize("content", ["[1]", "3", "null", '{"a": 1}', "[" * 100_000], ids=lambda text: text[:9])
def test_a_manifest_of_something_else(tmp_path, content):
    (tmp_path / MANIFEST).write_text(content)
    with pytest.raises(ValueError, match=r"_manifest.json: (belongs to no job|is damaged)"):
        job_status(tmp_path)


def test_nothing_is_touched_in_a_folder_of_something_else(tmp_path):
    photos = tmp_path / ".staging-photos"
    photos.mkdir()
    (photos / "photo").touch()
    with pytest.raises(ValueError, match=r"holds '.staging-photos'"), JobFolder(tmp_path):
        pass
    assert os.listdir(tmp_path) == [".staging-photos"]
    assert os.listdir(photos) == ["photo"]


def open_and_recover(path):
    with JobFolder(path) as folder:
        folder.recover(None)
        folder.write_manifest(A_MANIFEST)


def test_links_are_not_followed_out_of_the_folder(tmp_path):
    outside, path = tmp_path / "outside", tmp_path / "answers"
    outside.write_text("all my work")
    path.mkdir()
    (path / MANIFEST).write_text(json.dumps(A_MANIFEST))
    for name in (".lock", ERRORS, f"{MANIFEST}.tmp", "_part-00000.jsonl.tmp"):
        (path / ".lock").unlink(missing_ok=True)
        (path / name).symlink_to(outside)
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            open_and_recover(path)
        assert outside.read_text() == "all my work"
        (path / name).unlink()


def test_a_refused_call_leaves_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "a" / "b" / "answers", tmp_path / "empty"):
        with pytest.raises(KeyError), JobFolder(path):
            raise KeyError
        with pytest.raises(ValueError, match="no memory"):
            fail_to_start(path)
    assert os.listdir(tmp_path) == ["empty"]
    assert os.listdir(tmp_path / "empty") == []


def fail_to_start(path):
    with JobFolder(path) as folder:
        folder.write_manifest(A_MANIFEST)
        raise ValueError("no memory for an engine")


@pytest.mark.parametrize("name", [".lock", "_part-00000.jsonl.tmp"])
def test_a_folder_that_is_deleted_or_replaced_is_noticed(tmp_path, name):
    path = tmp_path / "answers"
    with JobFolder(path) as folder:
        folder.write_manifest(A_MANIFEST)
        parts = PartWriter(folder, None)
        parts.write([answer(0)], [])
        parts.sync()
        (path / name).rename(path / "away")
        (path / name).touch()
        with pytest.raises(FolderLost, match="deleted, moved or replaced"):
            parts.sync()


def test_an_output_that_is_one_file(tmp_path):
    file = tmp_path / "answers.jsonl"
    for name, message in (("a.csv", "looks like a file"), ("a.json", "must be a folder, or a file that ends in")):
        with pytest.raises(ValueError, match=message):
            JobFolder(tmp_path / name)
    (tmp_path / "notes").touch()
    with pytest.raises(ValueError, match="is a file"):
        JobFolder(tmp_path / "notes")
    file.touch()
    with pytest.raises(ValueError, match="is there, and of no job"), JobFolder(file):
        pass
    assert sorted(os.listdir(tmp_path)) == ["answers.jsonl", "notes"]
    file.unlink()
    for numbers in (range(6), range(9)):
        with JobFolder(file) as folder:
            folder.write_manifest(A_MANIFEST)
            work(folder, None, numbers)
    assert sorted(row["id"] for row in read_lines(file)) == [f"line-{i}" for i in range(9) if i % 5]
    assert sorted(os.listdir(f"{file}.job")) == [".lock", ERRORS, MANIFEST]
