"""The files of a job: found, opened, read line by line, and looked through before work begins."""

import glob
import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import chain
from pathlib import PurePosixPath
from typing import IO, NamedTuple

import fsspec
import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

from nanovllm.jobs.lines import LineId, Row, from_json, id_bytes, read_id
from nanovllm.jobs.openai_batch import is_request

_JSON = (".jsonl", ".ndjson", ".json")
_SUFFIXES = (*_JSON, *(f"{suffix}.gz" for suffix in _JSON), ".parquet")
_ROWS_AT_ONCE = 1024  # of Parquet
_BYTES_AT_ONCE = 1 << 20
_MAX_NAMED = 3  # duplicates in a message


class RawLine(NamedTuple):
    """A line of a file. Exactly one of row and error is given."""

    id: LineId  # the line's own, or the file's name and the number
    file: str
    number: int  # of the line or row, from 1
    row: Row | None
    error: str | None
    size: int  # bytes, about


class Inputs:
    """All lines of a job's files, in order.

    A line's number in the whole job, from 0, is its place. Blank lines have none.
    """

    def __init__(self, paths: list[str], names: list[str] | None = None):
        """paths: of `find_files`. names: None if these are all files of the job."""
        self.paths = paths
        if names is None:
            names = [PurePosixPath(path).name for path in paths]
        self.names = names if len(set(names)) == len(names) else paths  # Lines without an id are named by them.

    def fingerprints(self) -> list[Row]:
        """What tells whether a file has changed, of each: its name, its size, and a hash of all its bytes."""
        return [{"name": name} | _fingerprint(path) for name, path in zip(self.names, self.paths, strict=True)]

    def lines(self, is_done: np.ndarray | None = None) -> Iterator[tuple[int, RawLine]]:
        """Places and lines. is_done: bool [num_lines], lines to leave out, which costs no parsing. Raises ValueError
        for a file that is damaged, or if there are not as many lines as in is_done."""
        place = 0
        for path, name in zip(self.paths, self.names, strict=True):
            for number, content in _rows(path):
                if is_done is not None and place == len(is_done):
                    raise ValueError(f"input: {name}: has got more lines while the job worked")
                if is_done is None or not is_done[place]:
                    yield place, _read_line(content, name, number)
                place += 1
        if is_done is not None and place < len(is_done):
            raise ValueError(f"input: {', '.join(self.names)}: has lost lines while the job worked")

    @property
    def are_parquet(self) -> bool:
        return all(path.endswith(".parquet") for path in self.paths)


def _read_line(content: bytes | Row, name: str, number: int) -> RawLine:
    fallback = f"{name}:{number}"
    texts = [content] if isinstance(content, bytes) else content.values()
    size = sum(len(text) for text in texts if isinstance(text, bytes | str | list))
    try:
        row = from_json(content) if isinstance(content, bytes) else content
        line_id = read_id(row)
    except ValueError as error:
        return RawLine(fallback, name, number, None, str(error), size)
    return RawLine(fallback if line_id is None else line_id, name, number, row, None, size)


# -- files -------------------------------------------------------------------------------------------------------------


def find_files(patterns: str | os.PathLike | Iterable[str | os.PathLike]) -> list[str]:
    """Paths, globs and fsspec URLs to paths, each once, in the order given and sorted within a glob.

    Raises FileNotFoundError, ValueError for an unknown kind of file, or ImportError for a URL that needs a package.
    """
    patterns = [patterns] if isinstance(patterns, str | os.PathLike) else list(patterns)
    found: dict[str, str] = {}  # by their absolute paths
    for each in patterns:
        pattern = os.fspath(each)
        if "://" in pattern:
            system, _, paths = fsspec.get_fs_token_paths(pattern, mode="rb")
            files = sorted(system.unstrip_protocol(path) for path in paths if system.isfile(path))
        else:
            pattern = os.path.expanduser(pattern)
            matches = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
            files = sorted(filter(os.path.isfile, matches))
        if not files:
            if os.path.exists(pattern):
                raise ValueError(f"input={pattern!r}: must name files, as 'folder/*.jsonl' does, and no pipe")
            raise FileNotFoundError(f"input={pattern!r}: there is no such file")
        for path in files:
            found.setdefault(path if "://" in path else os.path.abspath(path), path)
    if not found:
        raise ValueError("input: must name one file at least")
    for path in found.values():
        if not path.endswith(_SUFFIXES):
            raise ValueError(f"input={path!r}: must be a file of JSON lines or Parquet: {', '.join(_SUFFIXES)}")
    return list(found.values())


def require_pyarrow() -> None:
    """Raises ImportError, saying what to install."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError("pyarrow is not installed: pip install pyarrow") from error


def open_file(path: str) -> AbstractContextManager[IO[bytes]]:
    return fsspec.open(path, "rb") if "://" in path else open(path, "rb")


def _fingerprint(path: str) -> Row:
    size, digest = 0, xxh3_128()
    with open_file(path) as file:
        while block := file.read(_BYTES_AT_ONCE):
            size += len(block)
            digest.update(block)
    return {"size": size, "fingerprint": digest.hexdigest()}


def _rows(path: str) -> Iterator[tuple[int, bytes | Row]]:
    """Numbers from 1, with lines that are not blank, or rows."""
    number = 0
    with open_file(path) as file:
        try:
            if path.endswith(".parquet"):
                for number, row in enumerate(_parquet_rows(file), 1):
                    yield number, row
                return
            for number, raw in enumerate(_text(path, file), 1):
                if raw and not raw.isspace():  # Empty is a file of a byte order mark alone.
                    yield number, raw
        except (EOFError, OSError, ValueError, zlib.error) as error:
            raise ValueError(f"{path}: cannot be read after line {number}: {error}") from error


def _text(path: str, file: IO[bytes]) -> Iterator[bytes]:
    lines: Iterable[bytes] = gzip.GzipFile(fileobj=file) if path.endswith(".gz") else file
    lines = iter(lines)
    first = next(lines, None)
    return chain([] if first is None else [first.removeprefix(b"\xef\xbb\xbf")], lines)


def _parquet_rows(file: IO[bytes]) -> Iterator[Row]:
    require_pyarrow()
    from pyarrow.parquet import ParquetFile

    for batch in ParquetFile(file).iter_batches(_ROWS_AT_ONCE):
        yield from batch.to_pylist()


# -- before work begins ------------------------------------------------------------------------------------------------


class Scan(NamedTuple):
    """What one look through all lines finds."""

    num_lines: int  # that are not blank
    lines_per_file: list[int]
    ids: np.ndarray  # sorted, a hash of 16 bytes for each line: a million lines are 16 MB
    places: np.ndarray  # int64 [num_lines], the line of each of ids
    columns: list[str]  # names of all columns
    ids_are_integers: bool  # of 64 bits, all of them
    first_openai: RawLine | None  # the first line in OpenAI's format

    def find(self, line_ids: bytes | bytearray) -> np.ndarray:
        """Places of ids, -1 for one that no line has. line_ids: `hash_id` of each, joined."""
        wanted = np.frombuffer(line_ids, "S16")
        if self.num_lines == 0:
            return np.full(len(wanted), -1)
        at = np.minimum(np.searchsorted(self.ids, wanted), self.num_lines - 1)
        return np.where(self.ids[at] == wanted, self.places[at], -1)


def hash_id(line_id: LineId) -> bytes:
    return xxh3_128_digest(id_bytes(line_id))


def scan(inputs: Inputs, tell: Callable[[], object] = lambda: None) -> Scan:
    """Look through all lines. tell: called after each.

    Raises ValueError for a damaged file, and for two lines with one id.
    """
    hashes, columns, ids_are_integers, first_openai = bytearray(), dict[str, None](), True, None
    lines_per_file = dict.fromkeys(inputs.names, 0)
    for _, line in inputs.lines():
        lines_per_file[line.file] += 1
        hashes += hash_id(line.id)
        ids_are_integers = ids_are_integers and isinstance(line.id, int) and abs(line.id) < 2**63
        if line.row is not None:
            columns |= dict.fromkeys(line.row)
            if first_openai is None and is_request(line.row):
                first_openai = line
        tell()
    ids = np.frombuffer(bytes(hashes), "S16")
    places = np.argsort(ids, kind="stable")
    ids = ids[places]
    (repeated,) = np.nonzero(ids[1:] == ids[:-1])
    if len(repeated):
        raise ValueError(_describe_duplicates(inputs, places, repeated))
    return Scan(len(ids), list(lines_per_file.values()), ids, places, list(columns), ids_are_integers, first_openai)


def _describe_duplicates(inputs: Inputs, places: np.ndarray, repeated: np.ndarray) -> str:
    shown = repeated[:_MAX_NAMED]
    wanted = {int(places[at + offset]) for at in shown for offset in (0, 1)}
    found = {place: line for place, line in inputs.lines() if place in wanted}
    pairs = [(found[int(places[at])], found[int(places[at + 1])]) for at in shown]
    named = "; ".join(f"{a.id!r} in {a.file}:{a.number} and {b.file}:{b.number}" for a, b in pairs)
    return f"input: {len(repeated)} ids are given twice, and each line must have its own: {named}"
