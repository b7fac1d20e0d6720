"""The scheduler that an engine's options and its ModelRunner ask for."""

from functools import partial
from typing import Any, Protocol

from nanovllm.config import Config
from nanovllm.engine.features.images.image_sequence import ImageSequence
from nanovllm.engine.features.images.whole_images import WholeImages
from nanovllm.engine.features.speculation.budget import StepTimes
from nanovllm.engine.features.speculation.speculative_scheduler import SpeculativeScheduler
from nanovllm.engine.features.states.cells import Cells
from nanovllm.engine.features.windows.window_blocks import WindowBlocks
from nanovllm.engine.features.windows.windowed_scheduler import WindowedBlockManager, WindowedScheduler
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.stores.store import Store
from nanovllm.layers.stores.windowed_kv_cache import WindowedKVCache
from nanovllm.models.registry import find_vision


class RunnerFacts(Protocol):
    """What of a ModelRunner a scheduler depends on."""

    mixed_step_rows: int
    num_cells: int
    step_times: StepTimes | None
    stores: list[Store]


class WindowedSpeculativeScheduler(WindowedScheduler, SpeculativeScheduler):
    """Both at once: neither knows of the other."""


class WholeImagesInWindows(WholeImages, WindowBlocks):
    """Both at once. A prompt waits until the layers with a window have room for its largest image. When it is alone,
    they have (`StoreLimits.whole_tokens`)."""

    def __init__(self, num_rows: int, *of_windows: Any):
        WholeImages.__init__(self, num_rows)
        WindowBlocks.__init__(self, *of_windows)

    def limit_prefill(self, head: Sequence, budget: int, is_alone: bool) -> int:
        budget = super().limit_prefill(head, budget, is_alone)
        if not isinstance(head, ImageSequence):
            return budget
        largest = max(each.end - each.start for each in head.images.each)
        return budget if budget >= min(largest, head.num_tokens - head.num_cached_tokens) else 0


def make_scheduler(config: Config, runner: RunnerFacts) -> Scheduler:
    options: dict[str, Any] = {"mixed_step_rows": runner.mixed_step_rows}
    windowed = next((store for store in runner.stores if isinstance(store, WindowedKVCache)), None)
    vision = find_vision(config.hf_config)
    whole_rows = vision.max_image_rows if vision is not None and vision.is_bidirectional else 0
    kinds: tuple[type[Scheduler], type[Scheduler]] = (Scheduler, SpeculativeScheduler)
    if windowed is not None:
        num_blocks = windowed.split.num_blocks(config.num_kvcache_blocks)
        of_windows = num_blocks, windowed.split.window, config.kvcache_block_size
        make_blocks = partial(WholeImagesInWindows, whole_rows) if whole_rows else WindowBlocks
        options |= {"make_cells": partial(make_blocks, *of_windows), "make_manager": WindowedBlockManager}
        kinds = WindowedScheduler, WindowedSpeculativeScheduler
    elif runner.num_cells:
        options["make_cells"] = partial(Cells, runner.num_cells)
    elif whole_rows:
        options["make_cells"] = partial(WholeImages, whole_rows)
    if runner.step_times is None:
        return kinds[0](config, **options)
    return kinds[1](config, step_times=runner.step_times, **options)  # type: ignore[call-arg]
