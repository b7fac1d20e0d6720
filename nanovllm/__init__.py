"""Offline batch inference for language models: `from nanovllm import LLM, SamplingParams`."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.engine.ranks.workers import WorkerError
    from nanovllm.engine.requests.outputs import EngineStats, RequestOutput, Score, StreamDelta
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = [
    "LLM",
    "EngineStats",
    "RequestOutput",
    "SamplingParams",
    "Score",
    "StreamDelta",
    "StructuredOutputsParams",
    "WorkerError",
]
__version__ = "0.1.0"

_MODULES = {
    "LLM": "nanovllm.llm",
    "SamplingParams": "nanovllm.sampling_params",
    "StructuredOutputsParams": "nanovllm.sampling_params",
    "WorkerError": "nanovllm.engine.ranks.workers",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used, so that `nanovllm --help` does not wait for torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "nanovllm.engine.requests.outputs")), name)
    globals()[name] = value
    return value
