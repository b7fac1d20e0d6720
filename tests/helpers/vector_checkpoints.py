"""Tiny random checkpoints that embed, classify and rank, and transformers as the reference of their vectors."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from checkpoints import VOCAB_SIZE, make_tokenizer, randomize
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

# What is read off a random model in float32 may differ by the order of its sums, and no more.
TOLERANCE = 2e-4


def make_pooling_checkpoint(
    directory: str | Path,
    family: str = "qwen3",
    num_labels: int | None = None,
    bias: bool = False,
    tokenizer: bool = False,
    **overrides,
) -> Path:
    """Save a decoder without a head, as embedding models are published; with num_labels one with a head that
    classifies, which may have a bias."""
    fields = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family == "qwen3":
        fields["head_dim"] = 32
    if family == "qwen3_5_text":
        fields |= {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        fields |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16}
        fields["layer_types"] = ["linear_attention", "full_attention"]
    if num_labels is None:
        model = AutoModel.from_config(AutoConfig.for_model(family, **fields | overrides))
    else:
        config = AutoConfig.for_model(family, num_labels=num_labels, **fields | overrides)
        model = AutoModelForSequenceClassification.from_config(config)
        if bias:
            model.score = torch.nn.Linear(model.config.hidden_size, num_labels)
    randomize(model, 0)
    model.save_pretrained(directory)
    if tokenizer:
        make_tokenizer(directory)
    return Path(directory)


def add_sentence_files(directory: Path, flag: str = "pooling_mode_mean_tokens", modules=None, **settings) -> None:
    """The files of sentence-transformers. settings: of config_sentence_transformers.json."""
    kinds = modules or ("Transformer", "Pooling", "Normalize")
    paths = ["" if kind == "Transformer" else f"{i}_{kind}" for i, kind in enumerate(kinds)]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    flags = {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "pooling_mode_max_tokens": False}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(flags | {flag: True}))
    if settings:
        (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))


class VectorReference:
    """The checkpoint's decoder in transformers, float32 on the CPU, one prompt at a time."""

    def __init__(self, path: str | Path):
        self.model = AutoModel.from_pretrained(path).float().eval()

    @torch.inference_mode()
    def hidden_states(self, prompt: list[int]) -> torch.Tensor:
        """float32 [num_tokens, hidden_size], after the final norm."""
        return self.model(torch.tensor([prompt])).last_hidden_state[0]

    def pooled(self, prompt: list[int], pooling: str) -> torch.Tensor:
        hidden = self.hidden_states(prompt)
        return {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[pooling]

    def vectors(self, prompts: Iterable[list[int]], pooling: str) -> list[torch.Tensor]:
        return [self.pooled(prompt, pooling) for prompt in prompts]


@torch.inference_mode()
def reference_logits(path: str | Path, prompts: Iterable[list[int]], bias: bool = False) -> list[torch.Tensor]:
    """What transformers' classification head says of each prompt, float32 [num_labels]."""
    model = AutoModelForSequenceClassification.from_pretrained(path).float().eval()
    if bias:
        from safetensors.torch import load_file

        tensors = load_file(Path(path, "model.safetensors"))
        model.score = torch.nn.Linear(*reversed(tensors["score.weight"].shape))
        model.score.load_state_dict({"weight": tensors["score.weight"], "bias": tensors["score.bias"]})
    return [model(torch.tensor([prompt])).logits[0] for prompt in prompts]
