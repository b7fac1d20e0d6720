"""ImageSequence: a prompt with images."""

from collections.abc import Sequence as AbstractSequence
from typing import Any, NamedTuple

import numpy as np

from nanovllm.engine.features.logits.thinking import ThinkingSequence
from nanovllm.engine.images import ImageInput
from nanovllm.engine.sequence import Sequence
from nanovllm.models.vision import VisionSpec
from nanovllm.utils.token_ids import TokenIds


class PlacedImage(NamedTuple):
    """An image, and the index of its first placeholder token in the prompt."""

    start: int
    image: ImageInput

    @property
    def end(self) -> int:
        return self.start + self.image.num_rows


class PlacedImages:
    """The images of one prompt, which its samples share.

    Attributes:
        each: in the order of the prompt.
        positions: the three parts of each prompt token's position, int64 [3, num_tokens]; None where positions have
            one part.
        delta: what is added to the index of a later token to have its position.
    """

    def __init__(self, spec: VisionSpec, token_ids: AbstractSequence[int], images: AbstractSequence[ImageInput]):
        """Raises ValueError unless the prompt has as many placeholder tokens, one behind the other, as each image has
        rows."""
        places = np.flatnonzero(np.asarray(token_ids) == spec.placeholder_id)
        num_rows = [image.num_rows for image in images]
        ends = np.cumsum(num_rows)
        if not len(ends) or ends[-1] != len(places):
            raise ValueError(
                f"images: the prompt has {len(places)} placeholder tokens ({spec.placeholder_id}), and its "
                f"{len(num_rows)} images have {sum(num_rows)} rows: each row needs one"
            )
        self.each = []
        for image, end in zip(images, ends.tolist(), strict=True):
            of_image = places[end - image.num_rows : end]
            if of_image[-1] - of_image[0] != image.num_rows - 1:
                raise ValueError(f"images: the {image.num_rows} placeholder tokens of an image must follow each other")
            self.each.append(PlacedImage(int(of_image[0]), image))
        self.positions: np.ndarray | None = None
        self.delta = 0
        if spec.has_axes:
            starts, processed = [each.start for each in self.each], [image.processed for image in images]
            self.positions = spec.positions(starts, processed, len(token_ids))
            self.delta = int(self.positions.max()) + 1 - len(token_ids)

    @property
    def num_bytes(self) -> int:
        """Of what the tower reads, on the host."""
        return sum(each.image.pixel_values.nbytes for each in self.each)

    def of_tokens(self, start: int, end: int) -> np.ndarray:
        """The three parts of the positions of tokens start..end-1, int64 [3, end - start], completion included."""
        known = self.positions[:, start:end]  # type: ignore[index]
        further = np.arange(start + known.shape[1], end) + self.delta
        return np.concatenate((known, np.broadcast_to(further, (3, len(further)))), axis=1)


class ImageSequence(Sequence):
    """A sequence whose prompt has images.

    Attributes:
        images: of its prompt.
    """

    def __init__(self, *arguments: Any, images: PlacedImages):
        """arguments: those of Sequence."""
        super().__init__(*arguments)
        self.images = images

    def block(self, i: int) -> TokenIds:
        """Block i as the prefix cache knows it: behind its tokens, the content hashes of the images whose placeholders
        it has. So equal tokens of other images are another block."""
        block, first, end = super().block(i), i * self.block_size, (i + 1) * self.block_size
        for each in self.images.each:
            if each.start < end and each.end > first:
                block.extend(np.frombuffer(each.image.content_hash, np.int32).tolist())
        return block

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a step by hand on several ranks has no images: use generate() or add_request()")


class ThinkingImageSequence(ImageSequence, ThinkingSequence):
    """Likewise, with a budget of thinking."""
