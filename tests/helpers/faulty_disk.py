"""A disk of which one call goes wrong, as SQLite's tests have it: the n-th, whatever it is."""

import builtins
import errno
import fcntl
import io
import os
import pathlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_ERRORS = {
    **dict.fromkeys(("open", "mkdir", "write", "replace"), errno.ENOSPC),
    **dict.fromkeys(("fsync", "truncate", "unlink", "rmdir", "listdir", "read"), errno.EIO),
    "flock": errno.ENOLCK,
}
_OF_PATHS = ("open", "mkdir", "replace", "unlink", "rmdir", "listdir")
_CHANGES = ("open", "mkdir", "write", "replace", "fsync", "truncate", "unlink", "rmdir")

# How the n-th call goes wrong. It fails. It fails, and so does every later one that changes the disk. A write accepts a
# part of its bytes, as it may. The process dies.
FAILS, STAYS_BROKEN, SHORT, DIES = "fails", "stays broken", "short", "dies"
KILLED = 77  # the exit status of a process that has died here


class FaultyDisk:
    """Counts the calls that concern files below a folder, and lets one of them go wrong. A context manager.

    A write that fails, or with which the process dies, has written the first half.

    Attributes:
        calls: (name, path) of each.
        is_hit: whether the call has come.
    """

    def __init__(self, root: Path, at: int | None = None, how: str = FAILS):
        """at: the number of the call that goes wrong, from 0. None: none."""
        self.calls: list[tuple[str, str]] = []
        self.is_hit = False
        self._root, self._at, self._how = f"{root}/", at, how
        self._paths: dict[int, str] = {}  # of open files
        self._lock = threading.Lock()

    def __enter__(self) -> "FaultyDisk":
        self._patch = pytest.MonkeyPatch()
        for name in ("mkdir", "replace", "unlink", "rmdir", "listdir"):
            self._patch.setattr(os, name, self._of_path(name, getattr(os, name)))
        # Nobody turns this machine off meanwhile: `fsync` does nothing, since it would take most of the time.
        of_files = (("fsync", os, lambda file: None), ("flock", fcntl, fcntl.flock), ("write", os, os.write))
        for name, module, real in of_files:
            self._patch.setattr(module, name, self._of_file(name, real))
        for opener, name in ((self._open, "open"), (self._close, "close")):
            self._patch.setattr(os, name, opener(getattr(os, name)))
        for module in (builtins, io):
            self._patch.setattr(module, "open", self._open_file(builtins.open if module is builtins else io.open))
        # Python 3.10's paths have taken these functions from their modules when pathlib was imported.
        if (accessor := getattr(pathlib, "_NormalAccessor", None)) is not None:
            self._patch.setattr(accessor, "open", staticmethod(io.open))
            for name in ("mkdir", "replace", "unlink", "rmdir", "listdir"):
                self._patch.setattr(accessor, name, staticmethod(getattr(os, name)))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._patch.undo()

    @property
    def open_files(self) -> list[str]:
        return list(self._paths.values())

    def go(self, name: str, path: str, call: Callable[[], Any], half: Callable[[], Any] = lambda: None) -> Any:
        """Make a call, or let it go wrong. half: what a write does then."""
        with self._lock:
            number = len(self.calls)
            self.calls.append((name, path.removeprefix(self._root)))
        is_it = number == self._at and (self._how != SHORT or name == "write")
        if not is_it and not (self.is_hit and self._how == STAYS_BROKEN and name in _CHANGES):
            return call()
        self.is_hit = True
        written = half() if is_it else None
        if self._how == SHORT:
            return written
        if self._how == DIES:
            os._exit(KILLED)
        code = _ERRORS[name] if is_it else errno.EROFS
        # As the system's: of a call on an open file it does not say on which.
        raise OSError(code, os.strerror(code), *([path] if name in _OF_PATHS else []))

    def _has(self, path: Any) -> bool:
        return isinstance(path, str | os.PathLike) and f"{os.fspath(path)}/".startswith(self._root)

    def _whole(self, path: Any, options: dict[str, Any]) -> Any:
        """The path itself, where it is one in an open directory, as `shutil.rmtree` calls it."""
        folder = self._paths.get(options.get("dir_fd"))  # type: ignore[arg-type]
        return path if folder is None else f"{folder}/{path}"

    def _of_path(self, name: str, real: Any) -> Any:
        def call(path: Any = ".", *args: Any, **options: Any) -> Any:
            whole = self._whole(path, options)
            if not self._has(whole):
                return real(path, *args, **options)
            return self.go(name, os.fspath(whole), lambda: real(path, *args, **options))

        return call

    def _of_file(self, name: str, real: Any) -> Any:
        def call(file: Any, *args: Any) -> Any:
            if file not in self._paths:
                return real(file, *args)
            half = lambda: real(file, args[0][: len(args[0]) // 2]) if name == "write" else None  # noqa: E731
            return self.go(name, self._paths[file], lambda: real(file, *args), half)

        return call

    def _open(self, real: Any) -> Any:
        def call(path: Any, *args: Any, **options: Any) -> int:
            whole = self._whole(path, options)
            if not self._has(whole):
                return real(path, *args, **options)
            file = self.go("open", os.fspath(whole), lambda: real(path, *args, **options))
            self._paths[file] = os.fspath(whole)
            return file

        return call

    def _close(self, real: Any) -> Any:
        def call(file: int) -> None:
            self._paths.pop(file, None)
            real(file)

        return call

    def _open_file(self, real: Any) -> Any:
        def call(path: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any) -> Any:
            if not self._has(path):
                return real(path, mode, buffering, *args, **options)
            opener = options.pop("opener", os.open)
            raw = _File(self, os.fspath(path), mode.replace("b", "").replace("t", ""), opener)
            if "+" in mode:
                buffered: Any = io.BufferedRandom(raw)
            else:
                buffered = io.BufferedReader(raw) if "r" in mode else io.BufferedWriter(raw)
            return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)

        return call


class _File(io.FileIO):
    """What `open` makes, below its buffer."""

    def __init__(self, disk: FaultyDisk, path: str, mode: str, opener: Callable[[str, int], int]):
        self._disk, self._path = disk, path
        super().__init__(path, mode, opener=opener)

    def close(self) -> None:
        if not self.closed:
            self._disk._paths.pop(self.fileno(), None)
        super().close()

    def write(self, data: Any) -> int:
        real = super().write
        return self._disk.go("write", self._path, lambda: real(data), lambda: real(data[: len(data) // 2]))

    def readinto(self, data: Any) -> int:
        real = super().readinto
        return self._disk.go("read", self._path, lambda: real(data))

    def readall(self) -> bytes:
        real = super().readall
        return self._disk.go("read", self._path, real)

    def truncate(self, size: int | None = None) -> int:
        real = super().truncate
        return self._disk.go("truncate", self._path, lambda: real(size))
