"""The files of a job: found, opened, read line by line, and looked through before work begins."""

import codecs
import glob
import gzip
import io
import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import IO, Any, NamedTuple

import fsspec
import numpy as np
from xxhash import xxh3_128, xxh3_128_digest

from nanovllm.jobs.arrow_rows import arrow_rows
from nanovllm.jobs.given_paths import as_paths
from nanovllm.jobs.image_files import fingerprint_images, image_row
from nanovllm.jobs.lines import LineId, NoObject, from_json, id_bytes, read_id
from nanovllm.openai_format.openai_batch import is_request
from nanovllm.openai_format.request_names import Row
from nanovllm.utils.checks import one_line
from nanovllm.utils.file_errors import names_file
from nanovllm.utils.text_json import MAX_DEPTH, check_depth, parse_json

_JSON = (".jsonl", ".ndjson", ".json")
_SUFFIXES = (*_JSON, *(f"{suffix}.gz" for suffix in _JSON), ".parquet")
# What people have instead, by the end of its name: Python that makes a file which can be read, or a command.
_CONVERSIONS = {
    ".csv": "import pandas; pandas.read_csv({path!r}).to_json({lines!r}, orient='records', lines=True)",
    ".tsv": "import pandas; pandas.read_csv({path!r}, sep='\\t').to_json({lines!r}, orient='records', lines=True)",
    ".xlsx": "import pandas; pandas.read_excel({path!r}).to_json({lines!r}, orient='records', lines=True)",
    ".txt": "import pandas; pandas.DataFrame({{'prompt': open({path!r}).read().splitlines()}})"
    ".to_json({lines!r}, orient='records', lines=True)",
    ".arrow": "import datasets; datasets.Dataset.from_file({path!r}).to_parquet({parquet!r})",
    "dataset_info.json": "import datasets; datasets.load_from_disk({path!r}).to_parquet({parquet!r})",
    "dataset_dict.json": "import datasets; datasets.load_from_disk({path!r})['train'].to_parquet({parquet!r})",
}
_COMMANDS = {".zst": "zstd -d", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zip": "unzip"}
# The first bytes of files that are something else, whatever their name.
_OTHER_CONTENTS = {
    b"PAR1": "Parquet: give it a name that ends in .parquet",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it with zstd -d",
    b"BZh": "compressed by bzip2: unpack it with bunzip2",
    b"\xfd7zXZ\x00": "compressed by xz: unpack it with unxz",
    b"PK\x03\x04": "a zip archive: unpack it with unzip",
    b"ARROW1": "Arrow: write it as Parquet",
}
_GZIP = b"\x1f\x8b"
_BOM = codecs.BOM_UTF8
_UTF_16_AND_32 = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}  # They begin like UTF-16's.
_UTF_16_AND_32 |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
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
    is_object: bool = True


class Inputs:
    """All lines of a job's files, in order.

    A line's number in the whole job, from 0, is its place. Blank lines have none.

    Attributes:
        image_fingerprints: of each image by its name, with image_prompt, once `fingerprints` has been called.
    """

    def __init__(
        self,
        paths: list[str],
        names: list[str] | None = None,
        id_column: str = "id",
        image_prompt: str | None = None,
    ):
        """
        Args:
            paths: of `find_files`; with image_prompt of `find_images`.
            names: None if these are all files of the job.
            image_prompt: what is asked of each file, which is an image and a line of its own. Its name is its id.
        """
        self.paths, self.id_column, self.image_prompt = paths, id_column, image_prompt
        if names is None:
            names = [PurePosixPath(path).name for path in paths]
        self.names = names if len(set(names)) == len(names) else paths  # Lines without an id are named by them.
        self.image_fingerprints: dict[str, str] = {}

    def fingerprints(self) -> list[Row]:
        """What tells whether a file has changed, of each: its name, its size, and a hash of all its bytes. Of images
        one for all."""
        if self.image_prompt is not None:
            of_all, self.image_fingerprints = fingerprint_images(self.paths, self.names)
            return [{"name": "images"} | of_all]
        return [{"name": name} | _fingerprint(path) for name, path in zip(self.names, self.paths, strict=True)]

    def lines(self, is_done: np.ndarray | None = None) -> Iterator[tuple[int, RawLine]]:
        """Places and lines. is_done: bool [num_lines], lines to leave out, which costs no parsing. Raises ValueError
        for a file that is damaged, or if there are not as many lines as in is_done."""
        for place, name, number, content in self._contents(is_done):
            yield place, self._read_line(content, name, number)

    def texts(self, is_done: np.ndarray) -> Iterator[tuple[LineId, Row | str]]:
        """Ids and rows, or the text of a line that is no row. The rest as in `lines`."""
        for _, name, number, content in self._contents(is_done):
            line = self._read_line(content, name, number)
            if isinstance(content, bytes) and line.row is None:
                yield line.id, content.decode("utf-8", "replace").strip()
            else:
                yield line.id, content if line.row is None else line.row  # type: ignore[misc]

    def _contents(self, is_done: np.ndarray | None) -> Iterator[tuple[int, str, int, bytes | Row]]:
        place = 0
        for path, name in zip(self.paths, self.names, strict=True):
            rows = _rows(path) if self.image_prompt is None else [(1, image_row(name, self.image_prompt))]
            for number, content in rows:
                if is_done is not None and place == len(is_done):
                    raise ValueError(f"input: {name}: has got more lines while the job worked")
                if is_done is None or not is_done[place]:
                    yield place, name, number, content
                place += 1
        if is_done is not None and place < len(is_done):
            raise ValueError(f"input: {', '.join(self.names)}: has lost lines while the job worked")

    def _read_line(self, content: bytes | Row, name: str, number: int) -> RawLine:
        fallback = f"{name}:{number}"
        texts = [content] if isinstance(content, bytes) else content.values()
        size = sum(len(text) for text in texts if isinstance(text, bytes | str | list))
        line_id: LineId | None = None
        try:
            row = from_json(content) if isinstance(content, bytes) else content
            line_id = read_id(row, self.id_column)
            if isinstance(content, bytes) and content.count(b"[") + content.count(b"{") > MAX_DEPTH:
                check_depth(row)
        except ValueError as error:
            is_object = not isinstance(error, NoObject)
            return RawLine(fallback if line_id is None else line_id, name, number, None, str(error), size, is_object)
        return RawLine(fallback if line_id is None else line_id, name, number, row, None, size)

    @property
    def are_parquet(self) -> bool:
        return all(path.endswith(".parquet") for path in self.paths)


# -- files -------------------------------------------------------------------------------------------------------------


def find_files(patterns: str | os.PathLike | Iterable[str | os.PathLike], name: str = "input") -> list[str]:
    """Paths, globs and fsspec URLs to paths, each once, in the order given and sorted within a glob.
    name: of the caller's argument, for messages.

    Raises FileNotFoundError, ValueError for an unknown kind of file, TypeError for what is no path, or ImportError for
    a URL that needs a package.
    """
    found: dict[str, str] = {}  # by their absolute paths
    for each in as_paths(name, patterns):
        pattern = os.fspath(each)
        if "://" in pattern:
            files = _find_remote(pattern, name)
        else:
            pattern = os.path.expanduser(pattern)
            matches = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
            files = sorted(filter(os.path.isfile, matches))
        if not files:
            if os.path.isdir(pattern):
                _refuse_dataset(pattern, name)
            if os.path.exists(pattern):
                raise ValueError(f"{name}={pattern!r}: must name files, as 'folder/*.jsonl' does, and no pipe")
            raise FileNotFoundError(f"{name}={pattern!r}: there is no such file")
        for path in files:
            found.setdefault(path if "://" in path else os.path.abspath(path), path)
    if not found:
        raise ValueError(f"{name}: must name one file at least")
    for path in found.values():
        if not path.endswith(_SUFFIXES):
            kinds = f"must be a file of JSON lines or Parquet: {', '.join(_SUFFIXES)}"
            raise ValueError(f"{name}={path!r}: {kinds}{_conversion(path, os.path.splitext(path)[1])}")
    return list(found.values())


def _find_remote(pattern: str, argument: str) -> list[str]:
    try:
        system, _, paths = fsspec.get_fs_token_paths(pattern, mode="rb")
        return sorted(system.unstrip_protocol(path) for path in paths if system.isfile(path))
    except FileNotFoundError:
        return []
    except (ImportError, ValueError) as error:  # A package is missing, which fsspec names; an unknown protocol.
        raise type(error)(f"{argument}={pattern!r}: {error}") from error
    except Exception as error:  # Without a network. Each file system has classes of its own.
        raise OSError(f"{argument}={pattern!r}: cannot be reached: {one_line(error)}") from error


def _refuse_dataset(folder: str, argument: str) -> None:
    """Raises ValueError for what save_to_disk of the package datasets has written."""
    for name in ("dataset_info.json", "dataset_dict.json"):
        if os.path.exists(os.path.join(folder, name)):
            remedy = _conversion(folder.rstrip("/"), name)
            raise ValueError(f"{argument}={folder!r}: is a saved dataset, not a file{remedy}")


def _conversion(path: str, kind: str) -> str:
    """What to do with a file that is not read, for a message. kind: a key of _CONVERSIONS or _COMMANDS, or another."""
    if kind in _COMMANDS:
        return f"; unpack it: {_COMMANDS[kind]} {shlex.quote(path)}"
    if kind not in _CONVERSIONS:
        return ""
    stem = path.removesuffix(kind)
    code = _CONVERSIONS[kind].format(path=path, lines=f"{stem}.jsonl", parquet=f"{stem}.parquet")
    return f"; to make one: {shlex.join(['python', '-c', code])}"


def require_pyarrow() -> None:
    """Raises ImportError, saying what to install."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise ImportError("pyarrow is not installed: pip install pyarrow") from error


class _WrongKind(ValueError):
    """A file is of another kind than its name says."""


@contextmanager
def open_file(path: str) -> Iterator[IO[bytes]]:
    """A file of `find_files`, for a block that reads it. Raises OSError, naming a remote one."""
    if "://" not in path:
        with names_file(path), open(path, "rb") as file:
            yield file
        return
    try:
        with fsspec.open(path, "rb") as file:
            yield file
    except (OSError, ValueError, ImportError, EOFError, zlib.error):
        raise
    except Exception as error:  # Each file system has classes of its own.
        raise OSError(f"{path}: cannot be read: {one_line(error)}") from error


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
            for number, raw in enumerate(_text_lines(path, file), 1):
                raw = raw.removeprefix(_BOM)  # Files that were put together have one in the middle.
                if raw and not raw.isspace():
                    yield number, raw
        except _WrongKind as error:
            raise ValueError(f"{path}: {error}") from None
        except (EOFError, OSError, ValueError, zlib.error) as error:
            raise ValueError(f"{path}: cannot be read after line {number}: {error}") from error


def _text_lines(path: str, file: Any) -> Iterator[bytes]:
    """Lines of UTF-8 without their ends, which are those of Unix, Windows or old Macs."""
    if not hasattr(file, "peek"):
        file = io.BufferedReader(file)
    if path.endswith(".gz") or file.peek(len(_GZIP)).startswith(_GZIP):
        file = gzip.GzipFile(fileobj=file)
    block = file.read(_BYTES_AT_ONCE)
    decoder = _check_beginning(path, block)
    pieces, end = list[bytes](), b""  # of a line that goes on; and of two bytes that end a line
    while block:
        more = file.read(_BYTES_AT_ONCE)
        if decoder is not None:
            block = decoder.decode(block, final=not more).encode("utf-8", "surrogatepass")
        block = end + block
        end = b"\r" if more and block.endswith(b"\r") else b""
        block = block.removesuffix(end).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, last = block.split(b"\n")
        for line in lines:
            yield b"".join([*pieces, line]) if pieces else line
            pieces.clear()
        pieces.append(last)
        block = more
    yield b"".join(pieces)


def _check_beginning(path: str, head: bytes) -> codecs.IncrementalDecoder | None:
    """How to decode what is not UTF-8. head: the file's first bytes. Raises _WrongKind if these are no JSON lines."""
    for start, kind in _OTHER_CONTENTS.items():
        if head.startswith(start):
            raise _WrongKind(f"is no file of JSON lines, but {kind}")
    for bom, encoding in _UTF_16_AND_32.items():
        if head.startswith(bom):
            return codecs.getincrementaldecoder(encoding)()
    if re.match(rb"\0*[\[{]\0", head):
        raise _WrongKind("is UTF-16 or UTF-32 without a byte order mark: save it as UTF-8")
    first_line = re.split(rb"[\r\n]", head.removeprefix(_BOM).lstrip(), maxsplit=1)[0]
    if first_line.startswith(b"["):
        try:
            parse_json(first_line.decode())
        except ValueError:  # A list that is whole is one wrong line, as far as one can see here.
            raise _WrongKind(f"is a JSON array; {_one_a_line(path)}") from None
    return None


def _one_a_line(path: str) -> str:
    """What to do with a file that is a JSON array."""
    code = f"import json; [print(json.dumps(row)) for row in json.load(open({path!r}))]"
    command = shlex.join(["python", "-c", code])
    return f"one JSON object a line is needed, as this makes them: {command} > lines.jsonl"


def _parquet_rows(file: IO[bytes]) -> Iterator[Row]:
    require_pyarrow()
    from pyarrow.parquet import ParquetFile

    parquet = ParquetFile(file)
    names = parquet.schema_arrow.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _WrongKind(f"several columns are called {twice[0]!r}; rename one")
    for batch in parquet.iter_batches(_ROWS_AT_ONCE):
        yield from arrow_rows(batch)


# -- before work begins ------------------------------------------------------------------------------------------------


class Scan(NamedTuple):
    """What one look through all lines finds."""

    num_lines: int  # that are not blank
    columns: list[str]  # names of all columns
    lines_per_file: list[int]
    ids: np.ndarray  # sorted, a hash of 16 bytes for each line: a million lines are 16 MB
    places: np.ndarray  # int64 [num_lines], the line of each of ids
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

    Raises ValueError for a damaged file, one that has no JSON object, two lines with one id, or an id_column that no
    line has.
    """
    hashes, columns, ids_are_integers, first_openai = bytearray(), dict[str, None](), True, None
    lines_per_file = dict.fromkeys(inputs.names, 0)
    first_wrong: dict[str, RawLine] = {}  # of files without a JSON object so far
    have_objects = set[str]()
    for _, line in inputs.lines():
        lines_per_file[line.file] += 1
        hashes += hash_id(line.id)
        ids_are_integers = ids_are_integers and isinstance(line.id, int) and abs(line.id) < 2**63
        if line.is_object:
            have_objects.add(line.file)
        else:
            first_wrong.setdefault(line.file, line)
        if line.row is not None:
            columns |= dict.fromkeys(line.row)
            if first_openai is None and is_request(line.row):
                first_openai = line
        tell()
    for line in first_wrong.values():
        if line.file not in have_objects:
            path = inputs.paths[inputs.names.index(line.file)]
            raise ValueError(f"{path}: has no line that is a JSON object; its line {line.number} {line.error}")
    if inputs.id_column not in {*columns, "id"} and columns:
        names = ", ".join(map(repr, columns))
        raise ValueError(f"id_column={inputs.id_column!r}: no line has this column; the columns are: {names}")
    ids = np.frombuffer(bytes(hashes), "S16")
    places = np.argsort(ids, kind="stable")
    ids = ids[places]
    (repeated,) = np.nonzero(ids[1:] == ids[:-1])
    if len(repeated):
        raise ValueError(_describe_duplicates(inputs, places, repeated))
    num_per_file = list(lines_per_file.values())
    return Scan(len(ids), list(columns), num_per_file, ids, places, ids_are_integers, first_openai)


def _describe_duplicates(inputs: Inputs, places: np.ndarray, repeated: np.ndarray) -> str:
    shown = repeated[:_MAX_NAMED]
    wanted = {int(places[at + offset]) for at in shown for offset in (0, 1)}
    found = {place: line for place, line in inputs.lines() if place in wanted}
    pairs = [(found[int(places[at])], found[int(places[at + 1])]) for at in shown]
    named = "; ".join(f"{a.id!r} in {a.file}:{a.number} and {b.file}:{b.number}" for a, b in pairs)
    return f"input: {len(repeated)} ids are given twice, and each line must have its own: {named}"
