"""Granite 3 (https://github.com/ibm-granite/granite-3.0-language-models)."""

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.hf_config import rope_of_layers
from nanovllm.models.spec import DecoderSpec


class GraniteForCausalLM(DecoderForCausalLM):
    """Llama with four factors: of the embeddings, of the attention scores, of what a layer adds to the residual stream,
    and, as a divisor, of the logits."""

    switches = frozenset(
        {"attention_bias", "embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}
    )

    @staticmethod
    def spec(config) -> DecoderSpec:
        return DecoderSpec(
            rope_of_layers(config),
            qkv_bias=config.attention_bias,
            o_bias=config.attention_bias,
            embedding_scale=config.embedding_multiplier,
            attention_scale=config.attention_multiplier,
            residual_scale=config.residual_multiplier,
            logit_scale=1 / config.logits_scaling,
        )
