"""Options of a job's images: where they are, and which are read."""

import os
from typing import Any

from nanovllm import ImageRules
from nanovllm.jobs.image_files import find_images
from nanovllm.jobs.inputs import Inputs
from nanovllm.jobs.task import Task
from nanovllm.utils.checks import require

_OF_COLUMNS = ("prompt_column", "id_column", "template", "image_column")


def image_rules(
    image_root: str | os.PathLike[str] | None,
    allow_remote: bool,
    max_image_mib: float | None,
    max_image_megapixels: float | None,
    max_images: int | None,
    folder: str | None,
) -> ImageRules:
    """The rules of a job's options. folder: the root if no other one is given. Raises ValueError for a wrong option."""
    limits = {"max_image_mib": max_image_mib, "max_image_megapixels": max_image_megapixels, "max_images": max_images}
    given: Any = {name: value for name, value in limits.items() if value is not None}
    root: Any = folder if image_root is None else image_root
    return ImageRules(image_root=root, allow_remote=allow_remote, **given)


def folder_of(paths: list[str]) -> str | None:
    """The one that holds all files of an input; None if they are in several, or elsewhere than on this machine."""
    folders = {None if "://" in path else os.path.dirname(os.path.abspath(path)) for path in paths}
    return folders.pop() if len(folders) == 1 else None


def ask_images(
    input: Any, images: Any, prompt: Any, limits: tuple[Any, Any, Any, Any, Any], task: Task
) -> tuple[Inputs, ImageRules]:
    """The lines of a job that asks the same of each image, and its rules.

    Args:
        input: must be None.
        images: as of find_images.
        prompt: what is asked.
        limits: the arguments of image_rules, without the folder.
        task: must be one that generates, without options of columns.

    Raises ValueError, or FileNotFoundError.
    """
    if input is not None:
        raise ValueError("input: cannot be given with images and prompt, which make the lines")
    if images is None:
        raise ValueError("prompt: needs images (--images), of which it is asked")
    if task.name != "generate":
        raise ValueError(
            f"task={task.name!r}: reads no images; images and prompt (--images, --prompt) are of 'generate'"
        )
    given = task.line_format.given()
    for name in _OF_COLUMNS:
        if name in given:
            raise ValueError(f"{name}={given[name]!r}: cannot be given with images and prompt, which make the lines")
    require("prompt", prompt, isinstance(prompt, str) and prompt != "", "what is asked of each image, a text")
    found = find_images(images)
    rules = image_rules(*limits, folder=found.folder)
    return Inputs(found.paths, found.names, image_prompt=prompt), rules
