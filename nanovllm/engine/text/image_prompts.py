"""ImagePrompts: from prompts with images to token ids and what the vision tower reads."""

from array import array
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.engine.features.images.image_sequence import PlacedImages
from nanovllm.engine.images import ImageInput, ImagePrompt, load_processor
from nanovllm.engine.text.image_reader import ImageReader
from nanovllm.engine.text.prompts import TextTokens, as_array, read_prompt, wrong_form
from nanovllm.models.registry import find_vision
from nanovllm.models.vision import VisionSpec
from nanovllm.utils.checks import quoted
from nanovllm.utils.threads import image_threads, torch_threads

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ImageTokens(list):
    """Token ids of a prompt with images.

    Attributes:
        images: what its sequences get.
    """

    def __init__(self, token_ids: Iterable[int], images: PlacedImages):
        super().__init__(token_ids)
        self.images = images


class ImagePrompts:
    """Reads prompts with images: {"prompt": text or token ids, "images": [...]}, and `ImagePrompt`."""

    def __init__(self, config: Config, tokenizer: "PreTrainedTokenizerBase | None"):
        """tokenizer: None accepts token ids only."""
        self._config, self._tokenizer = config, tokenizer

    @cached_property
    def _spec(self) -> VisionSpec:
        """Raises ValueError, with the reason, if this engine accepts no images."""
        config, found = self._config, find_vision(self._config.hf_config)
        if found is None:
            if config.text_only:
                raise ValueError(
                    "images: need text_only=False, with which a model has the vision tower of its checkpoint"
                )
            name = (getattr(config.hf_config, "architectures", None) or ["the model"])[0]
            raise ValueError(f"images: this model reads no images: {name} is loaded without a vision tower")
        return found

    @cached_property
    def reader(self) -> ImageReader:
        """Raises ValueError, with the reason, if this engine accepts no images."""
        spec, model = self._spec, self._config.model
        dtype = str(self._config.dtype).removeprefix("torch.")
        return ImageReader(spec, self._tokenizer, lambda: load_processor(spec, model), dtype=dtype)

    def as_array(self, token_ids: list[int]) -> array:
        """As `prompts.as_array`. Raises ValueError also for a place without an image."""
        tokens = as_array(token_ids, self._config.hf_config.vocab_size)
        if not isinstance(token_ids, ImageTokens | TextTokens):
            values = np.frombuffer(tokens, np.int32)
            if any((values == place).any() for place in self._places):
                self.reader.check_places(token_ids, 0)
        return tokens

    @cached_property
    def _places(self) -> list[int]:
        """The tokens that stand for an image, or for a row of one."""
        spec = self._spec
        return [place for place in (spec.placeholder_id, spec.marker_id) if place is not None]

    def read_all(self, prompts: list[Any]) -> list[ImageTokens | list[int] | str | Exception]:
        """What `read` gives for each, or the TypeError or ValueError that it raises. Several threads read the images,
        which Pillow and numpy let them."""
        return [self._try_read(prompt) for prompt in self._with_read_images(prompts)]

    def _try_read(self, prompt: Any) -> ImageTokens | list[int] | str | Exception:
        try:
            return self.read(prompt)
        except (TypeError, ValueError) as error:
            return error

    def _with_read_images(self, prompts: list[Any]) -> list[Any]:
        """The prompts, in which each image of a list is replaced by what `ImageReader` makes of it, or by its error."""
        sources: dict[int, list[Any]] = {}  # of each prompt that has some, by its index
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, Mapping) and isinstance(images := prompt.get("images"), list | tuple):
                sources[i] = list(images)
        if not any(sources.values()):
            return prompts
        try:
            reader = self.reader
        except ValueError:  # of every prompt with images
            return prompts
        prompts = list(prompts)
        with torch_threads(1), ThreadPoolExecutor(image_threads(), "nanovllm-images") as threads:
            read = threads.map(reader.try_read, chain.from_iterable(sources.values()))
            for i, images in sources.items():
                prompts[i] = {**prompts[i], "images": list(islice(read, len(images)))}
        return prompts

    def read(self, prompt: Any) -> ImageTokens | list[int] | str:
        """Token ids of a prompt with images; of one with none, what its text is. Raises TypeError or ValueError, with
        what is wrong."""
        if isinstance(prompt, Mapping):
            text, images = _parts(prompt)
            if not images:
                return text
            prompt = self._process(text, images)
        most = min(cast(int, self._config.max_model_len), self._spec.max_image_rows)
        for i, image in enumerate(prompt.images):
            try:
                self._spec.check(image.processed)
            except ValueError as error:
                raise ValueError(f"images[{i}]: {error}") from error
            if image.num_rows > most:
                raise ValueError(
                    f"images[{i}]: takes {image.num_rows} tokens, and this engine accepts images of {most} at most: "
                    "make it smaller, or raise max_model_len"
                )
            budget = self._config.max_num_batched_tokens
            if self._spec.is_bidirectional and image.num_rows > budget:
                raise ValueError(
                    f"images[{i}]: takes {image.num_rows} tokens, which this model computes in one step: raise "
                    f"max_num_batched_tokens={budget}"
                )
        tokens = as_array(list(prompt.token_ids), self._config.hf_config.vocab_size)
        images = [self._in_dtype(image) for image in prompt.images]
        return ImageTokens(tokens, PlacedImages(self._spec, tokens, images))

    def _process(self, text: str | list[int], images: list[Any]) -> ImagePrompt:
        if not isinstance(text, str):
            return self.reader.prompt(text, images)
        if self._tokenizer is None:
            raise ValueError("is a text, but skip_tokenizer_init is set: pass token ids")
        token_ids = self._tokenizer(self.reader.write_images(text), verbose=False)["input_ids"]
        return self.reader.prompt(token_ids, images)

    def _in_dtype(self, image: ImageInput) -> ImageInput:
        """With pixels in the model's dtype: the tower would round them so, and they wait in half the memory."""
        dtype: torch.dtype = self._config.dtype  # type: ignore[assignment]
        processed = image.processed._replace(pixel_values=image.pixel_values.to(dtype))
        return ImageInput.of(processed, image.content_hash)


def _parts(prompt: Mapping[str, Any]) -> tuple[str | list[int], list[Any]]:
    """The text or the token ids of a prompt, and its images."""
    given = {key: value for key, value in prompt.items() if value is not None}
    images, text = given.pop("images"), given.get("prompt")
    if isinstance(images, str | bytes | Mapping) or not isinstance(images, Iterable):
        raise TypeError(f"images={quoted(images)}: must be a list of paths, URLs or Pillow's images")
    is_ids = given.keys() == {"prompt"} and not isinstance(text, str | Mapping)
    try:
        return read_prompt(text if is_ids else given), list(images)
    except TypeError as error:
        raise wrong_form(prompt) from error
