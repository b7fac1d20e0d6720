"""A model's files: find, download and read them, and say what is wrong with one."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from nanovllm.models.hub_errors import download_error
from nanovllm.models.other_formats import describe_gguf
from nanovllm.utils.checks import quoted

_BAR_SECONDS = 0.5  # A download that takes less shows no bar.
_LFS_POINTER = b"version https://git-lfs"

WEIGHT_FILES = ("*.safetensors",)
# Mistral's repositories hold the weights twice. What is in folders belongs to other parts or programs.
_UNUSED = ["consolidated*.safetensors", "*/*.safetensors"]
_OTHER_WEIGHTS = (".bin", ".gguf", ".pt", ".pth")
OTHER_FILES = ("*.json", "*.txt", "*.jinja", "*.model")  # configurations and tokenizers


def find_directory(name: str, option: str) -> Path | None:
    """The directory of this name (~ expands), or None if nothing has this name. Raises ValueError, naming the option,
    for a file, and for a name that cannot be looked up."""
    if "\0" in name:
        raise ValueError(f"{option}={quoted(name)}: holds a NUL byte; must be a directory or a hub id")
    path = Path(os.path.expanduser(name))
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeEncodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"{option}={quoted(name)}: cannot be opened ({reason}); must be a directory or a hub id"
        ) from error
    if not path.is_dir():
        is_gguf = path.suffix.lower() == ".gguf"
        what = describe_gguf(path.parent, path.name) if is_gguf else "is a file; must be the directory that holds it"
        raise ValueError(f"{option}={quoted(name)}: {what}")
    return path


def download(name: str, option: str, patterns: tuple[str, ...], revision: str | None = None) -> str:
    """Download the files of a hub id that match the patterns; returns the local directory. Those that are there are
    kept. Raises FileNotFoundError if the hub does not give the model, OSError if the disk does not take it."""
    from huggingface_hub import snapshot_download

    check_hub_id(name, option)
    wanted: dict[str, Any] = {"allow_patterns": list(patterns), "ignore_patterns": _UNUSED}
    try:
        return snapshot_download(name, revision=revision, **wanted, tqdm_class=_late_bar())
    except Exception as error:
        raise download_error(error, name, _asked(name, option, revision)) from error


def _late_bar() -> type:
    """The hub's bar, which is not shown where all files are here: it would say that 0 bytes are downloaded."""
    from huggingface_hub.utils import tqdm

    class LateBar(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options | {"delay": _BAR_SECONDS})

        def display(self, *args: Any, **options: Any) -> bool | None:  # tqdm asks for the delay in `update` alone.
            start = getattr(self, "start_t", None)
            is_late = start is not None and self._time() >= start + _BAR_SECONDS
            return super().display(*args, **options) if is_late else None

    return LateBar


def download_file(name: str, file: str, revision: str | None = None) -> None:
    """Download one file of a model of the hub. Raises as `download`."""
    from huggingface_hub import hf_hub_download

    try:
        hf_hub_download(name, file, revision=revision)
    except Exception as error:
        raise download_error(error, name, _asked(name, "model", revision)) from error


class HubFile(NamedTuple):
    """A file that `download` takes.

    Attributes:
        size: in bytes.
        is_here: whether the hub's folder on this disk has it already.
    """

    name: str
    size: int
    is_here: bool


def hub_files(name: str, patterns: tuple[str, ...], revision: str | None = None) -> list[HubFile]:
    """The files of a hub id that match the patterns, as the hub lists them. Raises FileNotFoundError as `download`, and
    ValueError if weights are wanted and the hub has none that are read here."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.utils import filter_repo_objects

    check_hub_id(name, "model")
    try:
        info = HfApi().model_info(name, revision=revision, files_metadata=True)
        sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
        names = list(filter_repo_objects(sizes, allow_patterns=list(patterns), ignore_patterns=_UNUSED))
        found = [
            HubFile(each, sizes[each], isinstance(try_to_load_from_cache(name, each, revision=info.sha), str))
            for each in names
        ]
    except Exception as error:
        raise download_error(error, name, _asked(name, "model", revision)) from error
    if set(WEIGHT_FILES) <= set(patterns) and not any(each.endswith(".safetensors") for each in names):
        others = sorted({Path(each).suffix for each in sizes if Path(each).suffix in _OTHER_WEIGHTS})
        has = f"; it has {', '.join(others)}" if others else ""
        raise ValueError(f"model={quoted(name)}: has no weights in .safetensors, which are those that are read{has}")
    return found


def check_hub_id(name: str, option: str) -> None:
    """Raises FileNotFoundError for what can only be a directory that is not there."""
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise FileNotFoundError(f"{option}={quoted(name)}: no such directory")


def _asked(name: str, option: str, revision: str | None) -> str:
    at = "" if revision is None else f" (revision {quoted(revision)})"
    return f"{option}={quoted(name)}: no such directory, and as a hub id{at}"


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises FileNotFoundError or ValueError, naming the file."""
    return _read(file, dict, "object")


def read_json_list(file: Path) -> list[Any]:
    """The JSON array in a file. Raises as read_json."""
    return _read(file, list, "array")


def _read(file: Path, kind: type, name: str) -> Any:
    check_readable(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is not valid JSON ({error}): download it again") from error
    if not isinstance(content, kind):
        raise ValueError(f"{file}: must hold a JSON {name}, not a {type(content).__name__}: download it again")
    return content


def open_safetensors(file: Path, stack: ExitStack) -> Any:
    """An open safetensors file, until the stack is closed. Raises FileNotFoundError or ValueError, naming it."""
    check_readable(file)
    try:
        return stack.enter_context(safe_open(file, framework="pt", device="cpu"))
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file}: damaged or truncated safetensors file ({error}): download it again") from error


def check_readable(file: Path) -> None:
    """Raises FileNotFoundError or ValueError, with the remedy, unless this is a readable file with content."""
    if not os.path.lexists(file):
        raise FileNotFoundError(f"{file}: is not there")
    try:
        with file.open("rb") as opened:
            head = opened.read(len(_LFS_POINTER))
    except FileNotFoundError as error:
        target = os.readlink(file)
        raise FileNotFoundError(
            f"{file}: is a link to {target}, which is not there: download the model again"
        ) from error
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from error
    if not head:
        raise ValueError(f"{file}: is empty: download it again")
    if head == _LFS_POINTER:
        raise ValueError(
            f"{file}: is a Git LFS pointer, not the file itself: run `git lfs pull` in its directory, or download the "
            "model again"
        )
