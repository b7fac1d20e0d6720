"""VisionSpec: what a family of models that see images says about them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from nanovllm.models.model_files import read_json
from nanovllm.utils.checks import quoted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# The tower computes images together up to at least so many patches: they keep a GPU busy.
_MIN_PATCHES = 2**14


class ProcessedImage(NamedTuple):
    """What a family's image processor makes of one image.

    Attributes:
        pixel_values: what the vision tower reads, any float dtype, in the shape that the family's `encode` expects.
        grid: (frames, rows, columns) of the image's patches; None where all images have the same number.
        num_rows: how many rows of embeddings the tower makes of it, each for one placeholder token.
        extra: further tensors that the tower reads, by name.
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
        config: of the text model, as `hf_config.read_hf_config` returns it. Its attribute `vision` is the content of
            config.json without the text model: a dictionary.

    Attributes:
        fields: that dictionary.
        hidden_size: numbers in a row, the text model's.
        placeholder_id: the token that stands for one row.
        marker_id: the token of the marker, where that is another one; else None.
        num_added: how many layers' outputs an image also adds to (the deep stack of Qwen3-VL): the first ones.
        prefixes: what the checkpoint's names of the tower's parameters begin with -> what ours do.
        patches_per_row: how many patches of the tower make a row, at most.
        max_image_rows: rows of the largest image that the engine accepts.
        is_bidirectional: whether the rows of an image attend to each other in both directions. Then a prefill computes
            all of them in one step.
        both_ways_in: the layers in which they do: "all layers" or "layers with a window".
        has_axes: whether a token's position has three parts (M-RoPE): `positions` and `axes` say which.
        processor: the name of transformers' image processor, for a checkpoint that names none.
        always_this_processor: whether it also serves checkpoints that name another one.
        usual_options: of that, as in the family's published checkpoints, where transformers' own are others.
    """

    placeholder_id: int
    marker_id: int | None = None
    num_added: int = 0
    prefixes: ClassVar[dict[str, str]]
    patches_per_row: int
    max_image_rows: int
    is_bidirectional: bool = False
    both_ways_in: ClassVar[str] = "all layers"
    has_axes: ClassVar[bool] = False
    processor: ClassVar[str]
    always_this_processor: ClassVar[bool] = False
    usual_options: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: Any):
        self.fields: dict[str, Any] = config.vision
        self.hidden_size: int = config.hidden_size

    @property
    def row_size(self) -> int:
        """Numbers that the tower gives for a placeholder token: a row, and what it adds to layers' outputs."""
        return self.hidden_size * (1 + self.num_added)

    def limits(self, max_model_len: int) -> tuple[int, int]:
        """Rows of the largest image that an engine accepts, and how many patches its tower computes at once."""
        num_rows = min(self.max_image_rows, max_model_len)
        return num_rows, max(_MIN_PATCHES, num_rows * self.patches_per_row)

    # -- the prompt ------------------------------------------------------------------------------------------------

    def texts(self, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str]:
        """(marker, written): the text that stands for an image in a prompt, and the text that it becomes, which has
        the placeholder token's text once."""
        marker = str(tokenizer.convert_ids_to_tokens(self.placeholder_id))
        return marker, marker

    def write_images(self, text: str, tokenizer: "PreTrainedTokenizerBase") -> str:
        """A prompt's text with one placeholder token for each marker."""
        marker, written = self.texts(tokenizer)
        return text if marker == written else text.replace(marker, written)

    def expand(self, token_ids: Sequence[int], num_rows: Sequence[int]) -> list[int]:
        """Token ids with a placeholder token for each row of each image. num_rows: of each image, in the order of the
        prompt. Raises ValueError unless the prompt has one placeholder token for each image."""
        places = [token == self.placeholder_id for token in token_ids]
        if sum(places) != len(num_rows):
            raise ValueError(
                f"images: the prompt has {sum(places)} places for images (token {self.placeholder_id}), and "
                f"{len(num_rows)} images are given: there must be a place for each"
            )
        counts, expanded = iter(num_rows), list[int]()
        for token, is_place in zip(token_ids, places, strict=True):
            expanded.extend([token] * (next(counts) if is_place else 1))
        return expanded

    # -- the image processor ---------------------------------------------------------------------------------------

    @abstractmethod
    def processor_options(self) -> dict[str, Any]:
        """Those that must be as the tower's configuration says."""

    @abstractmethod
    def num_rows(self, processor: Any, height: int, width: int) -> int:
        """How many rows an image of so many pixels gives, before it is decoded. processor: transformers'. Raises
        ValueError for a size that the processor refuses."""

    @abstractmethod
    def process(self, processor: Any, image: Any) -> ProcessedImage:
        """What the processor makes of a PIL image in mode RGB."""

    def check(self, image: ProcessedImage) -> None:  # noqa: B027
        """Raises ValueError for an image that the tower cannot take, such as one longer than its table of positions: in
        a step that would be an error of all requests."""

    # -- the model -------------------------------------------------------------------------------------------------

    @abstractmethod
    def make_tower(self) -> nn.Module:
        """Transformers' modules that make the rows, in torch's default dtype and on its default device."""

    @abstractmethod
    def encode(self, tower: Any, images: Sequence[ProcessedImage]) -> Tensor:
        """The rows of some images, one behind the other: [num_rows of all, row_size]. The pixels are on the device."""

    @abstractmethod
    def num_patches(self, image: ProcessedImage) -> int:
        """How much work an image is for the tower."""

    @abstractmethod
    def largest_images(self, num_patches: int, dtype: torch.dtype, device: torch.device) -> list[ProcessedImage]:
        """Images of so many patches together, with any content, for which the tower needs the most memory."""

    @abstractmethod
    def values_per_patch(self) -> int:
        """Numbers that the tower holds for each patch where it holds the most; an estimate."""

    def positions(self, starts: Sequence[int], images: Sequence[ProcessedImage], num_tokens: int) -> np.ndarray:
        """The three parts of each token's position, int64 [3, num_tokens]. Asked of families with `has_axes` alone.

        Args:
            starts: of each image, the index of its first placeholder token.
            num_tokens: of the prompt.
        """
        raise NotImplementedError

    def axes(self, num_pairs: int) -> list[int]:
        """Of each pair of dimensions that RoPE rotates, the part of the position that it follows: 0, 1 or 2. Asked of
        families with `has_axes` alone."""
        raise NotImplementedError


def send(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of the host on the device, in this dtype. It goes to a GPU through page-locked memory: from any other
    the host would wait for all that the GPU has to do, and the GPU then for the host."""
    tensor = tensor.to(dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def load_processor(spec: VisionSpec, directory: str) -> Any:
    """Transformers' image processor of a checkpoint: the one that its processor_config.json or preprocessor_config.json
    describes, or the family's with its usual options if neither does. Raises ValueError, naming the file, if what that
    makes is not what the tower reads.

    directory: of the checkpoint; for a published shape, which has no files, any name."""
    import transformers

    # The one that needs no torchvision, where a release has two.
    name = spec.processor
    usual = getattr(transformers, f"{name}Pil", None) or getattr(transformers, name)
    needed, file = spec.processor_options(), _processor_file(directory)
    if file is None:
        return usual(**spec.usual_options | needed)
    if spec.always_this_processor:
        processor = usual.from_pretrained(directory)
    else:
        try:
            # False, because None asks on standard input whether to run code of the checkpoint.
            processor = transformers.AutoImageProcessor.from_pretrained(directory, trust_remote_code=False)
        except ImportError:  # Older releases look for one with torchvision alone.
            if not _named_processor(file).startswith(name):
                raise
            processor = usual.from_pretrained(directory)
    for option, value in needed.items():
        found = getattr(processor, option, value)
        if found != value and (not isinstance(value, dict) or dict(found) != value):
            raise ValueError(
                f"{file}: {option}={quoted(found)}: must be {value!r}, as config.json's vision_config says"
            )
    return processor


def _named_processor(file: Path) -> str:
    """The class that a file of `_processor_file` names, "" if none."""
    content = read_json(file)
    return str(content.get("image_processor", content).get("image_processor_type", ""))


def _processor_file(directory: str) -> Path | None:
    """The file of a checkpoint that describes its image processor, as transformers chooses it."""
    file = Path(directory, "processor_config.json")  # of text and images together, in newer checkpoints
    if file.exists() and "image_processor" in read_json(file):
        return file
    file = Path(directory, "preprocessor_config.json")
    return file if file.exists() else None
