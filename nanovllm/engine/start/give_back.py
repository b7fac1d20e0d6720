"""The end of an engine, or of a start that has failed: a rank gives all memory back."""

import gc

import torch

from nanovllm.engine.ranks.process_group import ABORT_SECONDS, abort_group
from nanovllm.engine.start.memory import free_stores
from nanovllm.layers.parallel.tensor_parallel import TensorParallel
from nanovllm.models.loader import forget_loaders


def give_back(fields: dict, kept: tuple[str, ...], device: torch.device) -> None:
    """Delete a ModelRunner's attributes except the kept ones, and give back what they held. Some may not exist yet.
    Harmless when called again."""
    if "stores" in fields:
        free_stores(fields["stores"])
    if "model" in fields:
        forget_loaders(fields["model"])
    tp = fields.get("tp", TensorParallel())
    for name in set(fields) - set(kept):
        del fields[name]
    if device.type == "cuda":
        # CUDA graphs and the functions that they were captured from refer to each other.
        gc.unfreeze()  # See `collector.old_objects_set_aside`.
        gc.collect()
    if tp.size > 1:
        thread = abort_group(tp)
        if thread is not None:
            thread.join(ABORT_SECONDS)
    if device.type == "cuda":
        torch.cuda.empty_cache()
