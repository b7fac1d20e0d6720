"""ImageReader: from the sources of a prompt's images to what the engine takes.

It needs an image processor and no weights, so that another process can read images ahead of the engine, which torch's
tensors are packed for: `PackedImage`.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nanovllm.images.read import read_image
from nanovllm.images.rules import ANYWHERE, ImageRules
from nanovllm.models.model_files import OTHER_FILES, download, find_directory, read_json
from nanovllm.utils.checks import one_line

if TYPE_CHECKING:  # The process that reads a job's lines needs no torch, unless they have images.
    from nanovllm.engine.images import ImageInput, ImagePrompt
    from nanovllm.models.vision import VisionSpec


class PackedArray(NamedTuple):
    """A tensor on its way to another process.

    Attributes:
        values: numpy has no bfloat16, and holds its bits as int16.
        dtype: torch's name of the dtype.
    """

    values: np.ndarray
    dtype: str

    @classmethod
    def of(cls, tensor: Any) -> "PackedArray":
        """tensor: of torch, on the host."""
        import torch

        dtype = str(tensor.dtype).removeprefix("torch.")
        tensor = tensor.detach().contiguous()
        return cls((tensor.view(torch.int16) if dtype == "bfloat16" else tensor).numpy(), dtype)

    def tensor(self) -> Any:
        """The same memory as torch's tensor."""
        import torch

        values = self.values if self.values.flags.writeable else self.values.copy()  # Torch's tensors are writable.
        tensor = torch.from_numpy(values)
        return tensor.view(torch.bfloat16) if self.dtype == "bfloat16" else tensor


class PackedImage(NamedTuple):
    """An `ImageInput` on its way to another process: arrays of numpy, which pickle as buffers.

    Attributes:
        arrays: pixel_values, and those of `extra` that are tensors.
        others: the rest of `extra`.
    """

    arrays: dict[str, PackedArray]
    grid: tuple[int, int, int] | None
    num_rows: int
    content_hash: bytes
    others: dict[str, Any]

    @classmethod
    def of(cls, image: "ImageInput", dtype: str | None = None) -> "PackedImage":
        """dtype: torch's name of one to which floats are rounded, as the vision tower would; None leaves them."""
        import torch

        tensors = {"pixel_values": image.pixel_values} | image.extra
        others = {name: value for name, value in image.extra.items() if not isinstance(value, torch.Tensor)}
        to = None if dtype is None else getattr(torch, dtype)
        arrays = {
            name: PackedArray.of(tensor.to(to) if to is not None and tensor.is_floating_point() else tensor)
            for name, tensor in tensors.items()
            if name not in others
        }
        return cls(arrays, image.grid, image.num_rows, image.content_hash, others)

    @property
    def num_bytes(self) -> int:
        return sum(array.values.nbytes for array in self.arrays.values())

    def unpack(self) -> "ImageInput":
        from nanovllm.engine.images import ImageInput

        tensors = {name: array.tensor() for name, array in self.arrays.items()}
        pixel_values = tensors.pop("pixel_values")
        return ImageInput(pixel_values, self.grid, self.num_rows, self.content_hash, tensors | self.others)


class ImageReader:
    """Reads the images of prompts for one model. Several threads may use it."""

    def __init__(
        self,
        spec: "VisionSpec",
        tokenizer: Any,
        load_processor: Callable[[], Any],
        rules: ImageRules | None = None,
        dtype: str | None = None,
    ):
        """
        Args:
            tokenizer: transformers'.
            load_processor: gives transformers' image processor; called for the first image.
            rules: which images are read; None: any path, and nothing from the network.
            dtype: as for `PackedImage.of`.
        """
        self._spec, self._tokenizer = spec, tokenizer
        self._load_processor, self._loading = load_processor, Lock()
        self._rules = ImageRules(image_root=ANYWHERE) if rules is None else rules
        self._dtype = dtype
        self._loaded: Any = None

    @property
    def _processor(self) -> Any:
        with self._loading:  # once, by the first thread
            if self._loaded is None:
                self._loaded = self._load_processor()
            return self._loaded

    def write_images(self, text: str) -> str:
        """A prompt's text with a token for each of its images."""
        return self._spec.write_images(text, self._tokenizer)

    def has_place(self, text: str) -> bool:
        """Whether a prompt's text says where an image is."""
        return str(self._tokenizer.convert_ids_to_tokens(self._spec.placeholder_id)) in self.write_images(text)

    def check_places(self, token_ids: Sequence[int], num_images: int) -> None:
        """Raises ValueError unless a prompt has one token for each of its images, and no more than are allowed. Nothing
        is read for it."""
        token_ids, place = list(token_ids), self._spec.placeholder_id
        num_places = token_ids.count(place)
        if not num_images and self._spec.marker_id is not None:
            # As the template wrote it: only around images markers become placeholders.
            num_places = max(num_places, num_markers := token_ids.count(self._spec.marker_id))
            place = self._spec.marker_id if num_markers else place
        if num_places != num_images:
            name = f"token {place}" if self._tokenizer is None else self._tokenizer.convert_ids_to_tokens(place)
            reason = "each needs one place, which chat templates write"
            if num_places > num_images:
                reason += f"; every {name} is a place, also one that a text itself contains"
            raise ValueError(
                f"its prompt has {num_places} place{'s' * (num_places != 1)} for images, and it has "
                f"{num_images or 'no'} image{'s' * (num_images > 1)}: {reason}"
            )
        self.check_number(num_images)

    def check_number(self, num_images: int) -> None:
        """Raises ValueError for more images than a prompt may have."""
        if num_images > self._rules.max_images:
            allowed, option = self._rules.max_images, "max_images (--max-images)"
            if self._rules.image_root == ANYWHERE:  # of a caller, who cannot set it
                option = "this engine"
            raise ValueError(f"it has {num_images} images; {option} allows a prompt {allowed}")

    def read(self, source: Any) -> PackedImage:
        """An image in any form of `read_image`, or one that has been read before. Raises as `read_image`, and
        ValueError for one that the processor or the tower refuses."""
        from PIL import Image

        from nanovllm.engine.images import ImageInput

        if isinstance(source, PackedImage):
            return source
        if isinstance(source, Exception):  # of one that could not be read
            raise source
        if isinstance(source, ImageInput):
            return PackedImage.of(source, self._dtype)
        found = read_image(source, rules=self._rules)
        try:
            processed = self._spec.process(self._processor, Image.fromarray(found.pixels))
        except Exception as error:  # The library's own classes.
            raise ValueError(f"image of {found.width} x {found.height} pixels: {one_line(error)}") from error
        try:
            self._spec.check(processed)
        except ValueError as error:
            raise ValueError(f"image of {found.width} x {found.height} pixels: {error}") from error
        return PackedImage.of(ImageInput.of(processed, found.sha256), self._dtype)

    def try_read(self, source: Any) -> PackedImage | Exception:
        """The same, or the error that it would raise: `read` takes either."""
        try:
            return self.read(source)
        except (TypeError, ValueError) as error:
            return error

    def read_all(self, sources: Sequence[Any]) -> list[PackedImage]:
        """Raises as `read`, with the index of the image, and as `check_number`."""
        self.check_number(len(sources))
        images = []
        for i, source in enumerate(sources):
            try:
                images.append(self.read(source))
            except (TypeError, ValueError) as error:
                raise type(error)(f"images[{i}]: {error}") from error
        return images

    def expand(self, token_ids: Sequence[int], images: Sequence[PackedImage]) -> list[int]:
        """Token ids with a token for each row of each image. Raises as `check_places`."""
        self.check_places(token_ids, len(images))
        return self._spec.expand(token_ids, [image.num_rows for image in images])

    def prompt(self, token_ids: Sequence[int], sources: Sequence[Any]) -> "ImagePrompt":
        """What the engine takes of a prompt with these images. Raises as `check_places` and `read`."""
        from nanovllm.engine.images import ImagePrompt

        self.check_places(token_ids, len(sources))
        images = self.read_all(sources)
        return ImagePrompt(self.expand(token_ids, images), [image.unpack() for image in images])


def reads_images(model: str, revision: str | None = None) -> bool:
    """Whether prompts of a model may have images. model: a directory, a hub id, whose files are downloaded, or the name
    of a published shape, which needs no files. Raises ValueError, and OSError if they cannot be read."""
    return _find_vision(model, revision) is not None


def find_image_reader(
    model: str,
    revision: str | None,
    tokenizer: Any,
    rules: ImageRules | None = None,
    dtype: str | None = None,
) -> ImageReader | None:
    """What reads the images of a model's prompts; None if it reads none. Arguments as of ImageReader; revision: of a
    hub id. Raises as `reads_images`."""
    if (found := _find_vision(model, revision)) is None:
        return None
    from nanovllm.models.vision import load_processor

    spec, directory = found
    return ImageReader(spec, tokenizer, lambda: load_processor(spec, directory), rules, dtype)


def _find_vision(model: str, revision: str | None) -> "tuple[VisionSpec, str] | None":
    from nanovllm.models.presets import find_preset, preset_config

    found = find_directory(model, "model")
    preset = find_preset(model) if found is None else None
    if preset is not None:
        directory, config = model, preset_config(preset)
    else:
        directory = str(found or download(model, "model", OTHER_FILES, revision))
        file = Path(directory, "config.json")
        # Before torch is imported, which takes seconds.
        if not file.exists() or "vision_config" not in read_json(file):
            return None
        from nanovllm.models.hf_config import read_hf_config

        config = read_hf_config(directory)
    from nanovllm.models.registry import find_vision

    spec = find_vision(config)
    return None if spec is None else (spec, directory)
