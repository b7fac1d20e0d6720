"""VisionSpec: what a family of models that see images says about them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase


class ProcessedImage(NamedTuple):
    """What a family's image processor makes of one image.

    Attributes:
        pixel_values: what the vision tower reads, any float dtype, in the shape that the family's `encode` expects.
        grid: (frames, rows, columns) of the image's patches; None where all images have the same number.
        num_rows: how many rows of embeddings the tower makes of it, each for one placeholder token.
        extra: further arrays that the tower reads, by name.
    """

    pixel_values: Tensor
    grid: tuple[int, int, int] | None
    num_rows: int
    extra: dict[str, Any]


class VisionSpec(ABC):
    """How a family's images become rows of embeddings, and where in a prompt they stand.

    In a prompt, a marker stands for each image, as the chat template writes it. Before the text is tokenized,
    `write_images` replaces it by the text with one placeholder token in it. After that, `expand` repeats each
    placeholder token once for each of the image's rows.

    Args:
        config: transformers' configuration of the whole model: text, vision, and the ids of special tokens.

    Attributes:
        placeholder_id: the token that stands for one row.
        is_bidirectional: whether the rows of an image attend to each other in both directions. Then a prefill computes
            all of them in one step.
        has_axes: whether a token's position has three parts (M-RoPE): `positions` gives them.
        num_added: how many layers' outputs an image also adds to (Qwen3-VL's deep stack): the first ones.
        processor: the name of transformers' class for a checkpoint without preprocessor_config.json.
    """

    placeholder_id: int
    is_bidirectional: bool = False
    has_axes: bool = False
    num_added: int = 0
    processor: ClassVar[str]

    def __init__(self, config: "PreTrainedConfig"):
        self.config: Any = config

    # -- the prompt ------------------------------------------------------------------------------------------------

    @abstractmethod
    def texts(self, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str]:
        """(marker, written): the text that stands for an image in a prompt, and the text that it becomes, which has
        the placeholder token's text once."""

    def write_images(self, text: str, tokenizer: "PreTrainedTokenizerBase") -> str:
        """A prompt's text with one placeholder token for each marker."""
        marker, written = self.texts(tokenizer)
        return text if marker == written else text.replace(marker, written)

    def expand(self, token_ids: Sequence[int], num_rows: Sequence[int]) -> list[int]:
        """Token ids with a placeholder token for each row of each image. num_rows: of each image, in the order of the
        prompt. Raises ValueError unless the prompt has one placeholder token for each image."""
        found = [token == self.placeholder_id for token in token_ids]
        if sum(found) != len(num_rows):
            raise ValueError(
                f"the prompt has {sum(found)} places for images (token {self.placeholder_id}), and images: "
                f"{len(num_rows)}; write one place for each image"
            )
        counts, expanded = iter(num_rows), list[int]()
        for token, is_image in zip(token_ids, found, strict=True):
            expanded.extend([token] * (next(counts) if is_image else 1))
        return expanded

    # -- the image processor ---------------------------------------------------------------------------------------

    @abstractmethod
    def num_rows(self, processor: Any, height: int, width: int) -> int:
        """How many rows an image of so many pixels gives, before it is decoded. processor: transformers'."""

    @abstractmethod
    def process(self, processor: Any, image: Any) -> ProcessedImage:
        """What the processor makes of a PIL image in mode RGB."""

    # -- the model -------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """Numbers in a row: the text model's hidden size."""

    @property
    def row_size(self) -> int:
        """Numbers that the tower gives for a placeholder token: a row, and what it adds after layers."""
        return self.hidden_size * (1 + self.num_added)

    @abstractmethod
    def make_tower(self) -> nn.Module:
        """Transformers' modules that make the rows, in torch's default dtype and on its default device. The names of
        its parameters, after one of the `prefixes`, are the checkpoint's."""

    # The checkpoint's names of the tower's parts begin so -> and ours, after "vision.".
    prefixes: ClassVar[dict[str, str]]

    @abstractmethod
    def encode(self, tower: Any, images: Sequence[ProcessedImage]) -> Tensor:
        """The rows of some images, one behind the other: [num_rows of all, row_size]. The pixels are on the device."""

    @abstractmethod
    def num_patches(self, image: ProcessedImage) -> int:
        """How much work an image is for the tower: patches that attend to each other."""

    def positions(self, starts: Sequence[int], images: Sequence[ProcessedImage], num_tokens: int) -> np.ndarray:
        """The three parts of each token's position, int64 [3, num_tokens].

        Args:
            starts: of each image, the index of its first placeholder token.
            num_tokens: of the prompt.
        """
        raise NotImplementedError


def load_processor(spec: VisionSpec, directory: str) -> Any:
    """Transformers' image processor of a checkpoint: the one that its preprocessor_config.json describes, or the
    family's with its usual options if there is no such file."""
    from pathlib import Path

    import transformers

    if Path(directory, "preprocessor_config.json").exists():
        # False, because None asks on standard input whether to run code of the checkpoint.
        return transformers.AutoImageProcessor.from_pretrained(directory, trust_remote_code=False)
    return getattr(transformers, spec.processor)()


def pixels_on(image: ProcessedImage, device: torch.device) -> ProcessedImage:
    return image._replace(pixel_values=image.pixel_values.to(device, non_blocking=True))
