"""What the tests of jobs share: files, their rows, and a reader without a process."""

import json
import random
from contextlib import contextmanager
from pathlib import Path

import pytest

from nanovllm.jobs.reader import read
from nanovllm.jobs.writer import Writer


class ReadHere:
    """Stands for ReadAhead, whose process takes seconds to start."""

    def __init__(self, plan):
        self._plan = plan

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def __iter__(self):
        for batch in read(self._plan):
            yield from batch


def prompts(num_lines: int) -> list[dict]:
    rng = random.Random(0)
    return [{"id": i, "prompt": "a block " * rng.randint(1, 9) + str(i), "topic": f"t{i}"} for i in range(num_lines)]


def write_lines(file: Path, lines) -> Path:
    """lines: rows, or raw text."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file.write_text("".join(f"{text}\n" for text in texts), "utf-8")
    return file


def read_lines(*files: Path) -> list[dict]:
    return [json.loads(line) for file in files for line in file.read_text("utf-8").splitlines()]


def read_folder(folder: Path) -> list[dict]:
    """The answers, in the order in which they were written."""
    return read_lines(*sorted(folder.glob("part-*.jsonl")))


def by_id(rows: list[dict]) -> list[dict]:
    return sorted(rows, key=lambda row: str(row["id"]))


@contextmanager
def interrupted_after(num_answers):
    """A block in which Ctrl-C comes with the answer of this number."""
    put, seen = Writer.put, []

    def count(self, item):
        put(self, item)
        seen.append(item)
        if len(seen) == num_answers:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Writer, "put", count)
        yield


def num_rows(folder: Path) -> int:
    """Of complete parts and the open one, while a job runs."""
    files = [*folder.glob("part-*.jsonl"), *folder.glob("_part-*.tmp")]
    try:
        return sum(file.read_bytes().count(b"\n") for file in files)
    except FileNotFoundError:  # It has just been renamed.
        return 0
