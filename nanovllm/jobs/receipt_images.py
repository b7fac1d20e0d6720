"""Images of receipts: what a row keeps of them, and how `verify` reads them again.

A receipt has an image's source, as its line gave it, and the SHA-256 of what was decoded. So another image in its place
is told apart from other bits of the answer. The manifest has the rules by which images were read.
"""

import os
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import tee
from typing import TYPE_CHECKING, Any

from nanovllm import ImageRules, find_image_reader
from nanovllm.jobs.lines import Row
from nanovllm.jobs.receipts import IMAGES

if TYPE_CHECKING:  # The reading process has no torch.
    from nanovllm import LLM, ImageReader, SamplingParams

IMAGE_RULES = "image_rules"  # a key of the manifest


def kept_images(sources: Sequence[Any], images: Sequence[Any]) -> tuple[Row, ...]:
    """What a receipt keeps. sources: as a line gives them. images: PackedImages, or ImageInputs, of these."""
    pairs = zip(sources, images, strict=True)
    return tuple({"source": _source(each), "sha256": image.content_hash.hex()} for each, image in pairs)


def _source(given: Any) -> str:
    """As a text that `read_image` takes; of bytes, which nobody could find again, all of them."""
    if isinstance(given, Mapping):
        given = given["path"] if given.get("bytes") is None else given["bytes"]
    if isinstance(given, bytes | bytearray | memoryview):
        return f"data:;base64,{b64encode(given).decode()}"
    return os.fspath(given)


def kept_rules(rules: ImageRules) -> Row:
    """What a manifest keeps. Whoever verifies may be in another directory."""
    root = rules.image_root
    return asdict(rules) | {"image_root": None if root is None else os.path.realpath(root)}


def joined_rules(before: Row | None, now: Row) -> Row:
    """By which all images can be read that were read by the rules of earlier calls, or by those of this one, which has
    their root. before: of the manifest."""
    known = before or {}
    return {name: value if name == "image_root" else max(value, known.get(name, value)) for name, value in now.items()}


# -- verify ------------------------------------------------------------------------------------------------------------


class ImageChanged(Exception):
    """An image of a line is no longer what it was, or cannot be read any more."""


class ImagesAgain:
    """Reads the images of a job's receipts."""

    def __init__(self, llm: "LLM", rules: Row, image_root: str | os.PathLike[str] | None):
        """rules: of the manifest. image_root: where its folder of images is now; None: where it was. Raises ValueError
        if that is no folder."""
        try:
            known = ImageRules(**rules if image_root is None else rules | {"image_root": None})
        except ValueError as error:
            raise ValueError(
                f"{error}; if the images have moved, image_root (--image-root) says where they are"
            ) from error
        if image_root is not None:
            known = replace(known, image_root=image_root)  # type: ignore[arg-type]
        dtype = str(llm.config.dtype).removeprefix("torch.")
        self._reader: ImageReader | None = find_image_reader(llm.config.model, None, None, known, dtype)

    def prompt(self, receipt: Row) -> Any:
        """What the engine takes. Raises ImageChanged, which says what has changed."""
        token_ids, kept = receipt["prompt_token_ids"], receipt.get(IMAGES)
        if not kept:
            return token_ids
        from nanovllm import ImagePrompt

        images = (self._read(index, **each) for index, each in enumerate(kept))
        return ImagePrompt(token_ids, [image.unpack() for image in images])

    def _read(self, index: int, source: str, sha256: str) -> Any:
        if self._reader is None:
            raise ImageChanged(f"image {index} cannot be read: the model has no vision tower")
        try:
            image = self._reader.read(source)
        except (ValueError, OSError) as error:
            raise ImageChanged(f"image {index} cannot be read any more: {error}") from error
        if (now := image.content_hash.hex()) != sha256:
            raise ImageChanged(f"image {index} has changed: the SHA-256 of its pixels was {sha256} and is {now}")
        return image


def answered_again(
    llm: "LLM", receipts: Sequence[Row], params: Sequence["SamplingParams"], images: ImagesAgain, alone: bool
) -> Iterator[Any]:
    """The outputs of receipts with images, in their order, and in place of the first one whose images have changed what
    has changed, in words. Images are read when the engine has room for them."""
    changed = list[str]()

    def requests() -> Iterator[tuple[Any, Any]]:
        for receipt, each in zip(receipts, params, strict=True):
            try:
                yield images.prompt(receipt), each
            except ImageChanged as error:
                changed.append(str(error))
                return

    if alone:
        for prompt, each in requests():
            yield llm.generate([prompt], [each], use_tqdm=False)[0]
    else:
        pairs, same_pairs = tee(requests())
        prompts, of_prompts = (prompt for prompt, _ in pairs), (each for _, each in same_pairs)
        for _, output in llm.generate_iter(prompts, of_prompts, ordered=True):
            yield output
    yield from changed
