"""Qwen3-VL (arXiv:2511.21631), dense; and how all of Qwen's newer models see images."""

from typing import Any, ClassVar

import numpy as np
import torch

from nanovllm.layers.rope_parameters import rope_settings
from nanovllm.models.qwen3_decoder import Qwen3ForCausalLM
from nanovllm.models.seeing_decoder import SeeingDecoder
from nanovllm.models.tower_parts import ImageRanges, PatchProduct, RotaryTowerAttention
from nanovllm.models.vision import ProcessedImage, VisionSpec, send


class QwenVision(VisionSpec):
    """A tower over the patches of images of any size. Four patches, two by two, make a row. The position of a row has
    three parts: its time, its line and its place in the line, from the image's first position on."""

    prefixes: ClassVar = {"model.visual.": "vision."}
    max_image_rows = 2**14  # of 16 million pixels, more than the published processors make of any image
    has_axes = True
    sections = (24, 20, 20)  # pairs of dimensions for each part of a position, if the configuration does not say
    processor = "Qwen2VLImageProcessor"
    usual_options: ClassVar = {
        "size": {"shortest_edge": 2**16, "longest_edge": 2**24},  # pixels
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }

    def __init__(self, config: Any):
        super().__init__(config)
        tower = self.fields["vision_config"]
        self.placeholder_id = self.fields["image_token_id"]
        self.num_added = len(tower.get("deepstack_visual_indexes") or ())
        self._merge = tower.get("spatial_merge_size", 2)
        self.patches_per_row = self._merge**2
        self._sections = rope_settings(config).get("mrope_section") or self.sections

    def processor_options(self):
        names = {"patch_size": "patch_size", "temporal_patch_size": "temporal_patch_size"}
        names["merge_size"] = "spatial_merge_size"
        return {name: self.fields["vision_config"][theirs] for name, theirs in names.items()}

    def num_rows(self, processor, height, width):
        return processor.get_number_of_image_patches(height, width, {}) // self._merge**2

    def process(self, processor, image):
        found = processor(images=[image], return_tensors="pt")
        frames, lines, columns = found["image_grid_thw"][0].tolist()
        return ProcessedImage(
            found["pixel_values"], (frames, lines, columns), frames * lines * columns // self._merge**2, {}
        )

    def make_tower(self):
        from transformers import AutoConfig, AutoModel

        config = AutoConfig.for_model(**self.fields).vision_config
        tower = AutoModel.from_config(config, dtype=torch.get_default_dtype())
        tower.patch_embed = PatchProduct(tower.patch_embed)
        for block in tower.blocks:
            block.attn = RotaryTowerAttention(block.attn)
        return tower

    def encode(self, tower, images):
        pixels = torch.cat([image.pixel_values for image in images]).to(tower.dtype)
        grids = torch.tensor([image.grid for image in images])
        lengths = grids.prod(1)
        ends = lengths.cumsum(0)
        # Each in a tensor of its own, because a kernel has another variant for another alignment.
        starts, ends = (send(each.int(), pixels.device) for each in (ends - lengths, ends))
        ranges = ImageRanges(starts, ends, int(lengths.max()))
        found = tower(pixels, grid_thw=grids, images=ranges, **_of_grids(tower, grids, pixels.device))
        return torch.cat([found.pooler_output, *getattr(found, "deepstack_features", ())], dim=1)

    def num_patches(self, image):
        return len(image.pixel_values)

    def largest_images(self, num_patches, dtype, device):
        # One alone, because each patch attends to all others of its image.
        side = int(num_patches**0.5) // self._merge * self._merge
        tower = self.fields["vision_config"]
        channels, frames, patch = (tower[name] for name in ("in_channels", "temporal_patch_size", "patch_size"))
        pixels = torch.zeros(side * side, channels * frames * patch**2, dtype=dtype, device=device)
        return [ProcessedImage(pixels, (1, side, side), side * side // self._merge**2, {})]

    def values_per_patch(self):
        tower = self.fields["vision_config"]
        # Each patch reads four rows of a table of positions, and weights them in float32.
        return 15 * tower["hidden_size"] + 2 * tower["intermediate_size"]

    def positions(self, starts, images, num_tokens):
        found = np.empty((3, num_tokens), np.int64)
        end = following = 0  # tokens that have their positions, and the position of the next one
        for start, image in zip(starts, images, strict=True):
            found[:, end:start] = np.arange(following, following + start - end)
            following += start - end
            frames, lines, columns = image.grid
            sizes = frames, lines // self._merge, columns // self._merge
            end = start + image.num_rows
            found[:, start:end] = np.indices(sizes).reshape(3, -1) + following
            following += max(sizes[1:])
        found[:, end:] = np.arange(following, following + num_tokens - end)
        return found

    def axes(self, num_pairs):
        # Line and column have every third pair, up to their number; time has the others.
        found = np.zeros(num_pairs, np.int64)
        for axis in (1, 2):
            found[axis : 3 * self._sections[axis] : 3] = axis
        return found.tolist()


def _of_grids(tower: Any, grids: torch.Tensor, device: torch.device) -> dict[str, torch.Tensor]:
    """What the tower would compute of the images' sizes on its device, and wait for. A release that cannot be told
    computes it."""
    try:
        from transformers import vision_utils
    except ImportError:
        return {}

    merge = tower.spatial_merge_size
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        grids,
        num_grid_per_side=tower.num_grid_per_side,
        mode=tower.interpolation_mode,
        align_corners=tower.interpolation_align_corners,
        spatial_merge_size=merge,
    )
    positions = vision_utils.get_vision_position_ids(grids, merge)
    on_device = {"interp_indices": indices, "interp_weights": weights, "position_ids": positions}
    found = {name: send(tensor, device) for name, tensor in on_device.items()}
    return found | {"cu_seqlens": vision_utils.get_vision_cu_seqlens(grids)}


class Qwen3VLForConditionalGeneration(SeeingDecoder, Qwen3ForCausalLM):
    """Qwen3 that sees images. Some layers of the tower have outputs of their own, which are added to those of as many
    first layers of the decoder (DeepStack, arXiv:2406.04334)."""

    checkpoint_prefixes: ClassVar = {"model.language_model.": "model."}
    vision_type = QwenVision
