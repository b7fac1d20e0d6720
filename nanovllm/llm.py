"""LLM: the facade that users import."""

from nanovllm.engine.llm_engine import LLMEngine


class LLM(LLMEngine):
    """Offline batch inference: `LLM(model).generate(prompts, sampling_params)`. All of it is LLMEngine's."""
