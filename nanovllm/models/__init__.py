"""The model families: architecture name (config.json) -> class."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


def make_model(hf_config, dtype: torch.dtype, device: torch.device, *args) -> nn.Module:
    """The model of a transformers configuration, its parameters not filled yet. args: the class's own, after config.
    Raises ValueError for a configuration that we do not have."""
    cls = model_class(hf_config)
    with device, _default_dtype(dtype):
        model = cls(hf_config, *args)
    return model.requires_grad_(False)


def model_class(hf_config, where: str = "config.json") -> type[nn.Module]:
    """The class that implements a transformers configuration. Raises ValueError, naming `where` the configuration comes
    from, for one that we do not have."""
    from nanovllm.models.qwen2 import Qwen2ForCausalLM
    from nanovllm.models.qwen3 import Qwen3ForCausalLM

    classes = {"Qwen3ForCausalLM": Qwen3ForCausalLM, "Qwen2ForCausalLM": Qwen2ForCausalLM}
    names = list(getattr(hf_config, "architectures", None) or [])
    for name in names:
        if name in classes:
            return classes[name]
    raise ValueError(
        f"{where}: architectures={names or None} (model_type {hf_config.model_type!r}): "
        f"supported are {', '.join(classes)}"
    )


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch.set_default_dtype for a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
