"""What the bits of a deterministic job's answers depend on, beside its requests: a part of the manifest."""

import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_128

import nanovllm
from nanovllm import LLM
from nanovllm.jobs.fingerprint import differences as files_that_differ
from nanovllm.jobs.fingerprint import engine_fingerprint
from nanovllm.jobs.lines import Row

BITS, ENGINE = "bits", "engine"  # keys of the manifest
_PACKAGES = ("torch", "triton", "numpy")
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
    for name in _PACKAGES:
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "none"
    return facts | {"processor": _processor()}


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
    return facts | {"weights": engine_fingerprint(llm)}


def engine_of(llm: LLM) -> Row:
    """Options with which `LLM` makes such an engine again, as JSON."""
    config = llm.config
    options = {name: getattr(config, name) for name in _OPTIONS}
    options = {name: _plain(value) for name, value in options.items()}
    if config.kv_cache_dtype == config.dtype:
        options["kv_cache_dtype"] = "auto"
    elif config.device == "cpu" or config.kv_cache_dtype is not None:
        options["kv_cache_dtype"] = "fp8"
    return {"model": config.hub_id or config.model} | options


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
            differing.append(f"{name}: it was {old!r} and is now {new!r}")
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


def _processor() -> str:
    """The name of the CPU's model, which decides what its libraries compute with."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
