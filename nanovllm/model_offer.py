"""What `nanovllm chat NAME` offers where NAME is no folder: a model of the hub, with what it needs."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nanovllm.fit import Question, advice, cpu_place, gpu_place
from nanovllm.models.presets import meant_chat_model
from nanovllm.utils.checks import quoted
from nanovllm.utils.units import GIB

_SPARE_DISK = GIB // 4


class Offer(NamedTuple):
    """A model of the hub, on this machine.

    Attributes:
        hub_id: what LLM takes.
        folder: where the hub's files are kept.
        download, disk: bytes of the model's files, and those that are free there.
        memory: bytes that it takes beside its KV cache.
        place: where it would run, with the memory there.
        helps: options with which it fits; None if it does as it is.
    """

    hub_id: str
    folder: str
    download: int
    disk: int
    memory: int
    place: str
    helps: str | None

    def __str__(self) -> str:
        lines = [
            f"There is no such folder. {self.hub_id} is on the hub:",
            f"  download  about {self.download / GIB:.1f} GiB to {self.folder} ({self.disk / GIB:.1f} GiB free)",
            f"  memory    about {self.memory / GIB:.1f} GiB and the KV cache, on {self.place}",
        ]
        if self.disk < self.download + _SPARE_DISK:
            lines.append("  The disk has no room for it. The variable HF_HUB_CACHE names another folder.")
        if self.helps is not None:
            lines.append(f"  It does not fit this memory. What makes it fit: {self.helps}")
        return "\n".join(lines)


def hub_model(model: str, ask: Callable[[str], str] | None, tell: Callable[[str], None], **options: Any) -> str | None:
    """What LLM takes for a name that is no folder: the name itself, or the hub id of a model to talk to that it means.

    Args:
        ask: asks a question, as input() does; None if no one can answer.
        tell: says something to a person.
        options: as LLM takes them.

    Returns:
        None if the download was declined.

    Raises FileNotFoundError, with the hub id, if no one can answer, and with similar names for a mistyped one.
    """
    found = meant_chat_model(model)
    if found is None:
        return model
    hub_id, preset = found
    if model != hub_id and is_downloaded(hub_id, options.get("revision")):
        tell(f"{hub_id} is on the disk already.")
        return hub_id
    if model == hub_id:
        return model
    if ask is None:
        raise FileNotFoundError(f"model={quoted(model)}: no such directory; on the hub it is {hub_id}")
    tell(str(make_offer(hub_id, preset, **options)))
    return hub_id if ask("Download it and start? [y/N] ").strip().lower() in ("y", "yes") else None


def make_offer(hub_id: str, preset: str, **options: Any) -> Offer:
    """From its shape alone. options: as LLM takes them. Raises ValueError and TypeError as LLM."""
    from huggingface_hub.constants import HF_HUB_CACHE

    options = {name: value for name, value in options.items() if name not in ("revision", "tokenizer", "lora")}
    question = Question(preset, **options)
    place = cpu_place() if options.get("device") == "cpu" or not torch.cuda.is_available() else gpu_place()
    needed = question.needs(place.is_cpu)
    helps = None if question.fit(place).num_sequences else advice(question, place).replace("\xa0", " ")
    download = Question(preset, max_model_len=2).needs().weights
    disk = shutil.disk_usage(_existing(Path(HF_HUB_CACHE))).free
    where = place.name if place.is_cpu else f"{place.name} ({place.memory / GIB:.1f} GiB)"
    folder = HF_HUB_CACHE.replace(str(Path.home()), "~", 1)
    return Offer(hub_id, folder, download, disk, needed.weights + needed.activations, where, helps)


def is_downloaded(hub_id: str, revision: str | None = None) -> bool:
    """Whether the hub's folder on this disk has a model's configuration and all its weights."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(hub_id, "config.json", revision=revision)
    if not isinstance(config, str):
        return False
    folder = Path(config).parent
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
        files = set(index["weight_map"].values())
    except (OSError, ValueError, LookupError):
        files = {"model.safetensors"}
    return all((folder / file).exists() for file in files)


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if os.path.exists(each))
