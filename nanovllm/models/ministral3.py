"""Ministral 3 (arXiv:2601.08584), and the text model of checkpoints with Mistral's vision tower."""

from typing import ClassVar

from nanovllm.models.mistral import MistralForCausalLM
from nanovllm.models.spec import DecoderSpec
from nanovllm.utils.checks import require


class Ministral3ForCausalLM(MistralForCausalLM):
    """Mistral's layers, with queries that grow with the logarithm of their position (`RopeParameters`)."""

    switches = MistralForCausalLM.switches | {"llama_4_scaling_beta"}


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """The text part of a checkpoint that has a vision tower too: Ministral 3, or Mistral Small 3.1 and 3.2."""

    # As transformers 5 and as 4 write it.
    checkpoint_prefixes: ClassVar = {"model.language_model.": "model.", "language_model.": ""}

    @staticmethod
    def spec(config) -> DecoderSpec:
        # Mistral Small 4 has this architecture around latent attention.
        kinds = "mistral", "ministral3"
        require("text_config.model_type", config.model_type, config.model_type in kinds, " or ".join(kinds))
        return Ministral3ForCausalLM.spec(config)
