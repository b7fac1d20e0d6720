"""The model families: architecture name (config.json) -> class."""

from torch import nn


def model_class(hf_config) -> type[nn.Module]:
    """The class that implements a transformers configuration. Raises ValueError for one that we do not have."""
    from nanovllm.models.qwen3 import Qwen2ForCausalLM, Qwen3ForCausalLM

    classes = {"Qwen3ForCausalLM": Qwen3ForCausalLM, "Qwen2ForCausalLM": Qwen2ForCausalLM}
    names = list(getattr(hf_config, "architectures", None) or [])
    for name in names:
        if name in classes:
            return classes[name]
    raise ValueError(
        f"architectures={names or None} (model_type {hf_config.model_type!r}) in config.json: "
        f"supported are {', '.join(classes)}"
    )
