"""The folder of a server's files and batches: what outlives the server.

    .lock                     one server at a time
    files/ID.jsonl            a file's content
    files/ID.json             what is known of it
    files/ID.upload           a file that is on its way
    batches/ID.json           a batch
    batches/ID/               the folder of its job, until its files are made

A record is replaced in one move, so a server that is killed finds the old one or the new one. A content without a
record does not exist, and is deleted at the next start.
"""

import fcntl
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from typing_extensions import Self

from nanovllm.integrations.serving.batches.records import Batch, Record, StoredFile, from_row, new_id, to_row
from nanovllm.utils.file_errors import names_file
from nanovllm.utils.text_json import as_json, parse_json

logger = logging.getLogger(__name__)

_FILE_ID, _BATCH_ID = re.compile(r"file-[0-9a-f]{32}"), re.compile(r"batch_[0-9a-f]{32}")
_PAGE = 4096  # bytes that a file takes at least
_LOCK_SECONDS = 5.0  # A server that was killed gives the lock back when its process has ended.


class TooLarge(ValueError):
    """There is no room for more."""


class InUse(ValueError):
    """A file is the input of a batch that has not ended."""


class BatchStore:
    """Files and batches by their ids, on the disk. A context manager, which holds the folder's lock.

    Any thread may call it. Ids that nobody knows are no paths: they are looked for in tables.
    """

    def __init__(self, path: str | os.PathLike[str], max_file_bytes: int, max_bytes: int):
        """max_file_bytes: of one file that is uploaded. max_bytes: of all files together."""
        self.path = Path(path).expanduser()
        self.max_file_bytes, self.max_bytes = max_file_bytes, max_bytes
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, Batch] = {}
        self._change = threading.RLock()
        self._lock: int | None = None

    def __enter__(self) -> Self:
        """Raises ValueError if another server works on the folder, and OSError if it cannot be written."""
        for folder in (self.path / "files", self.path / "batches"):
            folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            self._take(self._lock)
            self._load()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None

    def _take(self, lock: int) -> None:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(f"batches={str(self.path)!r}: another server works on this folder") from None
                time.sleep(0.05)

    def _load(self) -> None:
        self._files = {each.id: each for each in self._read_all(StoredFile, self.path / "files", _FILE_ID)}
        self._batches = {each.id: each for each in self._read_all(Batch, self.path / "batches", _BATCH_ID)}
        for path in (self.path / "files").iterdir():
            is_content = path.suffix == ".jsonl" and not path.with_suffix(".json").exists()
            if _FILE_ID.fullmatch(path.stem) and (path.suffix in (".upload", ".tmp") or is_content):
                path.unlink()
        for path in (self.path / "batches").glob("*.tmp"):  # records that were being written
            if _BATCH_ID.fullmatch(path.stem):
                path.unlink()
        for batch in self._batches.values():
            if batch.has_ended and (batch.output_file_id or batch.error_file_id):
                self.delete_job(batch.id)

    def _read_all(self, kind: type[Record], folder: Path, pattern: re.Pattern[str]) -> list[Record]:
        """The oldest first."""
        records = list[Record]()
        for path in folder.glob("*.json"):
            if not pattern.fullmatch(path.stem):
                continue
            try:
                record = from_row(kind, parse_json(path.read_text("utf-8")))
                if record.id != path.stem:
                    raise ValueError(f"has the id {record.id!r}")
                records.append(record)
            except (ValueError, TypeError) as error:
                logger.error("%s: is left out, because it is damaged: %s", path, error)
        return sorted(records, key=lambda record: record.created_ns)

    def _write(self, record: StoredFile | Batch) -> None:
        folder = "files" if isinstance(record, StoredFile) else "batches"
        path = self.path / folder / f"{record.id}.json"
        temporary = path.with_suffix(".tmp")
        with names_file(temporary), open(temporary, "w", encoding="utf-8") as file:
            file.write(as_json(to_row(record)))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_names(path.parent)

    # -- files ---------------------------------------------------------------------------------------------------------

    def files(self) -> list[StoredFile]:
        """The oldest first."""
        with self._change:
            return list(self._files.values())

    def file(self, file_id: str) -> StoredFile | None:
        return self._files.get(file_id)

    def content(self, file_id: str) -> Path:
        """Where a file is. file_id: of one that is stored, or will be."""
        if not _FILE_ID.fullmatch(file_id):
            raise ValueError(f"file_id={file_id!r}: is none")
        return self.path / "files" / f"{file_id}.jsonl"

    def num_bytes(self) -> int:
        """That the folder takes, with uploads under way."""
        return sum(max(size, _PAGE) for size in _sizes(self.path))

    @contextmanager
    def upload(self) -> Iterator["Upload"]:
        """A block that may fill a new file and keep it. Otherwise nothing is left of it."""
        upload = Upload(self)
        try:
            yield upload
        finally:
            upload.close()

    def keep(self, file: StoredFile) -> StoredFile:
        """Make a file known whose content is on the disk."""
        with self._change:
            self._write(file)
            self._files[file.id] = file
        return file

    def delete_file(self, file_id: str) -> None:
        """Raises KeyError if there is none, and InUse."""
        with self._change:
            _ = self._files[file_id]
            for batch in self._batches.values():
                if not batch.has_ended and batch.input_file_id == file_id:
                    raise InUse(f"{file_id} is the input of {batch.id}, which is {batch.status}: cancel that first")
            self.content(file_id).with_suffix(".json").unlink(missing_ok=True)
            del self._files[file_id]  # Now: no batch may begin with it, whatever happens next.
            _sync_names(self.path / "files")
            self.content(file_id).unlink(missing_ok=True)

    # -- batches -------------------------------------------------------------------------------------------------------

    def batches(self) -> list[Batch]:
        """The oldest first."""
        with self._change:
            return list(self._batches.values())

    def batch(self, batch_id: str) -> Batch | None:
        return self._batches.get(batch_id)

    def add_batch(self, batch: Batch) -> None:
        """Raises KeyError if its input is not there any more."""
        with self._change:
            _ = self._files[batch.input_file_id]
            self._write(batch)
            self._batches[batch.id] = batch

    def update(self, batch_id: str, change: Callable[[Batch], Batch]) -> Batch:
        """Replace a batch by what `change` makes of it."""
        with self._change:
            before = self._batches[batch_id]
            after = change(before)
            if after != before:
                self._write(after)
                self._batches[batch_id] = after
            return after

    def job_folder(self, batch_id: str) -> Path:
        if not _BATCH_ID.fullmatch(batch_id):
            raise ValueError(f"batch_id={batch_id!r}: is none")
        return self.path / "batches" / batch_id

    def delete_job(self, batch_id: str) -> None:
        """Its answers are in files."""
        with suppress(FileNotFoundError):
            shutil.rmtree(self.job_folder(batch_id))


def open_store(path: str | None, max_file_bytes: int, max_bytes: int) -> AbstractContextManager[BatchStore | None]:
    """A store, as BatchStore's arguments say; None without a path."""
    return nullcontext() if path is None else BatchStore(path, max_file_bytes, max_bytes)


class Upload:
    """A file that is on its way. Only one thread at a time may call it."""

    def __init__(self, store: BatchStore):
        self._store = store
        self.id = new_id("file-")
        self.num_bytes = 0
        self._path = store.content(self.id).with_suffix(".upload")
        self._room = store.max_bytes - store.num_bytes()
        self._file = open(self._path, "xb")  # noqa: SIM115

    def write(self, content: bytes) -> None:
        """Raises TooLarge, and OSError."""
        self.num_bytes += len(content)
        store = self._store
        if self.num_bytes > store.max_file_bytes:
            raise TooLarge(f"the file has more than {store.max_file_bytes} bytes (--batch-file-max-mib)")
        with names_file(self._path):
            self._file.write(content)
        # Looked up again once in a while: other uploads grow meanwhile.
        if self.num_bytes > self._room:
            self._file.flush()
            self._room = self.num_bytes + store.max_bytes - store.num_bytes()
            if self.num_bytes > self._room:
                raise TooLarge(f"all files together would have more than {store.max_bytes} bytes (--batches-max-gib)")

    def keep(self, filename: str, purpose: str) -> StoredFile:
        """The file is complete."""
        with names_file(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())
        self._file.close()
        if self._store.num_bytes() > self._store.max_bytes:
            raise TooLarge(f"all files together would have more than {self._store.max_bytes} bytes (--batches-max-gib)")
        os.replace(self._path, self._store.content(self.id))
        return self._store.keep(StoredFile(self.id, filename, purpose, self.num_bytes))

    def close(self) -> None:
        """Delete what was not kept."""
        self._file.close()
        self._path.unlink(missing_ok=True)


def _sizes(path: Path) -> Iterator[int]:
    try:
        entries = list(os.scandir(path))
    except FileNotFoundError:  # The folder of a job that has just ended.
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _sizes(Path(entry.path))
        else:
            with suppress(FileNotFoundError):
                yield entry.stat(follow_symlinks=False).st_size


def _sync_names(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
