"""Weights of a rank's model: loaded at the start, and overwritten later."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch

from nanovllm.config import Config
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.loader import TensorFacts, load_dummy, load_model, load_tensors
from nanovllm.utils.loader import load_model as load_plain_model

if TYPE_CHECKING:
    from nanovllm.models.loader import LoadedModel


def load_weights(config: Config, model: "LoadedModel", rank: int) -> None:
    if config.load_format == "dummy":
        load_dummy(model, config.seed or 0, rank)
    elif config.plain and config.lora is None:
        load_plain_model(model, config.model)
    else:
        load_model(model, config.model, config.lora)
    if config.device == "cpu":
        model.pack_weights()


def overwrite_weights(
    model: "LoadedModel", tensors: Mapping[str, torch.Tensor | TensorFacts], tp: TensorParallel, device: torch.device
) -> None:
    """Overwrite the parameters that these tensors of a checkpoint stand for, by our names. Rank 0 has the tensors; a
    worker has facts about them, and gets them from rank 0. Addresses stay, so CUDA graphs do too."""
    model.unpack_weights()
    load_tensors(model, _received(tensors, tp, device))
    if device.type == "cpu":
        model.pack_weights()


def _received(
    tensors: Mapping[str, torch.Tensor | TensorFacts], tp: TensorParallel, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor on this rank."""
    for name, given in tensors.items():
        tensor = given if isinstance(given, torch.Tensor) else torch.empty(given.shape, dtype=given.dtype)
        if tp.size > 1:
            tensor = tp.broadcast(tensor.to(device).contiguous())
        yield name, tensor
