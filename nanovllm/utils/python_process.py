"""Python processes that look for modules where this one does, and not in the current directory, which may hold a
`json.py` of somebody else's."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SAFE_PATH = "PYTHONSAFEPATH"  # Python 3.10 does not know it.


def python_command(code: str) -> list[str]:
    """A command line that runs a statement, with what may follow it in sys.argv."""
    path = [os.path.abspath(entry) for entry in sys.path if isinstance(entry, str)]
    # `-c` puts the current directory first, and no option of Python 3.10 prevents that alone. sys is built in, so that
    # nothing is imported before the path is the right one.
    return [sys.executable, "-c", f"import sys; sys.path[:] = {path!r}; {code}"]


@contextmanager
def processes_with_safe_path() -> Iterator[None]:
    """A block in which multiprocessing starts processes that import nothing from the current directory, before they
    have this process's path."""
    if _SAFE_PATH in os.environ:
        yield
        return
    os.environ[_SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(_SAFE_PATH, None)
