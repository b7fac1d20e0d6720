"""The scheduler that an engine's options and its ModelRunner ask for."""

from functools import partial
from typing import Any, Protocol

from nanovllm.config import Config
from nanovllm.engine.features.speculation.budget import StepTimes
from nanovllm.engine.features.speculation.speculative_scheduler import SpeculativeScheduler
from nanovllm.engine.features.states.cells import Cells
from nanovllm.engine.features.windows.window_blocks import WindowBlocks
from nanovllm.engine.features.windows.windowed_scheduler import WindowedBlockManager, WindowedScheduler
from nanovllm.engine.scheduler import Scheduler
from nanovllm.layers.stores.store import Store
from nanovllm.layers.stores.windowed_kv_cache import WindowedKVCache


class RunnerFacts(Protocol):
    """What of a ModelRunner a scheduler depends on."""

    mixed_step_rows: int
    num_cells: int
    step_times: StepTimes | None
    stores: list[Store]


class WindowedSpeculativeScheduler(WindowedScheduler, SpeculativeScheduler):
    """Both at once: neither knows of the other."""


def make_scheduler(config: Config, runner: RunnerFacts) -> Scheduler:
    options: dict[str, Any] = {"mixed_step_rows": runner.mixed_step_rows}
    windowed = next((store for store in runner.stores if isinstance(store, WindowedKVCache)), None)
    kinds: tuple[type[Scheduler], type[Scheduler]] = (Scheduler, SpeculativeScheduler)
    if windowed is not None:
        num_blocks = windowed.split.num_blocks(config.num_kvcache_blocks)
        make_blocks = partial(WindowBlocks, num_blocks, windowed.split.window, config.kvcache_block_size)
        options |= {"make_cells": make_blocks, "make_manager": WindowedBlockManager}
        kinds = WindowedScheduler, WindowedSpeculativeScheduler
    elif runner.num_cells:
        options["make_cells"] = partial(Cells, runner.num_cells)
    if runner.step_times is None:
        return kinds[0](config, **options)
    return kinds[1](config, step_times=runner.step_times, **options)  # type: ignore[call-arg]
