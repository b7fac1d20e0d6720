"""A family that sees, without a tower: what reading images needs of one."""

from typing import Any

import numpy as np
import torch

from nanovllm.engine.text.image_reader import ImageReader
from nanovllm.models.vision import ProcessedImage

PLACE = 5  # the token of a row


class StubSpec:
    """An image has a row for each of its rows of pixels. "[image]" in a text becomes the token of a place."""

    placeholder_id = PLACE
    marker_id = None

    def write_images(self, text: str, tokenizer: Any) -> str:
        return text.replace("[image]", tokenizer.convert_ids_to_tokens(PLACE) if tokenizer else "")

    def expand(self, token_ids, num_rows):
        counts = iter(num_rows)
        return [token for each in token_ids for token in [each] * (next(counts) if each == PLACE else 1)]

    def process(self, processor: Any, image: Any) -> ProcessedImage:
        pixels = np.asarray(image)
        height, width, _ = pixels.shape
        if width > 200:
            raise ValueError("too long")
        values = torch.from_numpy(pixels.astype(np.float32))
        mask = torch.ones(height, dtype=torch.bool)
        return ProcessedImage(values, (1, height, width), height, {"size": (height, width), "mask": mask})

    def check(self, image: ProcessedImage) -> None:
        pass


def stub_reader(tokenizer: Any = None, **options: Any) -> ImageReader:
    spec: Any = StubSpec()
    return ImageReader(spec, tokenizer, lambda: None, **options)
