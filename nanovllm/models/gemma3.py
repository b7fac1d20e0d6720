"""Gemma 3 (arXiv:2503.19786), and how it sees images."""

from typing import ClassVar

import torch
from torch import nn

from nanovllm.layers.rope_parameters import RopeParameters, rope_parameters, rope_settings
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import local_layers, windows_of_layers
from nanovllm.models.seeing_decoder import SeeingDecoder
from nanovllm.models.spec import DecoderSpec
from nanovllm.models.tower_parts import attention_options
from nanovllm.models.vision import ProcessedImage, VisionSpec
from nanovllm.utils.checks import quoted


class Gemma3ForCausalLM(DecoderForCausalLM):
    """Norms before and after attention and the MLP, their weights stored less 1. Most layers are local: they have a
    window, and a RoPE of their own."""

    packed_modules_mapping = DecoderForCausalLM.packed_modules_mapping | {
        "attention_output_norm": {"post_attention_layernorm": None},
        "post_attention_layernorm": {"pre_feedforward_layernorm": None},
        "mlp_output_norm": {"post_feedforward_layernorm": None},
    }
    # As transformers 5 and as 4 write the text part of a checkpoint with a vision tower.
    checkpoint_prefixes: ClassVar = {"model.language_model.": "model.", "language_model.": ""}
    switches = frozenset({"attention_bias", "sliding_window", "sliding_window_pattern", "query_pre_attn_scalar"})

    @staticmethod
    def spec(config) -> DecoderSpec:
        if config.hidden_activation != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_activation={quoted(config.hidden_activation)}: supported is gelu_pytorch_tanh")
        bias = bool(config.attention_bias)
        global_rope = rope_parameters(config, "full_attention")
        if "sliding_attention" in rope_settings(config):
            local_rope = rope_parameters(config, "sliding_attention")
        else:  # in the spelling of transformers 4
            local_rope = RopeParameters(config.rope_local_base_freq)
        return DecoderSpec(
            tuple(local_rope if is_local else global_rope for is_local in local_layers(config)),
            windows_of_layers(config),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            norms="both",
            norm_offset=1.0,
            activation="gelu_tanh",
            embedding_scale=rounded_embedding_scale(config),
            attention_scale=config.query_pre_attn_scalar**-0.5,
        )


def rounded_embedding_scale(config) -> float:
    """Rounded to the model's dtype, as it was in training."""
    return torch.tensor(config.hidden_size**0.5, dtype=torch.get_default_dtype(), device="cpu").item()


class Gemma3Tower(nn.Module):
    """SigLIP, and a projector that makes rows of means of its patches."""

    def __init__(self, config):
        """config: transformers', of the whole model."""
        super().__init__()
        from transformers import AutoModel
        from transformers.models.gemma3.modeling_gemma3 import Gemma3MultiModalProjector

        tower = AutoModel.from_config(config.vision_config, **attention_options())
        self.vision_tower = getattr(tower, "vision_model", tower)  # Older releases have a module around it.
        self.multi_modal_projector = Gemma3MultiModalProjector(config)

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[num_images, channels, height, width] -> [num_images, rows of an image, hidden_size]."""
        return self.multi_modal_projector(self.vision_tower(pixel_values=pixel_values).last_hidden_state)


class Gemma3Vision(VisionSpec):
    """Every image is scaled to one size, and has as many rows, which attend to each other in both directions."""

    prefixes: ClassVar = {
        f"{outer}{part}": f"vision.{ours}"
        for part, ours in (
            ("vision_tower.vision_model.", "vision_tower."),
            ("vision_tower.", "vision_tower."),
            ("multi_modal_projector.", "multi_modal_projector."),
        )
        for outer in ("model.", "")
    }
    is_bidirectional = True
    processor = "Gemma3ImageProcessor"

    def __init__(self, config):
        super().__init__(config)
        fields, tower = self.fields, self.fields["vision_config"]
        self.placeholder_id, self.max_image_rows = fields["image_token_index"], fields["mm_tokens_per_image"]
        self.marker_id = fields["boi_token_index"]
        self._num_patches = (tower["image_size"] // tower["patch_size"]) ** 2
        self.patches_per_row = -(-self._num_patches // self.max_image_rows)

    def texts(self, tokenizer):
        names = "boi_token_index", "image_token_index", "eoi_token_index"
        begin, row, end = (str(tokenizer.convert_ids_to_tokens(self.fields[name])) for name in names)
        return begin, f"\n\n{begin}{row}{end}\n\n"

    def processor_options(self):
        return {"size": dict.fromkeys(("height", "width"), self.fields["vision_config"]["image_size"])}

    def num_rows(self, processor, height, width):
        return self.max_image_rows

    def process(self, processor, image):
        if getattr(processor, "do_pan_and_scan", False):
            raise ValueError("do_pan_and_scan: is not supported: set it to false in preprocessor_config.json")
        pixels = processor(images=[image], return_tensors="pt")["pixel_values"]
        return ProcessedImage(pixels, None, self.max_image_rows, {})

    def make_tower(self):
        from transformers import AutoConfig

        return Gemma3Tower(AutoConfig.for_model(**self.fields, text_config={"hidden_size": self.hidden_size}))

    def encode(self, tower, images):
        return tower(torch.cat([image.pixel_values for image in images])).flatten(0, 1)

    def num_patches(self, image):
        return self._num_patches

    def largest_images(self, num_patches, dtype, device):
        tower = self.fields["vision_config"]
        pixels = torch.zeros(1, tower["num_channels"], *[tower["image_size"]] * 2, dtype=dtype, device=device)
        return [ProcessedImage(pixels, None, self.max_image_rows, {})] * max(1, num_patches // self._num_patches)

    def values_per_patch(self):
        tower = self.fields["vision_config"]
        return 10 * tower["hidden_size"] + 2 * tower["intermediate_size"]


class Gemma3ForConditionalGeneration(SeeingDecoder, Gemma3ForCausalLM):
    """The same with a vision tower."""

    vision_type = Gemma3Vision
