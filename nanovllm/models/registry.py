"""The architectures that we have, by the names that config.json gives them."""

import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nanovllm.models.heads import generating_name
from nanovllm.models.vision import VisionSpec
from nanovllm.utils.checks import quoted
from nanovllm.utils.pages import page

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# Name -> the module that has a class of this name. A family is imported when a model asks for it.
ARCHITECTURES = {
    "Exaone4ForCausalLM": "nanovllm.models.exaone4",
    "Gemma3ForCausalLM": "nanovllm.models.gemma3",
    "Gemma3ForConditionalGeneration": "nanovllm.models.gemma3",
    "Gemma4ForCausalLM": "nanovllm.models.gemma4",
    "Gemma4ForConditionalGeneration": "nanovllm.models.gemma4",
    "Gemma4UnifiedForCausalLM": "nanovllm.models.gemma4",
    "Gemma4UnifiedForConditionalGeneration": "nanovllm.models.gemma4",
    "GptOssForCausalLM": "nanovllm.models.gpt_oss",
    "GraniteForCausalLM": "nanovllm.models.granite",
    "LlamaForCausalLM": "nanovllm.models.llama",
    "Ministral3ForCausalLM": "nanovllm.models.ministral3",
    "Mistral3ForConditionalGeneration": "nanovllm.models.ministral3",
    "MistralForCausalLM": "nanovllm.models.mistral",
    "Olmo2ForCausalLM": "nanovllm.models.olmo2",
    "Olmo3ForCausalLM": "nanovllm.models.olmo3",
    "Phi3ForCausalLM": "nanovllm.models.phi3",
    "Qwen2ForCausalLM": "nanovllm.models.qwen2",
    "Qwen3ForCausalLM": "nanovllm.models.qwen3_decoder",
    "Qwen3MoeForCausalLM": "nanovllm.models.qwen3_moe",
    "Qwen3NextForCausalLM": "nanovllm.models.qwen3_next",
    "Qwen3VLForConditionalGeneration": "nanovllm.models.qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "nanovllm.models.qwen3_vl_moe",
    "Qwen3_5ForCausalLM": "nanovllm.models.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "nanovllm.models.qwen3_5",
    "Qwen3_5MoeForCausalLM": "nanovllm.models.qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "nanovllm.models.qwen3_5_moe",
    "SeedOssForCausalLM": "nanovllm.models.seed_oss",
    "SmolLM3ForCausalLM": "nanovllm.models.smollm3",
}


def find_architecture(architectures: list[str] | None, model_type: str | None, where: str = "config.json") -> str:
    """The first of these architectures that we have, by the name of what generates with the same decoder. Raises
    ValueError, naming `where` they come from, if there is none."""
    for name in architectures or []:
        if generating_name(name) in ARCHITECTURES:
            return generating_name(name)
        if name.endswith("ForTokenClassification"):
            raise ValueError(
                f"{where}: architectures={architectures}: models that label each token are not supported; those that "
                "label a whole text are (...ForSequenceClassification)"
            )
    given = f"{where}: architectures={architectures or None} (model_type {quoted(model_type)}): "
    if not architectures and (meant := _of_model_type(model_type)):
        raise ValueError(f'{given}is missing; write "architectures": ["{meant}"], if the weights are of that model')
    families = dict.fromkeys(re.sub("For(CausalLM|ConditionalGeneration)$", "", name) for name in ARCHITECTURES)
    raise ValueError(f"{given}supported are {', '.join(families)}; {page('adding-a-model.md')} says how to add one")


def _of_model_type(model_type: str | None) -> str | None:
    """The architecture whose name is a model_type, such as "qwen3_moe", in other letters."""
    spelled = f"{model_type}ForCausalLM".replace("_", "").lower()
    return next((name for name in ARCHITECTURES if name.replace("_", "").lower() == spelled), None)


def model_class(hf_config: "PreTrainedConfig") -> Any:
    """The class that implements a transformers configuration. Raises ValueError for one that we do not have."""
    name = find_architecture(getattr(hf_config, "architectures", None), hf_config.model_type)
    return getattr(import_module(ARCHITECTURES[name]), name)


def find_vision(hf_config: "PreTrainedConfig") -> VisionSpec | None:
    """How a model's images become rows of embeddings; None if it has no vision tower, or none that we have."""
    if not getattr(hf_config, "vision", None):
        return None
    family = model_class(hf_config)
    return family.vision_type(hf_config) if hasattr(family, "vision_type") else None
