"""Offline batch inference for Qwen3: `from nanovllm import LLM, SamplingParams`."""

from nanovllm.engine.llm_engine import RequestOutput
from nanovllm.engine.workers import WorkerError
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams", "WorkerError"]
__version__ = "0.1.0"
