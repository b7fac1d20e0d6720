"""Offline batch inference for Qwen3: `from nanovllm import LLM, SamplingParams`."""

from nanovllm.engine.llm_engine import RequestOutput
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

__all__ = ["LLM", "RequestOutput", "SamplingParams", "StructuredOutputsParams"]
__version__ = "0.1.0"
