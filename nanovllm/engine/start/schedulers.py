"""The scheduler that an engine's options and its ModelRunner ask for."""

from functools import partial
from typing import Any, Protocol

from nanovllm.config import Config
from nanovllm.engine.features.images.whole_images import WholeImages
from nanovllm.engine.features.speculation.budget import StepTimes
from nanovllm.engine.features.speculation.speculative_scheduler import SpeculativeScheduler
from nanovllm.engine.features.states.cells import Cells
from nanovllm.engine.scheduler import Scheduler
from nanovllm.models.registry import find_vision


class RunnerFacts(Protocol):
    """What of a ModelRunner a scheduler depends on."""

    mixed_step_rows: int
    num_cells: int
    step_times: StepTimes | None


def make_scheduler(config: Config, runner: RunnerFacts) -> Scheduler:
    options: dict[str, Any] = {"mixed_step_rows": runner.mixed_step_rows}
    vision = find_vision(config.hf_config)
    if runner.num_cells:
        options["make_cells"] = partial(Cells, runner.num_cells)
    elif vision is not None and vision.is_bidirectional:
        options["make_cells"] = partial(WholeImages, vision.max_image_rows)
    if runner.step_times is None:
        return Scheduler(config, **options)
    return SpeculativeScheduler(config, runner.step_times, **options)
