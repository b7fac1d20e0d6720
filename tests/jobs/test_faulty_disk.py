"""Every call of the disk goes wrong once: whatever happens, the same command ends with every line exactly once.

As SQLite's tests do it: the n-th call that a job makes fails, or takes half, or is the last one of its process, for
every n. An engine that answers at once makes a job take milliseconds.
"""

import json
import os
import shutil
import threading
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from faulty_disk import DIES, FAILS, KILLED, SHORT, STAYS_BROKEN, FaultyDisk
from job_files import ReadHere, by_id, read_lines, write_lines

from nanovllm import LLM, cli
from nanovllm.jobs import arguments, part_writer, reader, run, work, writer

read_table = pytest.importorskip("pyarrow.parquet", reason="needs the extra jobs").read_table

LINES = [{"id": i, "prompt": f"a block {i}"} for i in range(7)]
LINES[3:3] = ['{"id": "torn', {"id": "bad", "prompt": 3}]
CORRECTED = [{"id": "bad", "prompt": "a block"}]
ROWS_AT_ONCE = 3
SOME_FAILED = 3  # the exit status of a job that is complete, with errors


class EngineAtOnce(LLM):
    """Answers without a model: in fours, the last one first."""

    def __init__(self, model, **options):
        options = {"tokenizer": str(model), "load_format": "auto", "data_parallel_size": 1}
        self.config = SimpleNamespace(model=str(model), **options)

    def exit(self):
        pass

    def __del__(self):
        pass

    def stats(self):
        return {"generated_tokens": 0, "running": 0}

    def generate_iter(self, prompts, params, on_error):
        waiting = []
        for index, prompt in enumerate(prompts):
            waiting.append((index, answer(prompt)))
            if len(waiting) == 4:
                yield from reversed(waiting)
                waiting = []
        yield from reversed(waiting)


def answer(prompt):
    text = f"{sum(prompt)} is the sum"
    counts = {"token_ids": prompt[:3], "num_prompt_tokens": len(prompt)}
    return {"text": text, "finish_reason": "length", "logprobs": None, "prompt_logprobs": None} | counts


class InTurns:
    """Stands for the event that ends a Writer's pauses: it writes whenever it has got three rows, and at the end. So
    all runs make the same calls."""

    def __init__(self):
        self._go, self._is_idle, self._is_set = threading.Semaphore(0), threading.Semaphore(0), False

    def set(self):
        self._is_set = True
        self._go.release()

    def wait(self, timeout):
        self._is_idle.release()
        if not self._is_set:
            self._go.acquire()
        return self._is_set

    def turn(self):
        """Let it write, and wait until it has."""
        self._is_idle.acquire()
        self._go.release()
        self._is_idle.acquire()
        self._is_idle.release()


class WriterInTurns(writer.Writer):
    def __init__(self, *args):
        super().__init__(*args)
        self._is_closing, self._num_put = InTurns(), 0

    def put(self, item):
        super().put(item)
        self._num_put += 1
        if self._num_put % ROWS_AT_ONCE == 0:
            self._is_closing.turn()


class Job(NamedTuple):
    """A command, and what is there before it."""

    output: str = "answers"
    words: tuple[str, ...] = ()
    before: tuple[str, ...] | None = None  # words of a job that has ended; None: nothing is there
    is_second: bool = False  # a job that died half-way is there

    @property
    def is_ordered(self):
        return "--ordered" in self.words


JOBS = {
    "lines": Job(),
    "in order": Job(words=("--ordered",)),
    "parquet in order": Job(words=("--ordered", "--format", "parquet")),
    "a file": Job("answers.jsonl"),
    "a file of parquet in order": Job("answers.parquet", ("--ordered",)),
    "goes on": Job(is_second=True),
    "goes on in order": Job(words=("--ordered",), is_second=True),
    "goes on with a file of parquet": Job("answers.parquet", is_second=True),
    "overwrites": Job(words=("--overwrite",), before=("--temperature", "0")),
    "overwrites a file": Job("answers.jsonl", ("--overwrite",), before=("--temperature", "0")),
    "corrects": Job(words=("--retry-errors", "CORRECTED"), before=()),
    "tries errors again": Job("answers.jsonl", words=("--retry-errors",), before=()),
}


# A disk that stays broken after a call looks like one whose process has died there, and needs no process of its own.
DIES_TOO = [name for name in JOBS if name not in ("lines", "a file", "goes on", "tries errors again")]
CASES = [(FAILS, name) for name in JOBS]
CASES += [(STAYS_BROKEN, name) for name in DIES_TOO]
CASES += [(DIES, "corrects")]
CASES += [(SHORT, name) for name in ("in order", "a file of parquet in order")]
AT_NIGHT = [(DIES, name) for name in DIES_TOO if name != "corrects"]


def case_of(how, name, *marks):
    return pytest.param(how, JOBS[name], id=f"{how}-{name}".replace(" ", "-"), marks=marks)


@pytest.fixture
def disk_of(path, tmp_path, monkeypatch):
    """disk_of(job): a Case, whose job runs in milliseconds."""
    tokenizer = reader.find_tokenizer(str(path), None)
    monkeypatch.setattr(reader, "find_tokenizer", lambda *args: tokenizer)
    monkeypatch.setattr(arguments, "LLM", EngineAtOnce)
    monkeypatch.setattr(arguments, "check_options", lambda *args, **options: None)
    for command in ("status", "chat", "serve", "fit", "tune"):
        monkeypatch.setattr(cli, f"_add_{command}", lambda commands: None)
    monkeypatch.setattr(run, "_versions", dict)
    monkeypatch.setattr(run, "job_fingerprint", lambda arguments: {})
    monkeypatch.setattr(run, "engine_fingerprint", lambda llm: {})
    monkeypatch.setattr(run, "Writer", WriterInTurns)
    monkeypatch.setattr(work, "ReadAhead", ReadHere)
    monkeypatch.setattr(writer, "SYNC_SECONDS", 0)
    monkeypatch.setattr(part_writer, "PART_LINES", 3)
    files = write_lines(tmp_path / "in.jsonl", LINES), write_lines(tmp_path / "corrected.jsonl", CORRECTED)
    return lambda job: Case(job, path, tmp_path, *files)


class Case:
    """A job on a disk."""

    def __init__(self, job, model, root, lines, corrected):
        self.job, self.disk, self._start = job, root / "disk", root / "start"
        self.output = self.disk / job.output
        self.command = ["run-batch", "-i", str(lines), "-o", str(self.output), "--model", str(model)]
        self.words = [str(corrected) if word == "CORRECTED" else word for word in job.words]
        self.disk.mkdir()
        if job.before is not None:
            assert self.run(job.before) == SOME_FAILED
        self.keep()
        self.status = self.run()
        assert self.status in (0, SOME_FAILED)
        self.calls, self.expected = self.untouched.calls, self.result()
        if job.is_second:
            self.reset()
            assert self.die(len(self.calls) * 2 // 3) == KILLED
            self.keep()
            self.run()
            self.calls = self.untouched.calls

    def keep(self):
        """Let each run begin with what is there now."""
        shutil.rmtree(self._start, ignore_errors=True)
        shutil.copytree(self.disk, self._start)

    def reset(self):
        shutil.rmtree(self.disk)
        shutil.copytree(self._start, self.disk)

    def run(self, words=None):
        with FaultyDisk(self.disk) as self.untouched:
            return self.call(words)

    def call(self, words=None):
        return cli.main([*self.command, *(self.words if words is None else words)])

    def die(self, number):
        """Run in a process of its own, which dies with the call of this number; returns its exit status."""
        pid = os.fork()
        if pid == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with FaultyDisk(self.disk, number, DIES):
                os._exit(self.call())
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def result(self):
        """All rows of the answers and of the errors, and the names of all files."""
        folder = self.output if self.output.is_dir() else self.output.with_name(f"{self.output.name}.job")
        answers = [self.output] if folder != self.output else sorted(folder.glob("part-*"))
        rows = [row for file in answers for row in read_rows(file)]
        manifest = json.loads((folder / "_manifest.json").read_text())
        counts = {name: value for name, value in manifest["progress"].items() if name != "seconds"}
        names = {path.name for path in self.disk.rglob("*") if not path.name.startswith("part-")}
        errors = read_lines(*folder.glob("_errors.jsonl"))
        return rows if self.job.is_ordered else by_id(rows), by_id(errors), counts, names


def read_rows(file):
    return read_table(file).to_pylist() if file.suffix == ".parquet" else read_lines(file)


def again(case, said):
    """The words of the call that an error advises."""
    if "The same command goes on with the job" in said:
        without = said.partition("goes on with the job, without ")[2]
        return [word for word in case.words if not (without and word in without)]
    assert said.endswith("; repeat the call when that is mended\n") or ": cannot be read after line" in said
    return case.words


@pytest.mark.parametrize(
    ("how", "job"),
    [*(case_of(*each) for each in CASES), *(case_of(*each, pytest.mark.nightly) for each in AT_NIGHT)],
)
def test_every_line_is_answered_once_whatever_goes_wrong(disk_of, job, how, capfd):
    case = disk_of(job)
    numbers = [number for number, (name, _) in enumerate(case.calls) if how != SHORT or name == "write"]
    assert len(numbers) > 3
    for number in numbers:
        case.reset()
        capfd.readouterr()
        which = f"call {number}: {' '.join(case.calls[number])}"
        words = case.words
        if how == DIES:
            assert case.die(number) == KILLED, which
        else:
            with FaultyDisk(case.disk, number, how) as disk:
                status = case.call()
            said = capfd.readouterr().err
            assert disk.is_hit
            assert not disk.open_files, which
            assert "Traceback" not in said, which
            if status == case.status:  # What failed was not needed.
                assert_complete(case, which)
            else:
                assert how != SHORT, which
                # Where later calls fail too, the last one's file may be named.
                assert str(case.disk / (case.calls[number][1] if how == FAILS else "")) in said, which
                words = again(case, said)
        assert case.run(words) == case.status, which
        assert case.result() == case.expected, which


def assert_complete(case, which):
    """All answers are there. What else a run leaves, such as the lines in the errors, may wait for the next one."""
    rows, errors, *_ = case.result()
    assert rows == case.expected[0], which
    assert [row["id"] for row in errors] == [row["id"] for row in case.expected[1]], which
