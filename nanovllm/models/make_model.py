"""make_model: the model of a transformers configuration."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.registry import model_class


def make_model(hf_config, dtype: torch.dtype, device: torch.device, *args) -> DecoderForCausalLM:
    """The model of a transformers configuration, its parameters not filled yet. args: the class's own, after config.
    Raises ValueError for a configuration that we do not have."""
    cls = model_class(hf_config)
    with device, _default_dtype(dtype):
        model = cls(hf_config, *args)
    return model.requires_grad_(False)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """torch.set_default_dtype for a block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
