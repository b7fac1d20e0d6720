"""LoRA adapters in PEFT's layout, written without PEFT, and what they make of a checkpoint, in plain torch."""

import json
import shutil
from pathlib import Path

import torch
from checkpoints import edit_tensors
from safetensors.torch import load_file, save_file

PREFIX = "base_model.model."
QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*QKVO, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: str | Path, checkpoint: str | Path, targets: tuple[str, ...] = LINEAR, r: int = 4, seed: int = 0, **config
) -> Path:
    """One for the modules of a checkpoint with these last names. Products are exact in float32, in any order."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, weight in load_file(Path(checkpoint, "model.safetensors")).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in targets:
            for kind, shape in {"A": (r, weight.shape[1]), "B": (weight.shape[0], r)}.items():
                values = torch.randint(-2, 3, shape, generator=generator) / 8
                tensors[f"{PREFIX}{module}.lora_{kind}.weight"] = values
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": r, "lora_alpha": 2 * r, "base_model_name_or_path": str(checkpoint)} | config
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def edit_adapter(folder: Path, edit) -> None:
    """Rewrite its tensors after `edit` has changed their {name: tensor} in place."""
    tensors = load_file(folder / "adapter_model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def merged_copy(folder: str | Path, checkpoint: str | Path, adapter: Path, scaling: float = 2.0) -> Path:
    """A copy of the checkpoint whose weights are W + scaling * B A, with the adapter's other tensors in place of its
    own."""
    shutil.copytree(checkpoint, folder)
    found = load_file(adapter / "adapter_model.safetensors")

    def merge(tensors):
        for name, value in found.items():
            name = name.removeprefix(PREFIX)
            if name.endswith(".lora_A.weight"):
                module = name.removesuffix(".lora_A.weight")
                weight, product = tensors[f"{module}.weight"], found[f"{PREFIX}{module}.lora_B.weight"] @ value
                tensors[f"{module}.weight"] = (weight.float() + scaling * product).to(weight.dtype)
            elif ".lora_" not in name:
                tensors[name] = value

    edit_tensors(folder, merge)
    return Path(folder)
