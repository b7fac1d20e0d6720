"""The folder of a job's answers: its lock, its manifest, its parts, and what a crash may leave of them.

Rows are appended to an open part, `part-00000.jsonl.tmp`. A part is complete once it has its final name. docs/jobs.md
says which guarantees follow.
"""

import fcntl
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from uuid import uuid4

from typing_extensions import Self

from nanovllm.jobs.inputs import hash_id
from nanovllm.jobs.lines import Answered, Row, from_json, read_answer
from nanovllm.jobs.parquet import ParquetFormat, read_parquet_answers

PART_LINES = 10_000
SYNC_SECONDS = 5.0  # A crash of the machine loses the rows of this time.
_LOCK_SECONDS = 1.0  # `is_locked` holds the lock for a moment.

MANIFEST, ERRORS, _LOCK = "manifest.json", "errors.jsonl", ".lock"
_PART = re.compile(r"part-(\d{5,})\.(jsonl|parquet)")
_OPEN_PART = re.compile(r"part-(\d{5,})\.jsonl\.tmp")
_OWN = re.compile(r"part-\d{5,}\.(jsonl|parquet)(\.tmp)?|(errors\.jsonl|manifest\.json)(\.tmp)?")


class Counts(NamedTuple):
    """What a folder holds."""

    answered: int = 0
    failed: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


class JobFolder:
    """A folder of answers, for one process at a time. A context manager, which holds the lock."""

    def __init__(self, path: str | os.PathLike):
        self.path = Path(path).expanduser()

    def __enter__(self) -> Self:
        """Raises OSError if the folder cannot be written, and ValueError if another process works on it."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = open(self.path / _LOCK, "a")
        deadline = time.monotonic() + _LOCK_SECONDS
        while not _try_lock(self._lock):
            if time.monotonic() > deadline:
                self._lock.close()
                raise ValueError(f"output={str(self.path)!r}: another process works on this folder")
            time.sleep(0.05)
        self._remove_staging()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._lock.close()  # which gives the lock back, as the end of the process does

    def is_locked(self) -> bool:
        """Whether a process works on the folder."""
        try:
            with open(self.path / _LOCK, "r+") as file:
                return not _try_lock(file)
        except FileNotFoundError:
            return False

    # -- the manifest --------------------------------------------------------------------------------------------------

    def read_manifest(self) -> dict[str, Any] | None:
        """None if no job has begun here. Raises ValueError if this is some other folder."""
        try:
            manifest = json.loads((self.path / MANIFEST).read_bytes())
        except FileNotFoundError:
            others = [name for name in sorted(os.listdir(self.path)) if name not in (_LOCK, f"{MANIFEST}.tmp")]
            if others:
                raise ValueError(
                    f"output={str(self.path)!r}: holds {others[0]!r} and no {MANIFEST}; choose another folder"
                ) from None
            return None
        except ValueError as error:
            raise ValueError(f"{self.path / MANIFEST}: is damaged: {error}") from None
        if not isinstance(manifest, dict) or "job" not in manifest:
            raise ValueError(f"{self.path / MANIFEST}: belongs to no job; choose another folder")
        return manifest

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        temporary = self.path / f"{MANIFEST}.tmp"
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(manifest, file, indent=1, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        self._rename(temporary, self.path / MANIFEST)

    def clear(self) -> None:
        """Delete the answers. The manifest stays until the next one takes its place."""
        for name in os.listdir(self.path):
            if _OWN.fullmatch(name) and name != MANIFEST:
                os.unlink(self.path / name)
        sync(self.path)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def parts(self) -> list[Path]:
        """The complete ones, in order."""
        return [path for _, path in self._numbered(_PART)]

    def _numbered(self, pattern: re.Pattern) -> list[tuple[int, Path]]:
        matches = filter(None, map(pattern.fullmatch, os.listdir(self.path)))
        return sorted((int(match[1]), self.path / match[0]) for match in matches)

    def next_part(self) -> int:
        return max((number for number, _ in self._numbered(_PART)), default=-1) + 1

    def open_part(self, number: int) -> Path:
        return self.path / f"part-{number:05d}.jsonl.tmp"

    def complete(self, number: int, parquet: ParquetFormat | None) -> Path:
        """Give an open part, which is not empty, its final form and name. parquet: None writes JSON lines."""
        open_part = self.open_part(number)
        sync(open_part)
        if parquet is None:
            part = self.path / f"part-{number:05d}.jsonl"
            self._rename(open_part, part)
            return part
        part = self.path / f"part-{number:05d}.parquet"
        temporary = part.with_name(f"{part.name}.tmp")
        parquet.write(open_part, temporary)
        sync(temporary)
        self._rename(temporary, part)
        os.unlink(open_part)
        return part

    def new_staging(self) -> Path:
        """A folder in which other processes of this run make parts, before they move them here. The next run removes
        it, so that processes which outlive this one can complete no part."""
        path = self.path / f".staging-{uuid4().hex}"
        path.mkdir()
        return path

    def _remove_staging(self) -> None:
        for path in self.path.glob(".staging-*"):
            path.rename(path.with_name(path.name.replace("staging", "ended")))  # At once: no file gets in or out now.
        for path in self.path.glob(".ended-*"):
            shutil.rmtree(path)

    def _rename(self, temporary: Path, path: Path) -> None:
        os.replace(temporary, path)
        sync(self.path)

    def recover(self, parquet: ParquetFormat | None) -> None:
        """Complete what a crash has left open. Afterwards every row is in a complete part or in errors.jsonl."""
        are_complete = {number for number, _ in self._numbered(_PART)}
        for number, path in self._numbered(_OPEN_PART):
            # A part of Parquet is complete before its rows in JSON are deleted.
            if number in are_complete or not _cut_torn_end(path, read_answer):
                os.unlink(path)
            else:
                self.complete(number, parquet)
        if (self.path / ERRORS).exists():
            _cut_torn_end(self.path / ERRORS, itemgetter("id"))

    def forget_errors(self) -> None:
        (self.path / ERRORS).unlink(missing_ok=True)
        sync(self.path)

    def read(self, see: Callable[[bytes], object] = lambda line_id: None, with_open: bool = False) -> Counts:
        """Count all rows of complete parts and of errors.jsonl.

        see: called with the `hash_id` of each. with_open: count those of the open part too, as far as it is written.
        Raises ValueError for a damaged file.
        """
        counts = [0, 0, 0, 0]
        answers = chain.from_iterable(map(read_answers, self.parts()))
        for row in chain(answers, self._read_open() if with_open else ()):
            see(hash_id(row.id))
            counts[0] += 1
            counts[2] += row.num_prompt_tokens
            counts[3] += row.num_completion_tokens
        for _, error in _json_rows(self.path / ERRORS) if (self.path / ERRORS).exists() else ():
            see(hash_id(error["id"]))
            counts[1] += 1
        return Counts(*counts)

    def _read_open(self) -> Iterator[Answered]:
        are_complete = {number for number, _ in self._numbered(_PART)}
        for number, path in self._numbered(_OPEN_PART):
            if number not in are_complete:
                with suppress(FileNotFoundError, ValueError):  # It has just become complete; it has a torn end.
                    yield from read_answers(path)


def read_answers(path: Path) -> Iterator[Answered]:
    """Of a part. Raises ValueError if it is damaged."""
    if path.suffix == ".parquet":
        yield from read_parquet_answers(path)
        return
    for number, row in _json_rows(path):
        try:
            yield read_answer(row)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: is no answer of this job: {error!r}") from None


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open(path, "rb") as file:
        for number, raw in enumerate(file, 1):
            if not raw.endswith(b"\n"):
                return  # still being written
            try:
                yield number, from_json(raw)
            except ValueError as error:
                raise ValueError(f"{path}:{number}: {error}") from None


def _cut_torn_end(path: Path, read: Callable[[Row], object]) -> int:
    """Cut the file where the first line begins that is not whole. Returns its new size. read: fails for such a row."""
    size = 0
    with open(path, "r+b") as file:
        for raw in file:
            try:
                read(from_json(raw if raw.endswith(b"\n") else b""))
            except (KeyError, TypeError, ValueError):
                break
            size += len(raw)
        file.truncate(size)
        os.fsync(file.fileno())
    return size


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def sync(path: Path) -> None:
    """Have the disk keep a file's content, or the names in a folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


class Status(NamedTuple):
    """The state of a job's folder."""

    job: Row  # the model and the parameters
    is_running: bool
    num_lines: int  # of the input
    counts: Counts  # of all rows in the folder, also in the open part
    seconds: float  # of all calls that have ended in order


def job_status(output: str | os.PathLike[str]) -> Status:
    """How far a job is. Raises ValueError or OSError if this is no job's folder."""
    folder = JobFolder(output)
    manifest = folder.read_manifest()
    if manifest is None:
        raise ValueError(f"output={str(folder.path)!r}: holds no job")
    seconds = manifest["progress"]["seconds"]
    return Status(manifest["job"], folder.is_locked(), manifest["num_lines"], folder.read(with_open=True), seconds)


class PartWriter:
    """Appends rows to the open part and to errors.jsonl."""

    def __init__(self, folder: JobFolder, parquet: ParquetFormat | None):
        self._folder = folder
        self._parquet = parquet
        self._number = folder.next_part()
        self._num_lines = 0
        self._part: AppendedFile | None = None
        self._errors: AppendedFile | None = None
        self._next_sync = time.monotonic() + SYNC_SECONDS

    def write(self, answers: list[str], errors: list[str]) -> None:
        """Rows in JSON. Raises OSError."""
        if errors:
            self._errors = self._errors or AppendedFile(self._folder.path / ERRORS)
            self._errors.append(errors)
        while answers:
            some, answers = answers[: PART_LINES - self._num_lines], answers[PART_LINES - self._num_lines :]
            self._part = self._part or AppendedFile(self._folder.open_part(self._number))
            self._part.append(some)
            self._num_lines += len(some)
            if self._num_lines == PART_LINES:
                self._complete()
        if time.monotonic() >= self._next_sync:
            self.sync()

    def sync(self) -> None:
        """Have the disk keep what has been written."""
        for file in (self._part, self._errors):
            if file is not None:
                file.sync()
        self._next_sync = time.monotonic() + SYNC_SECONDS

    def _complete(self) -> None:
        self._part.close()
        self._part = None
        self._folder.complete(self._number, self._parquet)
        self._number += 1
        self._num_lines = 0

    def close(self, complete: bool = True) -> None:
        """complete: False leaves the open part as it is, after an error."""
        if complete:
            self.sync()
            if self._part is not None:
                self._complete()
        for file in (self._part, self._errors):
            if file is not None:
                file.close()
        self._part = self._errors = None


class AppendedFile:
    """A file that grows by whole lines. Nothing is buffered in this process."""

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        sync(path.parent)

    def append(self, lines: list[str]) -> None:
        left = memoryview("".join(line + "\n" for line in lines).encode())
        while left:  # A write may take a part only: of a disk that is nearly full, or of gigabytes.
            left = left[os.write(self._file, left) :]

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)
