"""A model's files: find, download and read them, and say what is wrong with one."""

import json
import os
from pathlib import Path
from typing import Any

from nanovllm.utils.checks import quoted, shortened

_LFS_POINTER = b"version https://git-lfs"

WEIGHT_FILES = ("*.safetensors",)
_DUPLICATES = ["consolidated*.safetensors"]  # Mistral's repositories hold the weights twice.
OTHER_FILES = ("*.json", "*.txt", "*.jinja", "*.model")  # configurations and tokenizers

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model")
_OTHER_TOKENIZERS = "tokenizer= takes another's, and skip_tokenizer_init=True does without"


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
        raise ValueError(f"{option}={quoted(name)}: is a file; must be the directory that holds it")
    return path


def download(name: str, option: str, patterns: tuple[str, ...], revision: str | None = None) -> str:
    """Download the files of a hub id that match the patterns; returns the local directory. Raises FileNotFoundError if
    the hub has no such model."""
    from huggingface_hub import snapshot_download

    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise FileNotFoundError(f"{option}={quoted(name)}: no such directory")
    try:
        return snapshot_download(name, revision=revision, allow_patterns=list(patterns), ignore_patterns=_DUPLICATES)
    except Exception as error:
        at = "" if revision is None else f" (revision {quoted(revision)})"
        raise FileNotFoundError(
            f"{option}={quoted(name)}: no such directory, and as a hub id{at} it cannot be downloaded: "
            f"{one_line(error)}"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises FileNotFoundError or ValueError, naming the file."""
    check_readable(file)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: is not valid JSON ({error}): download it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a JSON object, not a {type(content).__name__}: download it again")
    return content


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


def load_tokenizer(model: str, directory: str | None) -> Any:
    """A transformers tokenizer. Raises FileNotFoundError or ValueError, naming the file and the alternatives.

    Args:
        model: the option, for messages.
        directory: where its files are; None if it is a published shape, which has none.
    """
    from transformers import AutoTokenizer

    if directory is None:
        raise ValueError(f"model={quoted(model)}: a published shape has no tokenizer; {_OTHER_TOKENIZERS}")
    files = [file for name in _TOKENIZER_FILES if os.path.lexists(file := Path(directory, name))]
    if not files:
        raise FileNotFoundError(f"{directory}: holds no {_TOKENIZER_FILES[0]}; {_OTHER_TOKENIZERS}")
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, use_fast=True)
        # Without a vocabulary transformers 5 makes up an empty one.
        if set(tokenizer.get_vocab()) <= set(tokenizer.get_added_vocab()):
            raise ValueError("it has no vocabulary")
        return tokenizer
    except Exception as error:
        for file in files:
            if file.suffix == ".json":
                read_json(file)  # Raises for the file at fault. Only now, because these files have megabytes.
        names = ", ".join(file.name for file in files)
        raise ValueError(
            f"{directory}: its tokenizer ({names}) cannot be loaded: {one_line(error)}; {_OTHER_TOKENIZERS}"
        ) from error


def one_line(error: BaseException) -> str:
    """Another library's error, for a message of ours."""
    return f"{type(error).__name__}: {shortened(' '.join(str(error).split()))}"
