"""A rank's memory, given back for a while to whoever else needs it."""

import gc
from typing import TYPE_CHECKING, Protocol

import torch

from nanovllm.config import Config
from nanovllm.engine.runner.cuda_graphs import StepGraphs
from nanovllm.engine.start.kv_scales import calibrate_again
from nanovllm.engine.start.memory import free_memory, free_stores
from nanovllm.engine.start.weights import load_weights
from nanovllm.layers.stores.store import Store

if TYPE_CHECKING:
    from nanovllm.models.loader import LoadedModel


class SleepyRunner(Protocol):
    """What of a ModelRunner can be given back."""

    config: Config
    rank: int
    device: torch.device
    model: "LoadedModel"
    stores: list[Store]
    num_cells: int
    has_graphs: bool
    step_graphs: StepGraphs
    weight_shapes: list[torch.Size]  # of the parameters, while they sleep

    def synchronize(self) -> None: ...

    def capture_cudagraph(self) -> None: ...


def fall_asleep(runner: SleepyRunner, level: int) -> None:
    """Give the memory of the stores and of the CUDA graphs, which name its addresses, back to the device; at level 2
    that of the weights too."""
    runner.synchronize()
    model = runner.model
    model.unpack_weights()
    free_stores(runner.stores)
    runner.step_graphs.clear()
    if level == 2:
        runner.weight_shapes = [parameter.shape for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data.new_empty(0)
        model.unpack_weights()  # A tied head lets go of the embedding.
    gc.collect()
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()


def wake_up(runner: SleepyRunner) -> None:
    """Undo `fall_asleep`, with empty stores. Weights come from the checkpoint again. Raises MemoryError, and sleeps on,
    if the memory is not free."""
    shapes, model = runner.weight_shapes, runner.model
    try:
        if shapes:
            for parameter, shape in zip(model.parameters(), shapes, strict=True):
                parameter.data = parameter.data.new_empty(shape)
            runner.weight_shapes = []
            model.unpack_weights()
            load_weights(runner.config, model, runner.rank)
            calibrate_again(runner.config, model, runner.stores)
        elif runner.device.type == "cpu":
            model.pack_weights()
        for store in runner.stores:
            store.allocate(runner.config.num_kvcache_blocks, runner.num_cells)
        if runner.has_graphs:
            runner.capture_cudagraph()
    except (torch.OutOfMemoryError, MemoryError) as error:
        free = free_memory(runner.device) / 2**30
        fall_asleep(runner, 2 if shapes else 1)
        runner.weight_shapes = shapes  # Some parameters may have had no memory yet.
        raise MemoryError(
            f"wake_up(): no room for what sleep() gave back ({free:.2f} GiB are free): end what else takes memory "
            f"({error})"
        ) from error
