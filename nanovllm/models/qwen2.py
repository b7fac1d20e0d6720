"""Qwen2 (arXiv:2407.10671): Qwen3's decoder with two switches."""

from nanovllm.models.qwen3 import Qwen3ForCausalLM


class Qwen2ForCausalLM(Qwen3ForCausalLM):
    """Qwen2 and Qwen2.5: biases on q, k and v alone, no norm on their heads."""

    @staticmethod
    def attention_switches(config) -> dict[str, bool]:
        return {"qkv_bias": True, "o_bias": False, "qk_norm": False}
