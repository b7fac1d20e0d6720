"""What a file or folder holds that is no transformers checkpoint with safetensors, and what to do with it."""

import json
from pathlib import Path

_CONVERT = "AutoModelForCausalLM.from_pretrained({}).save_pretrained(NEW_FOLDER)"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def other_format(directory: str | Path) -> str:
    """The end of a message: "; " and what the directory seems to be and what to do with it. "" if nothing is known."""
    for describe in (_adapter, _embedding_model, _some_gguf, _pipeline, _inner_folder, _pickles, _original):
        if sentence := describe(Path(directory)):
            return f"; {sentence}"
    return ""


def describe_gguf(folder: Path, name: str) -> str:
    """What to do with a GGUF file, for a message."""
    load = _CONVERT.format(f"{str(folder)!r}, gguf_file={name!r}")
    return (
        f"{name} is a GGUF file, which llama.cpp reads: use the model's transformers checkpoint, or make one, with "
        f"`pip install gguf`: {load}, and the same with AutoTokenizer"
    )


def _some_gguf(folder: Path) -> str | None:
    names = _names(folder, "*.gguf")
    if names:
        return describe_gguf(folder, names[0])
    if "gguf" in str(folder).lower() and not _names(folder, "*.safetensors"):  # Of a hub id no such file is fetched.
        return "its name says GGUF, which llama.cpp reads: use the model's transformers checkpoint"
    return None


def _adapter(folder: Path) -> str | None:
    if not (file := folder / "adapter_config.json").is_file():
        return None
    base = _read(file).get("base_model_name_or_path")
    return (
        f"it is a PEFT adapter of {base or 'a model'}, not a model: "
        f"LLM({str(base or 'MODEL')!r}, lora={str(folder)!r}), or on the command line --lora, merges it while loading"
    )


def _embedding_model(folder: Path) -> str | None:
    if not (folder / "modules.json").is_file():
        return None
    return "modules.json says that it is a sentence-transformers model, which embeds texts; nanovllm generates texts"


def _pickles(folder: Path) -> str | None:
    names = _names(folder, *_PICKLES)
    if not names or not (folder / "config.json").is_file() or _names(folder, "*.safetensors"):
        return None
    return (
        f"{names[0]} is a pickle, which can run any code and is never opened. If you trust its author, convert it: "
        + _CONVERT.format(repr(str(folder)))
    )


def _original(folder: Path) -> str | None:
    if not (folder / "params.json").is_file():
        return None
    return "params.json says that it is in its publisher's own format: use the model's transformers checkpoint"


def _pipeline(folder: Path) -> str | None:
    is_pipeline = (folder / "model_index.json").is_file()
    return "model_index.json says that it is a pipeline of diffusers, which makes images" if is_pipeline else None


def _inner_folder(folder: Path) -> str | None:
    """Says in which folder inside the model is, as in the hub's cache."""
    if (folder / "config.json").is_file():
        return None
    found = sorted(file.parent for pattern in ("*", "snapshots/*") for file in folder.glob(f"{pattern}/config.json"))
    return f"the model is in a folder of it: {found[-1]}" if found else None


def _names(folder: Path, *patterns: str) -> list[str]:
    return sorted(file.name for pattern in patterns for file in folder.glob(pattern))


def _read(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
