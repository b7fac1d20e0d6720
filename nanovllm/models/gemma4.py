"""Gemma 4 (https://ai.google.dev/gemma/docs/core): the text model of the sizes without per-layer embeddings."""

from math import isqrt
from typing import ClassVar

import torch
from torch import Tensor, nn

from nanovllm.layers.matmul.matmul import Matmul
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.layers.rope_parameters import rope_parameters
from nanovllm.models.decoder import DecoderMLP
from nanovllm.models.gemma3 import Gemma3ForCausalLM, Gemma3Vision, rounded_embedding_scale
from nanovllm.models.hf_config import local_layers, windows_of_layers
from nanovllm.models.mlp_with_experts import MLPWithExperts
from nanovllm.models.qwen3_moe import check_experts, count_experts
from nanovllm.models.seeing_decoder import SeeingDecoder
from nanovllm.models.spec import DecoderSpec, LayerHeads
from nanovllm.models.tower_parts import attention_options
from nanovllm.models.vision import ProcessedImage, VisionSpec
from nanovllm.utils.checks import quoted, require


class Gemma4ForCausalLM(Gemma3ForCausalLM):
    """Most layers are local, as in Gemma 3. The others have wider heads, fewer of keys, and these may serve as values.
    Values are normalized, and a number of each layer multiplies the residual stream behind it. With `enable_moe_block`
    every layer has experts beside its MLP."""

    packed_modules_mapping = Gemma3ForCausalLM.packed_modules_mapping | {
        "mlp_norm": {"post_feedforward_layernorm_1": None},
        "experts_norm": {"pre_feedforward_layernorm_2": None},
        "experts_output_norm": {"post_feedforward_layernorm_2": None},
        "gate": {"router.proj": None},
        "router_norm": {"router": None},
    }
    # The checkpoint has experts, router and their norms beside the MLP.
    checkpoint_places: ClassVar = {".mlp.beside.": ".", ".mlp.mlp_norm.": ".mlp_norm.", ".mlp.experts_": ".experts_"}
    switches = frozenset({"attention_bias", "sliding_window", "attention_k_eq_v", "use_bidirectional_attention"})
    switches |= {"final_logit_softcapping", "enable_moe_block", "num_experts"}

    @staticmethod
    def spec(config) -> DecoderSpec:
        if config.hidden_activation != "gelu_pytorch_tanh":
            raise ValueError(f"hidden_activation={quoted(config.hidden_activation)}: supported is gelu_pytorch_tanh")
        # "vision" changes nothing for texts.
        direction = config.use_bidirectional_attention
        require("use_bidirectional_attention", direction, direction in (None, "vision"), "null or 'vision'")
        if has_experts(config):
            check_experts(config, "top_k_experts")
        elif num_experts := count_experts(config):
            raise ValueError(f"num_experts={quoted(num_experts)}: needs enable_moe_block=true")
        is_local, bias = local_layers(config), bool(config.attention_bias)
        ropes = {local: rope_parameters(config, _kind(local)) for local in set(is_local)}
        heads = {True: LayerHeads(config.num_key_value_heads, config.head_dim)}
        sizes = config.num_global_key_value_heads, config.global_head_dim
        names = "num_global_key_value_heads", "global_head_dim"
        heads[False] = LayerHeads(*sizes, config.attention_k_eq_v, names)
        return DecoderSpec(
            tuple(ropes[local] for local in is_local),
            windows_of_layers(config),
            heads=tuple(heads[local] for local in is_local),
            qkv_bias=bias,
            o_bias=bias,
            qk_norm="head",
            value_norm=True,
            norms="both",
            activation="gelu_tanh",
            embedding_scale=rounded_embedding_scale(config),
            attention_scale=1.0,
            layer_scalars=True,
            logit_softcap=config.final_logit_softcapping,
        )

    @staticmethod
    def mlp(config, spec: DecoderSpec, layer: int, tp: TensorParallel, matmul: Matmul) -> nn.Module:
        return (MLPWithExperts if has_experts(config) else DecoderMLP)(config, spec, tp, matmul)


def has_experts(config) -> bool:
    """Whether layers have experts beside their MLP. The unified sizes lack the key, and have none."""
    return bool(getattr(config, "enable_moe_block", False))


def _kind(is_local: bool) -> str:
    return "sliding_attention" if is_local else "full_attention"


class Gemma4Tower(nn.Module):
    """Gemma 4's own tower, which makes rows of means of its patches, and a projection."""

    def __init__(self, config):
        """config: transformers', of the whole model."""
        super().__init__()
        from transformers import AutoModel
        from transformers.models.gemma4.modeling_gemma4 import Gemma4MultimodalEmbedder

        self.vision_tower = AutoModel.from_config(config.vision_config, **attention_options())
        self.embed_vision = Gemma4MultimodalEmbedder(config.vision_config, config.text_config)
        load_buffers(self)

    def forward(self, pixel_values: Tensor, positions: Tensor) -> Tensor:
        """[num_images, num_patches, numbers of a patch], and where each patch is, [num_images, num_patches, 2], -1 for
        padding -> [num_rows of all, hidden_size]."""
        found = self.vision_tower(pixel_values=pixel_values, pixel_position_ids=positions)
        return self.embed_vision(found.last_hidden_state)


class Gemma4Vision(Gemma3Vision):
    """Images keep their proportions, and so the number of rows differs. In layers with a window, these attend to each
    other in both directions if the configuration says so."""

    prefixes: ClassVar = {f"model.{part}": f"vision.{part}" for part in ("vision_tower.", "embed_vision.")}
    both_ways_in = "layers with a window"
    processor = "Gemma4ImageProcessor"
    max_image_rows = 1120  # the largest max_soft_tokens of the image processor
    table = "position_embedding_size"  # of the configuration: positions that the tower knows, of columns and of lines

    def __init__(self, config):
        VisionSpec.__init__(self, config)
        fields, tower = self.fields, self.fields["vision_config"]
        self.placeholder_id = fields["image_token_id"]
        self.is_bidirectional = getattr(config, "use_bidirectional_attention", None) == "vision"
        self.patches_per_row = tower["pooling_kernel_size"] ** 2

    def texts(self, tokenizer):
        names = "boi_token_id", "image_token_id", "eoi_token_id"
        begin, row, end = (str(tokenizer.convert_ids_to_tokens(self.fields[name])) for name in names)
        return row, f"{begin}{row}{end}"

    def processor_options(self):
        return {name: self.fields["vision_config"][name] for name in ("patch_size", "pooling_kernel_size")}

    def num_rows(self, processor, height, width):
        from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

        most = processor.max_soft_tokens * processor.pooling_kernel_size**2
        sizes = {"patch_size": processor.patch_size, "pooling_kernel_size": processor.pooling_kernel_size}
        size = get_aspect_ratio_preserving_size(height, width, max_patches=most, **sizes)
        lines, columns = (length // processor.patch_size for length in size)
        return lines * columns // processor.pooling_kernel_size**2

    def process(self, processor, image):
        found = processor(images=[image], return_tensors="pt")
        positions = found["image_position_ids"]
        num_patches = int((positions[0] != -1).all(dim=1).sum())
        return ProcessedImage(
            found["pixel_values"], None, num_patches // self.patches_per_row, {"positions": positions}
        )

    def check(self, image):
        columns, lines = (image.extra["positions"].flatten(0, -2).amax(0) + 1).tolist()
        if max(columns, lines) > (known := self.fields["vision_config"][self.table]):
            raise ValueError(
                f"it becomes {columns} x {lines} patches, and the vision tower knows {known} positions a side: cut it"
            )

    def make_tower(self):
        from transformers import AutoConfig

        sizes = {"hidden_size": self.hidden_size}
        return Gemma4Tower(AutoConfig.for_model(**self.fields | {"audio_config": None}, text_config=sizes))

    def encode(self, tower, images):
        positions = torch.cat([image.extra["positions"] for image in images])
        return tower(torch.cat([image.pixel_values for image in images]), positions)

    def num_patches(self, image):
        return image.pixel_values.shape[1]

    def largest_images(self, num_patches, dtype, device):
        # One alone, because each patch attends to all others of its image, if the tower knows so many positions.
        tower = self.fields["vision_config"]
        kernel = tower["pooling_kernel_size"]
        side = min(isqrt(num_patches), tower["position_embedding_size"]) // kernel * kernel
        at = torch.arange(side * side, device=device)
        pixels = torch.zeros(1, side * side, 3 * tower["patch_size"] ** 2, dtype=dtype, device=device)
        extra = {"positions": torch.stack((at % side, at // side), dim=1).unsqueeze(0)}
        image = ProcessedImage(pixels, None, side * side // self.patches_per_row, extra)
        return [image] * max(1, num_patches // side**2)


class Gemma4UnifiedVision(Gemma4Vision):
    """No tower: a row is a linear map of 48 x 48 pixels, and of where they are in the image."""

    prefixes: ClassVar = {
        "model.vision_embedder.": "vision.",
        "model.embed_vision.embedding_projection.": "vision.multimodal_embedder.embedding_projection.",
        "model.embed_vision.": "vision.",  # as transformers holds all of them in memory
    }
    table = "mm_posemb_size"
    # The family's own does the same, and needs torchvision.
    always_this_processor = True

    def __init__(self, config):
        super().__init__(config)
        self.patches_per_row = 1

    def process(self, processor, image):
        # A pool of 3 x 3 patches is one large patch, whose pixels are in the order of a small one's.
        sizes = {"patch_size": processor.patch_size * processor.pooling_kernel_size, "pooling_kernel_size": 1}
        found = processor(images=[image], return_tensors="pt", **sizes)
        positions = found["image_position_ids"][0]
        num_rows = int((positions != -1).all(dim=1).sum())  # The rest is padding.
        pixels = found["pixel_values"][0, :num_rows]
        return ProcessedImage(pixels, None, num_rows, {"positions": positions[:num_rows]})

    def make_tower(self):
        from transformers import AutoConfig
        from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedVisionEmbedder

        sizes = {"hidden_size": self.hidden_size}
        config = AutoConfig.for_model(**self.fields | {"audio_config": None}, text_config=sizes)
        return Gemma4UnifiedVisionEmbedder(config.vision_config, config.text_config)

    def encode(self, tower, images):
        # Each row is computed alone, so all of them are as one image.
        positions = torch.cat([image.extra["positions"] for image in images])
        pixels = torch.cat([image.pixel_values for image in images])
        return tower(pixels.unsqueeze(0), positions.unsqueeze(0), return_dict=True).pooler_output[0]

    def num_patches(self, image):
        return len(image.pixel_values)

    def largest_images(self, num_patches, dtype, device):
        pixels = torch.zeros(num_patches, self._pixels_per_row(), dtype=dtype, device=device)
        positions = torch.zeros(num_patches, 2, dtype=torch.int64, device=device)
        return [ProcessedImage(pixels, None, num_patches, {"positions": positions})]

    def values_per_patch(self):
        return 2 * self._pixels_per_row() + 4 * self.fields["vision_config"]["mm_embed_dim"]

    def _pixels_per_row(self) -> int:
        tower = self.fields["vision_config"]
        return 3 * (tower["patch_size"] * tower["pooling_kernel_size"]) ** 2


def load_buffers(tower: nn.Module) -> None:
    """Let the loader fill a tower's buffers that checkpoints hold, as it does parameters."""
    for module in tower.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if name not in module._non_persistent_buffers_set:
                delattr(module, name)
                module.register_parameter(name, nn.Parameter(buffer, requires_grad=False))


class Gemma4ForConditionalGeneration(SeeingDecoder, Gemma4ForCausalLM):
    """The same with a vision tower."""

    vision_type = Gemma4Vision


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """The 12B model, whose text model is no other."""


class Gemma4UnifiedForConditionalGeneration(SeeingDecoder, Gemma4UnifiedForCausalLM):
    """The same with images, for which it has no tower. Sound is not read."""

    vision_type = Gemma4UnifiedVision
