"""What the bits of a deterministic job's answers depend on, beside its requests: a part of the manifest."""

import os
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_128

import nanovllm
from nanovllm import LLM, reads_images
from nanovllm.jobs.fingerprint import differences as files_that_differ
from nanovllm.jobs.fingerprint import engine_fingerprint
from nanovllm.jobs.lines import Row

BITS, ENGINE = "bits", "engine"  # keys of the manifest
_PACKAGES = ("torch", "triton", "numpy")
_PACKAGES_OF_IMAGES = ("transformers", "torchvision", "pillow")
_FILES_OF_IMAGES = ("preprocessor_config.json", "processor_config.json")
_VECTOR_FLAGS = ("avx", "amx", "fma", "sve", "bf16", "asimd", "i8mm")  # in /proc/cpuinfo
_LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "OPENBLAS_CORETYPE")
# What computes: its folders in the package.
_CODE = ("engine", "kernels", "layers", "models")
# Options of an engine on which bits depend, and that a job's call may leave to the model or the machine.
_OPTIONS = (
    *("max_model_len", "tensor_parallel_size", "kv_cache_dtype", "kv_cache_scales", "logprobs_mode"),
    *("dtype", "device", "load_format", "seed", "lora", "tokenizer", "chat_format"),
    *("quantization", "state_dtype", "task", "eos", "revision"),
)


def machine_facts() -> dict[str, str]:
    """What bits depend on that is known before an engine starts."""
    facts = {"nanovllm": nanovllm.__version__, "kernels and tables": _hash_of_code()}
    return facts | {name: _version(name) for name in _PACKAGES} | _processor()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _hash_of_files(directory: str, names: tuple[str, ...]) -> str:
    """Of those that exist."""
    digest = xxh3_128()
    for file in (Path(directory, name) for name in names):
        if file.exists():
            digest.update(f"{file.name}\0".encode() + file.read_bytes())
    return digest.hexdigest()


def bits_depend_on(llm: LLM) -> dict[str, Any]:
    """All that the bits of an engine's answers depend on, apart from the requests."""
    config = llm.config
    facts: dict[str, Any] = machine_facts()
    facts["device"] = "CPU" if config.device == "cpu" else torch.cuda.get_device_name(config.device_index)
    facts["dtype"] = str(config.dtype).removeprefix("torch.")
    facts["ranks"] = config.tensor_parallel_size
    format = config.weight_format
    facts["quantization"] = "none" if format is None else format.kind or format.name
    for name in ("kv_cache_dtype", "kv_cache_scales", "state_dtype"):
        facts[name] = _plain(getattr(config, name))
    if sees(llm):
        facts |= {name: _version(name) for name in _PACKAGES_OF_IMAGES}
        facts["image processor"] = _hash_of_files(config.model, _FILES_OF_IMAGES)
    return facts | {"weights": engine_fingerprint(llm)}


def sees(llm: LLM) -> bool:
    """Whether an engine's prompts may have images."""
    config = llm.config
    return bool(getattr(config.hf_config, "vision", None)) and reads_images(config.model)


def engine_of(llm: LLM) -> Row:
    """Options with which `LLM` makes such an engine again, as JSON."""
    config = llm.config
    options = {name: getattr(config, name) for name in _OPTIONS}
    options = {name: _plain(value) for name, value in options.items()}
    if config.kv_cache_dtype == config.dtype:
        options["kv_cache_dtype"] = "auto"
    elif config.device == "cpu" or config.kv_cache_dtype is not None:
        options["kv_cache_dtype"] = "fp8"
    if config.tokenizer == config.model:
        options["tokenizer"] = None  # which follows the model, if it is elsewhere
    places = {"model": config.hub_id or config.model, "tokenizer": options["tokenizer"], "lora": options["lora"]}
    # Whoever verifies may be in another directory.
    return options | {name: os.path.realpath(at) if at and os.path.isdir(at) else at for name, at in places.items()}


def _plain(value: Any) -> Any:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What differs among such facts, in words; empty if nothing does."""
    differing = []
    for name in dict.fromkeys((*before, *now)):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping) and old != new:
            differing.append(f"{name} are others: {files_that_differ(dict(old), dict(new))}")
        elif old != new:
            before_now = ("not known" if each is None else repr(each) for each in (old, new))
            differing.append(f"{name}: it was {' and is now '.join(before_now)}")
    return "; ".join(differing)


@cache
def _hash_of_code() -> str:
    package = Path(nanovllm.__file__).parent
    digest = xxh3_128()
    for folder in _CODE:
        for path in sorted((package / folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _processor() -> dict[str, str]:
    """The CPU and its vector instructions, by which its libraries choose how they sum. Names alone may be those of a
    virtual machine, which several processors have."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    said: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        said.setdefault(name.strip(), value.strip())
    numbers = [f"{name} {said[name]}" for name in ("cpu family", "model", "stepping") if name in said]
    flags = said.get("flags", said.get("Features", "")).split()
    used = [torch.backends.cpu.get_cpu_capability(), *sorted(flag for flag in flags if flag.startswith(_VECTOR_FLAGS))]
    limits = [f"{name}={os.environ[name]}" for name in _LIMITS if name in os.environ]
    return {
        "processor": ", ".join([said.get("model name") or platform.processor() or platform.machine(), *numbers]),
        "instructions": " ".join([*used, *limits]),
    }
