"""The images of a job that asks one thing of each: found, named, and told apart from changed ones."""

import glob
import os
from collections.abc import Iterable
from pathlib import PurePath
from typing import NamedTuple

from xxhash import xxh3_64, xxh3_128

from nanovllm.jobs.given_paths import as_paths
from nanovllm.jobs.lines import Row
from nanovllm.utils.file_errors import names_file

_SAMPLE = 4096  # bytes of a file's beginning, middle and end. At its end a PNG has sums of all that it holds.


class ImageFiles(NamedTuple):
    """Attributes:
    folder: that holds all of them.
    paths: of the files.
    names: relative to the folder, with slashes; they are the ids of the lines.
    """

    folder: str
    paths: list[str]
    names: list[str]


def find_images(patterns: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> ImageFiles:
    """Paths and globs to files, sorted, each once. Raises FileNotFoundError, ValueError for a URL or a
    folder, and TypeError for what is no path."""
    given = as_paths("images", patterns)
    found = set[str]()
    folders = []
    for each in given:
        pattern = os.path.abspath(os.path.expanduser(_local(os.fspath(each))))
        if os.path.isdir(pattern):
            raise ValueError(f"images={os.fspath(each)!r}: must name files, as 'folder/*.png' does")
        files = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        files = list(filter(os.path.isfile, files))
        if not files:
            raise FileNotFoundError(f"images={os.fspath(each)!r}: there is no such file")
        found.update(files)
        folders.append(os.path.dirname(pattern if pattern in files else _without_globs(pattern)))
    if not found:
        raise ValueError("images: must name one file at least")
    folder, paths = os.path.commonpath(folders), sorted(found)
    return ImageFiles(folder, paths, [PurePath(os.path.relpath(path, folder)).as_posix() for path in paths])


def _local(pattern: str) -> str:
    if "://" in pattern:
        raise ValueError(f"images={pattern!r}: must be files of this machine; lines of a file may have URLs")
    return pattern


def _without_globs(pattern: str) -> str:
    """The parts of a path before the first one with a wildcard, and a name after them."""
    parts = pattern.split(os.sep)
    first = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    return os.sep.join([*parts[:first], "x"])


def image_row(name: str, prompt: str) -> Row:
    """The line of an image. name: that it has in its job."""
    content = [{"type": "image", "image": name}, {"type": "text", "text": prompt}]
    return {"id": name, "messages": [{"role": "user", "content": content}]}


def fingerprint_images(paths: list[str], names: list[str]) -> tuple[Row, dict[str, str]]:
    """What tells whether images have changed, of all together, and of each by its name: names, sizes and a sample of
    each. To read all of a million scans would take hours."""
    size, digest, of_each = 0, xxh3_128(), {}
    for path, name in zip(paths, names, strict=True):
        own = xxh3_64()
        with names_file(path), open(path, "rb", buffering=0) as file:
            length = file.seek(0, os.SEEK_END)
            digest.update(f"{name}\0{length}\0".encode("utf-8", "surrogateescape"))
            for start in sorted({0, max(0, length // 2 - _SAMPLE // 2), max(0, length - _SAMPLE)}):
                file.seek(start)
                sample = file.read(_SAMPLE)
                digest.update(sample)
                own.update(sample)
        of_each[name] = f"{length} {own.hexdigest()}"
        size += length
    return {"size": size, "num_files": len(paths), "fingerprint": digest.hexdigest()}, of_each
