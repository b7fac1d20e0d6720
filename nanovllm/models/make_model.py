"""make_model, make_plain_model: the model of a transformers configuration."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from nanovllm.layers.backends.backend import AttentionBackend
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.plain import PlainQwen3
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.registry import find_architecture, model_class
from nanovllm.utils.checks import quoted


def make_model(hf_config, dtype: torch.dtype, device: torch.device, *args) -> DecoderForCausalLM:
    """The model of a transformers configuration, its parameters not filled yet. args: the class's own, after config.
    Raises ValueError for a configuration that we do not have."""
    cls = model_class(hf_config)
    with device, _default_dtype(dtype):
        model = cls(hf_config, *args)
    return model.requires_grad_(False)


def make_plain_model(
    hf_config,
    dtype: torch.dtype,
    device: torch.device,
    max_position: int | None = None,
    backend: AttentionBackend | None = None,
    tp: TensorParallel | None = None,
) -> PlainQwen3:
    """The plain model of a transformers configuration, its parameters not filled yet. The other arguments are the
    model's own. Raises ValueError for a configuration that it does not implement."""
    name = find_architecture(getattr(hf_config, "architectures", None), hf_config.model_type)
    if name != Qwen3ForCausalLM.__name__:
        raise ValueError(
            f"plain=True: runs {Qwen3ForCausalLM.__name__} alone, the dense Qwen3, not {name}; use plain=False"
        )
    if quantization := getattr(hf_config, "quantization_config", None):
        raise ValueError(
            f"plain=True: runs unquantized weights alone, but the checkpoint has quantization_config="
            f"{quoted(quantization)}; use plain=False"
        )
    with device, _default_dtype(dtype):
        model = PlainQwen3(hf_config, max_position=max_position, backend=backend, tp=tp)
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
