"""The fingerprint of a model's files: does a resumed job still have its model?

It is a hash of each file. All bytes are hashed, except in files of weights: their size, header, and a sample of each
tensor.
"""

import json
import os
from fnmatch import fnmatch
from pathlib import Path
from typing import BinaryIO

from xxhash import xxh3_128, xxh3_128_hexdigest

from nanovllm import LLM
from nanovllm.jobs.arguments import Arguments

# Files on which answers depend, apart from weights. A directory may hold others, such as a training's records.
_WHOLE_FILES = (
    *("config.json", "generation_config.json", "hf_quant_config.json", "*.safetensors.index.json"),
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt"),
    *("merges.txt", "chat_template.*", "additional_chat_templates/*.jinja"),
    *("modules.json", "config_sentence_transformers.json", "*_Pooling/config.json"),
)
_WEIGHTS = ("*.safetensors",)
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_MAX_HEADER = 1 << 28
_SAMPLE = 1024  # bytes of each tensor
_NUM_SAMPLES = 256  # of a file whose tensors are unknown

Fingerprint = dict[str, str]  # a hash for each file, by its name in the directory


def engine_fingerprint(llm: LLM) -> Fingerprint:
    config = llm.config
    names = config.model, config.tokenizer, config.lora
    model, tokenizer, lora = (None if name is None else Path(name) for name in names)
    return _fingerprint(model, tokenizer, lora, config.load_format != "dummy")


def job_fingerprint(arguments: Arguments) -> Fingerprint | None:
    """The fingerprint of a job's model, before its engine starts. None if this machine does not have the files, or if
    they may change before the engine starts, as those of a hub id may."""
    if isinstance(arguments.model, LLM):
        return engine_fingerprint(arguments.model)
    has_weights = arguments.engine_options.get("load_format") != "dummy"
    model, tokenizer = _directory(arguments.model_name), _directory(arguments.tokenizer)
    name = arguments.engine_options.get("lora")
    lora = None if name is None else _directory(str(name))
    is_unknown = None in (model, tokenizer) or (lora is None and name is not None)
    return None if has_weights and is_unknown else _fingerprint(model, tokenizer, lora, has_weights)


def _directory(name: str) -> Path | None:
    """None for a hub id."""
    path = os.path.expanduser(name)
    return Path(path) if os.path.isdir(path) else None


def _fingerprint(model: Path | None, tokenizer: Path | None, lora: Path | None, has_weights: bool) -> Fingerprint:
    """Directories; None, or one that is not there, for a published shape, which has no files. lora: None for no
    adapter."""
    found: Fingerprint = {}
    if model is not None and model.is_dir():
        found |= {name: xxh3_128_hexdigest((model / name).read_bytes()) for name in _names(model, _WHOLE_FILES)}
        found |= {name: _hash_weights(model / name) for name in _names(model, _WEIGHTS) if has_weights}
    if lora is not None:
        found |= {
            f"the adapter's {name}": xxh3_128_hexdigest((lora / name).read_bytes()) for name in _names(lora, _ADAPTER)
        }
    if tokenizer is None or not tokenizer.is_dir():
        return found
    if model is None or not found or not os.path.samefile(tokenizer, model):
        names = _names(tokenizer, _WHOLE_FILES)
        found |= {f"the tokenizer's {name}": xxh3_128_hexdigest((tokenizer / name).read_bytes()) for name in names}
    return found


def differences(before: Fingerprint, now: Fingerprint) -> str:
    """What differs, in words; empty if nothing does."""
    changed = [name for name in now if name in before and now[name] != before[name]]
    new = [f"{name} is new" for name in now if name not in before]
    gone = [f"{name} is gone" for name in before if name not in now]
    return ", ".join([f"{name} differs" for name in changed] + new + gone)


def _names(directory: Path, patterns: tuple[str, ...]) -> list[str]:
    inner = (*directory.glob("*/*.jinja"), *directory.glob("*/config.json"))
    files = filter(Path.is_file, (*directory.glob("*"), *inner))
    names = (file.relative_to(directory).as_posix() for file in files)
    return sorted(name for name in names if any(fnmatch(name, pattern) for pattern in patterns))


def _hash_weights(path: Path) -> str:
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        header = _read_header(file, size)
        digest = xxh3_128(str(size).encode() + header)
        for start in _samples(header, size):
            file.seek(start)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def _read_header(file: BinaryIO, size: int) -> bytes:
    """The header of a safetensors file; empty for any other file."""
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    return file.read(length) if length <= min(_MAX_HEADER, size - 8) else b""


def _samples(header: bytes, size: int) -> list[int]:
    """Where samples begin: in the middle of each tensor, or evenly over a file of which no tensors are known."""
    try:
        tensors = [entry["data_offsets"] for name, entry in json.loads(header).items() if name != "__metadata__"]
        return [8 + len(header) + max(first, (first + last - _SAMPLE) // 2) for first, last in tensors]
    except (AttributeError, KeyError, TypeError, ValueError):
        return list(range(0, size, max(_SAMPLE, size // _NUM_SAMPLES)))
