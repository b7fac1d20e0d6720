"""Offline batch inference for Qwen3: `from nanovllm import LLM, SamplingParams`."""

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
