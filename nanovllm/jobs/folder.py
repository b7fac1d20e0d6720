"""The folder of a job's answers: its lock, its manifest, its parts, and what a crash may leave of them.

Rows are appended to an open part, `_part-00000.jsonl.tmp`. A part is complete once it has its final name. Names that
begin with `_` or `.` are skipped by programs that read a folder of data, such as pandas. docs/jobs.md says which
guarantees follow.
"""

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import Self

from nanovllm.jobs.inputs import hash_id
from nanovllm.jobs.lines import Answered, Row, from_json, read_answer
from nanovllm.jobs.parquet import ParquetFormat, join_parquet, read_parquet_answers
from nanovllm.utils.checks import is_int
from nanovllm.utils.file_errors import names_file
from nanovllm.utils.text_json import to_json

_LOCK_SECONDS = 1.0  # `is_locked` holds the lock for a moment.

MANIFEST, ERRORS, EARLY, CORRECTED = "_manifest.json", "_errors.jsonl", "_early.jsonl", "_corrected.jsonl"
IMAGES = "_images.jsonl"
_LOCK = ".lock"
_PART = re.compile(r"part-(\d{5,})\.(jsonl|parquet)")
_OPEN_PART = re.compile(r"_part-(\d{5,})\.jsonl\.tmp")
_OWN = re.compile(
    r"(_?part-\d{5,}\.(jsonl|parquet)|_errors\.jsonl|_manifest\.json|_corrected\.jsonl|"
    r"_images\.jsonl)(\.tmp)?|_early\.jsonl|_joined\.(jsonl|parquet)"
)
_DATA_SUFFIXES = (".json", ".ndjson", ".csv", ".tsv", ".txt", ".gz", ".zst", ".xlsx", ".arrow")
REFUSALS = (ValueError, TypeError, ImportError, OSError)  # what a wrong call raises
FILE_FORMATS = {".jsonl": "jsonl", ".parquet": "parquet"}  # of an output that is one file


class Counts(NamedTuple):
    """What a folder holds."""

    answered: int = 0
    failed: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0


class JobFolder:
    """A folder of answers, for one process at a time. A context manager, which holds the lock.

    Attributes:
        path: the folder.
        file: where all answers go in the end, if the output is one file: `answers.jsonl`, of which the folder is
            `answers.jsonl.job`. None if it is a folder.
    """

    def __init__(self, output: str | os.PathLike):
        """Raises ValueError if this can be neither a folder nor a file of answers."""
        path = Path(output).expanduser()
        self._output = str(output)
        self.file = path if path.suffix in FILE_FORMATS and not path.is_dir() else None
        self.path = path if self.file is None else path.with_name(f"{path.name}.job")
        if self.file is None and (path.suffix in _DATA_SUFFIXES or path.is_file()) and not path.is_dir():
            what = "is a file" if path.is_file() else "looks like a file"
            raise self.refusal(f"{what}; must be a folder, or a file that ends in {' or '.join(FILE_FORMATS)}")
        self._lock: int | None = None

    def refusal(self, reason: str) -> ValueError:
        return ValueError(f"output={self._output!r}: {reason}")

    # -- the lock ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Raises OSError if the folder cannot be written, and ValueError if it holds something else or another process
        works on it. Until it is known to be a job's, nothing in it is touched."""
        self._had_manifest = self.read_manifest() is not None
        self._made = [path for path in (self.path, *self.path.parents) if not path.exists()]
        deadline = time.monotonic() + _LOCK_SECONDS
        while self._lock is None:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                with names_file(self.path / _LOCK):
                    self._lock = lock if _try_lock(lock) and _is_same(lock, self.path / _LOCK) else None
            finally:
                if self._lock is None:
                    os.close(lock)
            if self._lock is not None:
                return self
            if time.monotonic() > deadline:
                raise self.refusal("another process works on this folder")
            time.sleep(0.05)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if not self._had_manifest:
            with suppress(OSError):
                self._leave_nothing(is_refused=kind is not None and issubclass(kind, REFUSALS))
        if self._lock is not None:
            os.close(self._lock)  # which gives the lock back, as the end of the process does
        self._lock = None

    def _leave_nothing(self, is_refused: bool) -> None:
        """Delete what a call has made that was refused, perhaps by an engine's start, before a line was answered."""
        own = {_LOCK, f"{MANIFEST}.tmp"} | ({MANIFEST, IMAGES} if is_refused else set())
        if (names := set(os.listdir(self.path))) <= own:
            for name in names:
                os.unlink(self.path / name)
            for path in self._made:
                path.rmdir()

    def check(self) -> None:
        """Raises FolderLost if the folder on the disk is no longer the one whose lock this process holds."""
        if self._lock is not None and not _is_same(self._lock, self.path / _LOCK):
            raise FolderLost(errno.ESTALE, "the folder was deleted, moved or replaced while the job worked on it")

    def is_locked(self) -> bool:
        """Whether a process works on the folder."""
        try:
            lock = os.open(self.path / _LOCK, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            return not _try_lock(lock)
        finally:
            os.close(lock)

    def owns(self, path: str) -> bool:
        """Whether a file is one of the job's answers, or of its other files."""
        file, folder = os.path.realpath(path), os.path.realpath(self.path)
        if self.file is not None and file == os.path.realpath(self.file):
            return True
        return os.path.dirname(file) == folder and _OWN.fullmatch(os.path.basename(file)) is not None

    # -- the manifest --------------------------------------------------------------------------------------------------

    def read_manifest(self) -> dict[str, Any] | None:
        """None if no job has begun here. Raises ValueError if this is some other folder or file."""
        path = self.path / MANIFEST
        try:
            with names_file(path):
                manifest = json.loads(path.read_bytes())
        except FileNotFoundError:
            self._require_empty()
            return None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: is damaged: {error}") from None
        if not isinstance(manifest, dict) or "job" not in manifest:
            raise ValueError(f"{path}: belongs to no job; choose another folder")
        if (wrong := _wrong_key(manifest)) is not None:
            raise ValueError(f"{path}: is damaged: {wrong!r} is missing or wrong")
        return manifest

    def _require_empty(self) -> None:
        try:
            names = sorted(os.listdir(self.path))
        except FileNotFoundError:
            names = []
        if others := [name for name in names if name not in (_LOCK, f"{MANIFEST}.tmp")]:
            raise self.refusal(f"holds {others[0]!r} and no {MANIFEST}; choose another folder")
        if self.file is not None and os.path.lexists(self.file):
            raise self.refusal(f"is there, and of no job, since there is no {self.path}; choose another name")

    def write_manifest(self, manifest: dict[str, Any]) -> None:
        self.write_lines(MANIFEST, [json.dumps(manifest, indent=1, ensure_ascii=False)])

    def write_lines(self, name: str, lines: Iterable[str]) -> None:
        """Write a file of this name, or replace it."""
        self.check()
        temporary = self.path / f"{name}.tmp"
        with names_file(temporary), open(temporary, "w", encoding="utf-8", opener=_no_link) as file:
            file.writelines(f"{line}\n" for line in lines)
            file.flush()
            os.fsync(file.fileno())
        self._rename(temporary, self.path / name)

    def clear(self) -> None:
        """Delete the answers. The manifest stays until the next one takes its place."""
        for name in os.listdir(self.path):
            if _OWN.fullmatch(name) and name != MANIFEST:
                os.unlink(self.path / name)
        if self.file is not None:
            self.file.unlink(missing_ok=True)
        sync(self.path)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def parts(self) -> list[Path]:
        """The complete ones, in order. The file, if the output is one, is the first."""
        file = [self.file] if self.file is not None and self.file.exists() else []
        return file + [path for _, path in self._numbered(_PART)]

    def _numbered(self, pattern: re.Pattern) -> list[tuple[int, Path]]:
        matches = filter(None, map(pattern.fullmatch, os.listdir(self.path)))
        return sorted((int(match[1]), self.path / match[0]) for match in matches)

    def next_part(self) -> int:
        return max((number for number, _ in self._numbered(_PART)), default=-1) + 1

    def open_part(self, number: int) -> Path:
        return self.path / f"_part-{number:05d}.jsonl.tmp"

    def complete(self, open_part: Path, number: int, parquet: ParquetFormat | None) -> None:
        """Give an open part, which is not empty, its final form and name. parquet: None writes JSON lines."""
        self.check()
        sync(open_part)
        if parquet is None:
            self._rename(open_part, self.path / f"part-{number:05d}.jsonl")
            return
        part = self.path / f"part-{number:05d}.parquet"
        temporary = self.path / f"_{part.name}.tmp"
        temporary.unlink(missing_ok=True)
        with names_file(temporary):
            parquet.write(open_part, temporary)
        sync(temporary)
        self._rename(temporary, part)
        os.unlink(open_part)

    def _rename(self, temporary: Path, path: Path) -> None:
        os.replace(temporary, path)
        sync(path.parent)

    def recover(self, parquet: ParquetFormat | None) -> None:
        """Complete what a crash has left open. Afterwards every row is in a complete part, in the errors, or in the
        file of early rows."""
        self._delete_joined()
        are_complete = {number for number, _ in self._numbered(_PART)}
        for number, path in self._numbered(_OPEN_PART):
            # A part of Parquet is complete before its rows in JSON are deleted.
            if number in are_complete or not _cut_torn_end(path, read_answer):
                os.unlink(path)
            else:
                self.complete(path, number, parquet)
        for name, read in ((ERRORS, itemgetter("id")), (EARLY, read_answer)):
            if os.path.lexists(self.path / name):
                _cut_torn_end(self.path / name, read)

    def forget_errors(self, ids: Collection[bytes] | None = None) -> None:
        """ids: `hash_id` of the lines whose errors are deleted. None: all."""
        if ids is None:
            (self.path / ERRORS).unlink(missing_ok=True)
            sync(self.path)
        else:
            self.change_errors(lambda error: None if hash_id(error["id"]) in ids else error)

    def change_errors(self, change: Callable[[Row], Row | None]) -> None:
        """Replace each row of the errors by another one, or None."""
        rows = list(filter(None, map(change, self.errors())))
        if rows:
            self.write_lines(ERRORS, map(to_json, rows))
        else:
            self.forget_errors()

    def errors(self) -> Iterator[Row]:
        path = self.path / ERRORS
        return (error for _, error in json_rows(path)) if path.exists() else iter(())

    def read(self, see: Callable[[bytes], object] = lambda line_id: None) -> Counts:
        """Count all rows of complete parts and of the errors. see: called with the `hash_id` of each. Raises ValueError
        for a damaged file."""
        return self._count(chain.from_iterable(map(read_answers, self.parts())), see)

    def _count(self, answers: Iterator[Answered], see: Callable[[bytes], object]) -> Counts:
        counts = [0, 0, 0, 0]
        for row in answers:
            see(hash_id(row.id))
            counts[0] += 1
            counts[2] += row.num_prompt_tokens
            counts[3] += row.num_completion_tokens
        for error in self.errors():
            see(hash_id(error["id"]))
            counts[1] += 1
        return Counts(*counts)

    def read_all(self) -> Counts:
        """Count the rows of the open part and of early rows too, as far as they are written."""
        seen = set[bytes]()

        def unseen() -> Iterator[Answered]:
            """A row is early, then in the open part, and then in a complete one; it may be read in two of them."""
            for rows in (*map(read_answers, self.parts()), self._read_open(), self._read(self.path / EARLY)):
                for row in rows:
                    if (line_id := hash_id(row.id)) not in seen:
                        seen.add(line_id)
                        yield row

        return self._count(unseen(), lambda line_id: None)

    def _read_open(self) -> Iterator[Answered]:
        are_complete = {number for number, _ in self._numbered(_PART)}
        for number, path in self._numbered(_OPEN_PART):
            if number not in are_complete:
                yield from self._read(path)

    def _read(self, path: Path) -> Iterator[Answered]:
        with suppress(FileNotFoundError, ValueError):  # It has just become complete; it has a torn end.
            yield from read_answers(path)

    def early_rows(self) -> Iterator[tuple[Answered, str]]:
        """Answers that were finished and wait for lines before them, with their JSON. After `recover`."""
        if (self.path / EARLY).exists():
            with names_file(self.path / EARLY), open(self.path / EARLY, "rb") as file:
                for raw in file:
                    yield read_answer(from_json(raw)), raw.decode().rstrip("\n")

    # -- an output that is one file ------------------------------------------------------------------------------------

    def finish(self) -> None:
        """No line is missing any more. If the output is one file, make it of all parts."""
        (self.path / EARLY).unlink(missing_ok=True)  # A crash has left it. All its rows are in parts.
        if self.file is None or self.parts() == [self.file]:
            return
        self.check()
        parts = self.parts()
        if len(parts) == 1:
            (temporary,) = parts
        else:
            temporary = self.path / f"_joined{self.file.suffix}"
            temporary.unlink(missing_ok=True)
            join = join_parquet if self.file.suffix == ".parquet" else _join_lines
            with names_file(temporary):
                join(parts, temporary)
            sync(temporary)
        self._rename(temporary, self.file)
        self._delete_joined()

    def _delete_joined(self) -> None:
        """Delete parts that are in the file, which a crash may have left. All rows of a part are there, or none."""
        parts = [path for _, path in self._numbered(_PART)]
        if self.file is None or not self.file.exists() or not parts:
            return
        joined = {hash_id(row.id) for row in read_answers(self.file)}
        for part in parts:
            if any(hash_id(row.id) in joined for row in read_answers(part)):
                os.unlink(part)


class FolderLost(OSError):
    """The folder of a job is not there any more, or another one is in its place."""


def _join_lines(parts: list[Path], path: Path) -> None:
    with open(path, "wb", opener=_no_link) as joined:
        for part in parts:
            with names_file(part), open(part, "rb") as file:
                while content := file.read(1 << 20):
                    with names_file(path):
                        joined.write(content)


def _wrong_key(manifest: Row) -> str | None:
    """What a manifest needs and this one lacks."""
    files, progress = manifest.get("input"), manifest.get("progress")
    names = ("name", "size", "fingerprint")
    are_right = {
        "job": isinstance(manifest["job"], dict),
        "num_lines": is_int(manifest.get("num_lines"), 0, 2**63),
        "input": isinstance(files, list) and all(isinstance(file, dict) and {*names} <= {*file} for file in files),
        "progress": isinstance(progress, dict) and type(progress.get("seconds")) in (int, float),
        "model_files": isinstance(manifest.get("model_files", {}), dict),
    }
    return next((name for name, is_right in are_right.items() if not is_right), None)


def read_answers(path: Path) -> Iterator[Answered]:
    """Reads the answers of a part. Raises ValueError if it is damaged."""
    if path.suffix == ".parquet":
        yield from read_parquet_answers(path)
        return
    for number, row in json_rows(path):
        try:
            yield read_answer(row)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: is no answer of this job: {error!r}") from None


def json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with names_file(path), open(path, "rb") as file:
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
    with names_file(path), open(path, "r+b", opener=_no_link) as file:
        for raw in file:
            try:
                read(from_json(raw if raw.endswith(b"\n") else b""))
            except (KeyError, TypeError, ValueError):
                break
            size += len(raw)
        file.truncate(size)
        os.fsync(file.fileno())
    return size


def _no_link(path: str, flags: int) -> int:
    """Open a file of the folder, and nothing that a link leads to."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _is_same(file: int, path: Path) -> bool:
    """Whether an open file is the one that has this name."""
    try:
        return os.path.samestat(os.fstat(file), os.lstat(path))
    except (FileNotFoundError, NotADirectoryError):
        return False


def sync(path: Path) -> None:
    """Have the disk keep a file's content, or the names in a folder."""
    file = os.open(path, os.O_RDONLY)
    try:
        with names_file(path):
            os.fsync(file)
    finally:
        os.close(file)


class AppendedFile:
    """A file of a job's folder that grows by whole lines. Nothing is buffered in this process."""

    def __init__(self, path: Path):
        self._path = path
        self._file = _no_link(str(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            sync(path.parent)
        except OSError:
            self.close()
            raise

    def append(self, lines: list[str]) -> None:
        left = memoryview("".join(line + "\n" for line in lines).encode())
        while left:  # A write may take a part only: of a disk that is nearly full, or of gigabytes.
            with names_file(self._path):
                left = left[os.write(self._file, left) :]

    def sync(self) -> None:
        """Raises FolderLost if the file was deleted, moved or replaced."""
        with names_file(self._path):
            os.fsync(self._file)
        if not _is_same(self._file, self._path):
            raise FolderLost(errno.ESTALE, f"{self._path.name} was deleted, moved or replaced while the job wrote it")

    def close(self) -> None:
        os.close(self._file)


class Status(NamedTuple):
    """The state of a job's folder."""

    job: Row  # the model and the parameters
    is_running: bool
    num_lines: int  # of the input
    counts: Counts  # of all rows in the folder, also in the open part
    seconds: float  # of all calls that have ended in order
    tokens_per_second: float | None  # generated in the last of these; None if it is not known
    price: float | None  # of all of them, if the last call had a price_per_hour


def job_status(output: str | os.PathLike[str]) -> Status:
    """How far a job is. Raises ValueError or OSError if this is no job's folder or file."""
    folder = JobFolder(output)
    if not folder.path.is_dir():
        raise FileNotFoundError(f"output={str(output)!r}: there is no such job")
    manifest = folder.read_manifest()
    if manifest is None:
        raise folder.refusal("holds no job")
    progress = manifest["progress"]
    of_calls = progress["seconds"], progress.get("tokens_per_second"), progress.get("price")
    return Status(manifest["job"], folder.is_locked(), manifest["num_lines"], folder.read_all(), *of_calls)
