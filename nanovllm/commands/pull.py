"""`nanovllm pull MODEL`: a model of the hub onto this disk, before it is needed."""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

from nanovllm.commands.verbosity import QUIET
from nanovllm.utils.quick_exit import QuickExit
from nanovllm.utils.units import GIB, MIB

_SPARE_DISK = GIB // 4


def add_pull(commands: Any) -> None:
    parser = commands.add_parser(
        "pull",
        help="download a model of the hub",
        description="Download the files of a model that the engine reads, one after the other, and print their folder. "
        "Files that are there are kept: after an interruption the same command downloads the others. The variable "
        "HF_HUB_CACHE names the folder of all models, and HF_TOKEN is the key for models that need a login.",
    )
    parser.add_argument("model", help="a hub id, or the name of a published model such as Qwen3-0.6B")
    parser.add_argument("--revision", metavar="TEXT", help="a branch, a tag or a commit (default: main)")
    parser.set_defaults(run=_pull, interrupted="and the same command downloads what is missing")


def _pull(options: argparse.Namespace) -> int:
    with QuickExit():
        from nanovllm.models.model_files import (
            OTHER_FILES,
            WEIGHT_FILES,
            download,
            download_file,
            find_directory,
            hub_files,
        )
        from nanovllm.models.presets import meant_chat_model

    def tell(text: str) -> None:
        if options.verbosity != QUIET:
            print(text, file=sys.stderr, flush=True)

    model, revision, patterns = options.model, options.revision, (*OTHER_FILES, *WEIGHT_FILES)
    if (directory := find_directory(model, "model")) is not None:
        tell(f"{model} is a folder: there is nothing to download.")
        print(directory)
        return 0
    if (meant := meant_chat_model(model)) is not None:
        model = meant[0]
    files = hub_files(model, patterns, revision)
    here = sum(file.size for file in files if file.is_here)
    left = sum(file.size for file in files) - here
    tell(f"{model}: {len(files)} files, {_size(here + left)}; to download: {_size(left)}")
    if left:
        _check_disk(left, tell)
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()  # They draw over themselves.
    # One after the other: what an interruption finds unfinished is one file, and the bar is that of its bytes.
    missing = [file for file in files if not file.is_here]
    for i, file in enumerate(missing, 1):
        tell(f"{i} of {len(missing)}: {file.name} ({_size(file.size)})")
        download_file(model, file.name, revision)
    disable_progress_bars()
    path = download(model, "model", patterns, revision)  # All are here.
    tell(f"{model} is in:")
    print(path)
    return 0


def _check_disk(needed: int, tell: Any) -> None:
    """Raises OSError if it has no room."""
    from nanovllm.models.hub_errors import cache_folder

    folder = cache_folder()
    at = next(each for each in (Path(folder), *Path(folder).parents) if each.exists())
    free = shutil.disk_usage(at).free
    tell(f"to {folder} ({_size(free)} free)")
    if free < needed + _SPARE_DISK:
        raise OSError(
            f"{folder} has {_size(free)} free, and the download needs {_size(needed)}: the variable HF_HUB_CACHE names "
            "another folder"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB // 10 else f"{num_bytes / MIB:.1f} MiB"
