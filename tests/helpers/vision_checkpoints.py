"""Tiny random checkpoints with vision towers, images for them, and transformers' completions of prompts with images."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from checkpoints import VOCAB_SIZE, edit_json, edit_tensors, has_transformers, make_tokenizer, random_prompt, randomize
from transformers import AutoConfig, AutoModelForImageTextToText

from nanovllm import SamplingParams

IMAGE, BEGIN, END, VIDEO = 310, 311, 312, 313  # token ids
MARK = "<|image_pad|>"
_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)

_TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
_QWEN_TOWER = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 64,
    "num_position_embeddings": 64,
}
_QWEN_TOKENS = {"image_token_id": IMAGE, "vision_start_token_id": BEGIN, "vision_end_token_id": END}
_QWEN_TOKENS |= {"video_token_id": VIDEO}


class VisionFamily(NamedTuple):
    """A row.

    Attributes:
        architecture: the name in config.json.
        text, vision, fields: of the configuration.
        processor: transformers' image processor and its options.
    """

    architecture: str
    text: dict[str, Any]
    vision: dict[str, Any]
    fields: dict[str, Any]
    processor: tuple[str, dict[str, Any]]


_QWEN_PROCESSOR = "Qwen2VLImageProcessorPil", {"patch_size": 8, "min_pixels": 256, "max_pixels": 16384}
_QWEN3_5_TEXT = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
    "head_dim": 32,  # of which RoPE turns a half
    "rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": [4, 2, 2]},
}
_GEMMA3_TEXT = {
    **{"sliding_window": 13, "sliding_window_pattern": 2, "rope_theta": 700.0, "rope_local_base_freq": 30.0},
    **{"query_pre_attn_scalar": 50, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
_SIGLIP = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": 64, "patch_size": 8, "vision_use_head": False},
}
_GEMMA4_TEXT = {
    **{"sliding_window": 13, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 32},
    **{"layer_types": ["sliding_attention", "sliding_attention", "full_attention"], "attention_k_eq_v": True},
    **{"num_global_key_value_heads": 1, "use_bidirectional_attention": "vision"},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0},
}
_GEMMA4_TOWER = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2},
    **{"position_embedding_size": 64, "standardize": True},
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Of 8 pairs of dimensions, time has 4.
_QWEN3_VL_TEXT = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]}}
VISION_FAMILIES = {
    "qwen3_vl": VisionFamily(
        "Qwen3VLForConditionalGeneration",
        _QWEN3_VL_TEXT,
        _QWEN_TOWER | {"deepstack_visual_indexes": [0, 1]},
        _QWEN_TOKENS,
        _QWEN_PROCESSOR,
    ),
    "qwen3_vl_moe": VisionFamily(
        "Qwen3VLMoeForConditionalGeneration",
        # The second of the two layers that images also add to has no experts. No matrix of them is square, because
        # transformers would not know then whether it is transposed.
        _QWEN3_VL_TEXT | _EXPERTS | {"moe_intermediate_size": 48, "mlp_only_layers": [1]},
        _QWEN_TOWER | {"deepstack_visual_indexes": [0, 1]},
        _QWEN_TOKENS,
        _QWEN_PROCESSOR,
    ),
    "qwen3_5": VisionFamily(
        "Qwen3_5ForConditionalGeneration",
        _QWEN3_5_TEXT,
        _QWEN_TOWER,
        _QWEN_TOKENS,
        _QWEN_PROCESSOR,
    ),
    "gemma3": VisionFamily(
        "Gemma3ForConditionalGeneration",
        _GEMMA3_TEXT,
        _SIGLIP,
        {"image_token_index": IMAGE, "boi_token_index": BEGIN, "eoi_token_index": END, "mm_tokens_per_image": 16},
        ("Gemma3ImageProcessorPil", {"size": {"height": 64, "width": 64}}),
    ),
    "gemma4": VisionFamily(
        "Gemma4ForConditionalGeneration",
        _GEMMA4_TEXT,
        _GEMMA4_TOWER,
        {"image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": END, "audio_config": None},
        ("Gemma4ImageProcessorPil", {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 2}),
    ),
    "gemma4_unified": VisionFamily(
        "Gemma4UnifiedForConditionalGeneration",
        _GEMMA4_TEXT,
        {"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 64},
        {"image_token_id": IMAGE, "boi_token_id": BEGIN, "eoi_token_id": END, "audio_config": None},
        ("Gemma4ImageProcessorPil", {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 2}),
    ),
    "qwen3_5_moe": VisionFamily(
        "Qwen3_5MoeForConditionalGeneration",
        _QWEN3_5_TEXT | _EXPERTS | {"shared_expert_intermediate_size": 48},
        _QWEN_TOWER,
        _QWEN_TOKENS,
        _QWEN_PROCESSOR,
    ),
}


def make_vision_checkpoint(directory: Path, family: str, seed: int = 0, **text: Any) -> Path:
    """text: more fields of the text model."""
    row = VISION_FAMILIES[family]
    fields = _TEXT | row.text | text
    vision = row.vision | ({"out_hidden_size": fields["hidden_size"]} if "out_hidden_size" in row.vision else {})
    parts = {"text_config": fields, "vision_config": vision}
    config = AutoConfig.for_model(family, **parts, **row.fields, tie_word_embeddings=False)
    model = AutoModelForImageTextToText.from_config(config)
    randomize(model, seed)
    for name, buffer in model.named_buffers():
        if name.endswith((".std_bias", ".std_scale")):  # of Gemma 4's tower
            buffer.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(seed))
    model.save_pretrained(directory)
    if family == "qwen3_vl_moe":
        edit_tensors(directory, lambda tensors: turn_experts(tensors, True, fields["hidden_size"]))
    name, options = row.processor
    getattr(transformers, name)(**options).save_pretrained(directory)
    if family == "gemma4_unified":  # whose own needs torchvision
        edit_json(directory / "preprocessor_config.json", image_processor_type="Gemma4UnifiedImageProcessor")
    return directory


def make_image_tokenizer(directory: Path) -> None:
    """One for texts around images, with the tokens and the chat template of Qwen3-VL."""
    make_tokenizer(directory, chat_template=_TEMPLATE)
    # The tokens of images have ids beyond those of texts.
    file = Path(directory, "tokenizer.json")
    content = json.loads(file.read_text())
    known = {token["id"] for token in content["added_tokens"]}
    names = {BEGIN: "<|vision_start|>", END: "<|vision_end|>", IMAGE: MARK}
    for token_id in range(max(content["model"]["vocab"].values()) + 1, max(names) + 1):
        name = names.get(token_id, f"<|unused-{token_id}|>")
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        assert token_id not in known
        content["added_tokens"].append({"id": token_id, "content": name, "special": True} | flags)
    file.write_text(json.dumps(content))


def turn_experts(tensors: dict[str, torch.Tensor], as_published: bool, hidden_size: int = _TEXT["hidden_size"]) -> None:
    """Write Qwen3-VL's experts transposed, as they are published, or as transformers 5 holds them in memory and saves
    them."""
    for name, tensor in tensors.items():
        hidden_dim = {"gate_up_proj": 2, "down_proj": 1}.get(name.rpartition(".experts.")[2])
        if hidden_dim and (tensor.shape[hidden_dim] == hidden_size) == as_published:
            tensors[name] = tensor.transpose(1, 2).contiguous()


def draw_image(width: int, height: int, seed: int) -> Any:
    """Of random pixels."""
    from PIL import Image

    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8))


def joined_patches(found: Any) -> dict[str, Any]:
    """What Gemma 4's image processor gives, with a patch in the place of 2 x 2 of them, as the unified model reads
    it."""
    each = []
    for patches, at in zip(found["pixel_values"], found["image_position_ids"], strict=True):
        columns, lines = (at.amax(0) + 1).tolist()
        side = round((patches.shape[1] / 3) ** 0.5)
        image = (
            patches[: lines * columns].view(lines, columns, side, side, 3).transpose(1, 2).flatten(2, 3).flatten(0, 1)
        )
        tiles = [
            image[y : y + 2 * side, x : x + 2 * side]
            for y in range(0, len(image), 2 * side)
            for x in range(0, image.shape[1], 2 * side)
        ]
        places = [(x, y) for y in range(lines // 2) for x in range(columns // 2)]
        each.append((torch.stack(tiles).flatten(1), torch.tensor(places)))
    pad = torch.nn.utils.rnn.pad_sequence
    pixels, places = zip(*each, strict=True)
    return {
        "pixel_values": pad(pixels, batch_first=True),
        "image_position_ids": pad(places, batch_first=True, padding_value=-1),
        "num_soft_tokens_per_image": [len(place) for place in places],
    }


def image_requests() -> list[tuple[dict, SamplingParams]]:
    """Prompts for tests of bits. The first ends with an image. Two begin alike with one, in the middle of which a block
    ends. A small one is in two. Of the last prompt, all rows have logits."""
    sizes = ((48, 48), (128, 128), (128, 48), (16, 32))
    images, requests = [draw_image(*size, seed=i) for i, size in enumerate(sizes)], []
    prompts: tuple[tuple[int, ...], ...] = ((0,), (2, 3), (), (1,), (3,), (0, 2))
    for number, chosen in enumerate(prompts):
        tokens = random_prompt(9, 99, 300)
        for _ in chosen:
            tokens += [BEGIN, IMAGE, END, *random_prompt(3 * number, number, 300)]
        tokens = tokens if number else tokens[:-1]
        more: dict[str, Any] = {"prompt_logprobs": 0} if number == len(prompts) - 1 else {}
        params = SamplingParams(number % 2, 20, ignore_eos=True, seed=number, logprobs=0, **more)
        requests.append(({"prompt": tokens, "images": [images[i] for i in chosen]}, params))
    return requests


class VisionReference:
    """The checkpoint in transformers, float32 on the CPU, one prompt at a time, and its image processor."""

    def __init__(self, path: Path):
        self.model = AutoModelForImageTextToText.from_pretrained(path).float().eval()
        self._is_unified = self.model.config.model_type == "gemma4_unified"
        if self._is_unified and not has_transformers("5.23"):
            pytest.skip("before transformers 5.23 a static cache does not limit the attention of this family's images")
        auto = transformers.AutoImageProcessor
        self._processor = (transformers.Gemma4ImageProcessorPil if self._is_unified else auto).from_pretrained(path)
        self._known: dict[tuple, tuple[list[int], float]] = {}

    @torch.inference_mode()
    def generate(self, prompt: dict, max_tokens: int) -> tuple[list[int], float]:
        """The greedy completion, and the smallest margin by which a token of it won."""
        images, key = prompt["images"], (tuple(prompt["prompt"]), *map(id, prompt["images"]), max_tokens)
        if key in self._known:
            return self._known[key]
        given: dict[str, Any] = {}
        token_ids = prompt["prompt"]
        if images:
            found = self._processor(images=images, return_tensors="pt")
            given = joined_patches(found) if self._is_unified else dict(found)
            if "image_grid_thw" in found:
                counts = iter((found["image_grid_thw"].prod(1) // 4).tolist())
            else:
                counts = iter(given.pop("num_soft_tokens_per_image", [16] * len(images)))
            token_ids = [x for token in token_ids for x in [token] * (next(counts) if token == IMAGE else 1)]
            given.pop("num_crops", None)
            is_gemma3 = self.model.config.model_type == "gemma3"
            given["token_type_ids" if is_gemma3 else "mm_token_type_ids"] = (torch.tensor([token_ids]) == IMAGE).int()
        if self._is_unified:
            # With a static cache transformers lets images attend to themselves as it does in the other Gemma 4: in
            # layers with a window alone, and within it. With any other cache it forgets both limits.
            given["cache_implementation"] = "static"
        out = self.model.generate(
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **given,
        )
        first, second = torch.cat(out.logits).topk(2).values.unbind(-1)
        self._known[key] = out.sequences[0, len(token_ids) :].tolist(), (first - second).min().item()
        return self._known[key]

    def greedy(self, prompts: list[dict], max_tokens: int) -> list[list[int]]:
        return [self.generate(prompt, max_tokens)[0] for prompt in prompts]

    def draw_prompt(self, images: list, max_tokens: int, num_texts: int = 6, seed: int = 0) -> dict:
        """Texts of a few tokens around the images, whose greedy completion is never won by less than 1e-3: far more
        than float32 sums can differ by."""
        for attempt in range(100):
            rng = random.Random(f"{seed} {attempt}")
            tokens = random_prompt(num_texts, rng.randrange(10**6), 300)
            for _ in images:
                tokens += [BEGIN, IMAGE, END, *random_prompt(num_texts, rng.randrange(10**6), 300)]
            prompt = {"prompt": tokens, "images": images}
            if self.generate(prompt, max_tokens)[1] >= 1e-3:
                return prompt
        raise AssertionError("no prompt has a clear completion")
