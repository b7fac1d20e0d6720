"""What the tests of jobs share: files, their rows, and a reader without a process."""

import json
import random
from pathlib import Path

from nanovllm.jobs.reader import read


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
