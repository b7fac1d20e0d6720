"""Errors of files say which file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def names_file(path: str | os.PathLike[str]) -> Iterator[None]:
    """A block whose OSErrors name a file, if they name none. The system's do not, once a file is open."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise
