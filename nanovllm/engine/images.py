"""ImageInput, ImagePrompt: what the engine takes of images."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nanovllm.models.vision import ProcessedImage, VisionSpec, load_processor

__all__ = ["ImageInput", "ImagePrompt", "ProcessedImage", "VisionSpec", "load_processor"]


@dataclass(frozen=True, eq=False, slots=True)
class ImageInput:
    """One image of a prompt, ready for the vision tower. `VisionSpec.process` makes it, except for the hash.

    Attributes:
        pixel_values: what the tower reads, any float dtype, on the host. Its shape is the family's:
            Qwen3-VL, Qwen3.5: [num_patches, channels * frames * patch_size ** 2], in the order of the image processor.
            Gemma 3: [1, channels, image_size, image_size].
            Gemma 4: [1, num_patches, patch_size ** 2 * channels], padding included; and in `extra` "positions", int64
            [1, num_patches, 2], the column and the line of each patch, -1 for padding.
        grid: (frames, rows, columns) of the patches; None where all images of the family have the same number.
        num_rows: how many rows of embeddings, and so placeholder tokens, the image has.
        content_hash: SHA-256 of what was decoded (32 bytes): the mode, the size and the pixels, before the image
            processor. Equal hashes stand for equal images, whatever file they came from.
        extra: further tensors that the tower reads, by name.
    """

    pixel_values: torch.Tensor
    grid: tuple[int, int, int] | None
    num_rows: int
    content_hash: bytes
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.content_hash) != 32:
            raise ValueError(f"content_hash: must be the 32 bytes of a SHA-256, not {len(self.content_hash)}")

    @classmethod
    def of(cls, processed: ProcessedImage, content_hash: bytes) -> "ImageInput":
        return cls(processed.pixel_values, processed.grid, processed.num_rows, content_hash, processed.extra)

    @property
    def processed(self) -> ProcessedImage:
        return ProcessedImage(self.pixel_values, self.grid, self.num_rows, self.extra)


@dataclass(frozen=True, eq=False, slots=True)
class ImagePrompt:
    """A prompt with images, in the form in which the engine takes it: anywhere where a prompt is allowed.

    Attributes:
        token_ids: of the prompt, with a placeholder token (`VisionSpec.placeholder_id`) for each row of each image:
            those of one image follow each other (`VisionSpec.expand`).
        images: in the order of their placeholders.
    """

    token_ids: Sequence[int]
    images: Sequence[ImageInput]
