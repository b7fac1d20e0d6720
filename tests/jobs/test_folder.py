"""The folder of answers: what is left of it wherever a crash happens, and that no row is lost or doubled."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.jobs import folder as folder_module
from nanovllm.jobs.folder import ERRORS, MANIFEST, JobFolder, PartWriter, read_answers
from nanovllm.jobs.inputs import Inputs, hash_id, scan
from nanovllm.jobs.lines import LineFormat
from nanovllm.jobs.parquet import ParquetFormat


def answer(number: int) -> str:
    row = {"id": f"line-{number}", "text": "grün", "finish_reason": "stop"}
    return json.dumps(row | {"num_prompt_tokens": 1, "num_completion_tokens": 2}, ensure_ascii=False)


def error(number: int) -> str:
    return json.dumps({"id": f"line-{number}", "file": "a.jsonl", "line": number, "error": "bad"})


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(folder_module, "PART_LINES", 4)


@pytest.fixture
def parquet(tmp_path):
    (tmp_path / "in.jsonl").write_text("".join(f'{{"id": "line-{i}", "prompt": "a"}}\n' for i in range(12)))
    inputs = Inputs([str(tmp_path / "in.jsonl")])
    return ParquetFormat(inputs, LineFormat(), scan(inputs))


class Crash(Exception):
    """The machine stops here."""


class Disk:
    """Lets a number of the operations that change a disk through; the next one, and all after it, never happen."""

    def __init__(self, monkeypatch, num_allowed):
        self.num_left = num_allowed
        for name in ("write", "replace", "unlink", "fsync", "ftruncate"):
            monkeypatch.setattr(folder_module.os, name, self._guard(getattr(os, name), name))

    def _guard(self, operation, name):
        def guarded(*args):
            self.num_left -= 1
            if self.num_left < 0:
                raise Crash
            if self.num_left == 0 and name == "write":
                return operation(args[0], args[1][: len(args[1]) // 2])  # Torn.
            return operation(*args)

        return guarded


def seen_of(folder) -> list[bytes]:
    seen = []
    counts = folder.read(seen.append)
    assert counts.answered + counts.failed == len(seen)
    return seen


def work(folder, parquet, numbers) -> None:
    """What a job does: recover, then write what has no row yet, some of it as errors."""
    folder.recover(parquet)
    done = set(seen_of(folder))
    left = [number for number in numbers if hash_id(f"line-{number}") not in done]
    parts = PartWriter(folder, parquet)
    for start in range(0, len(left), 3):
        batch = left[start : start + 3]
        good = [answer(number) for number in batch if number % 5]
        parts.write(good, [error(number) for number in batch if number % 5 == 0])
        parts.sync()
    parts.close()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_crash_at_any_moment_loses_and_doubles_nothing(tmp_path, form, parquet):
    parquet = parquet if form == "parquet" else None
    numbers, expected = range(12), {hash_id(f"line-{number}") for number in range(12)}
    num_allowed, ended = 0, False
    while not ended:
        path = tmp_path / f"answers-{num_allowed}"
        path.mkdir()
        # Twice, so that a crash hits the recovery as well.
        for allowed in (num_allowed, num_allowed // 2):
            with pytest.MonkeyPatch.context() as patch:
                Disk(patch, allowed)
                try:
                    work(JobFolder(path), parquet, numbers)
                    ended = ended or allowed == num_allowed > 0
                except Crash:
                    pass
        work(JobFolder(path), parquet, numbers)
        seen = seen_of(JobFolder(path))
        assert len(seen) == len(expected)
        assert set(seen) == expected
        assert not [name for name in os.listdir(path) if name.endswith(".tmp")]
        num_allowed += 1
    assert num_allowed > 20


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


def test_errors_lose_a_torn_line(tmp_path):
    (tmp_path / ERRORS).write_text(f"{error(1)}\n{error(2)[:20]}")
    folder = JobFolder(tmp_path)
    assert folder.read().failed == 1
    folder.recover(None)
    assert (tmp_path / ERRORS).read_text() == f"{error(1)}\n"


def test_parts_have_a_bounded_number_of_lines(tmp_path):
    folder = JobFolder(tmp_path)
    parts = PartWriter(folder, None)
    parts.write([answer(i) for i in range(10)], [])
    assert [path.name for path in folder.parts()] == ["part-00000.jsonl", "part-00001.jsonl"]
    assert folder.open_part(2).exists()
    assert folder.read().answered == 8
    assert folder.read(with_open=True).answered == 10
    with open(folder.open_part(2), "a") as file:
        file.write(answer(10)[:20])  # still being written
    assert folder.read(with_open=True).answered == 10
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
    with pytest.raises(ValueError, match=r"holds 'thesis.tex' and no manifest.json"):
        folder.read_manifest()
    folder.write_manifest({"job": {}})
    assert folder.read_manifest() == {"job": {}}
    (tmp_path / "part-00000.jsonl").touch()
    folder.clear()
    assert sorted(os.listdir(tmp_path)) == [MANIFEST, "thesis.tex"]
    (tmp_path / MANIFEST).write_text("{")
    with pytest.raises(ValueError, match=r"manifest.json: is damaged"):
        folder.read_manifest()
