"""Qwen2 and Qwen2.5 (arXiv:2407.10671)."""

from nanovllm.models.decoder import DecoderForCausalLM, DecoderSpec


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Biases on q, k and v alone, no norm on their heads."""

    packed_modules_mapping = {  # noqa: RUF012
        "qkv_proj": {"q_proj": "q", "k_proj": "k", "v_proj": "v"},
        "gate_up_proj": {"gate_proj": 0, "up_proj": 1},
    }

    @staticmethod
    def spec(config) -> DecoderSpec:
        return DecoderSpec(qkv_bias=True)
