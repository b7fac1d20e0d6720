"""The tasks by their names, and which options each of them has."""

from dataclasses import MISSING, Field, fields
from typing import Any

from nanovllm.jobs.columns import Columns
from nanovllm.jobs.lines import LineFormat, Row
from nanovllm.jobs.receipts import ReceiptFormat
from nanovllm.jobs.task import Task
from nanovllm.jobs.tasks.classify import Classify, ClassifyFormat
from nanovllm.jobs.tasks.embed import Embed, EmbedFormat
from nanovllm.jobs.tasks.generate import Generate
from nanovllm.jobs.tasks.rerank import RankFormat, Rerank
from nanovllm.utils.checks import quoted, require

_TASKS: dict[str, Any] = {"generate": Generate, "embed": Embed, "classify": Classify, "rerank": Rerank}
_FORMATS: dict[str, type[Columns]] = {
    "generate": LineFormat,
    "embed": EmbedFormat,
    "classify": ClassifyFormat,
    "rerank": RankFormat,
}
NAMES = tuple(_TASKS)


def make_task(name: str, sampling: Row, options: Row, keeps_receipts: bool = False) -> Task:
    """A task with its options.

    Args:
        sampling: options of SamplingParams, which only generation has.
        options: of any task's lines. One that the task does not have must be as by default.
        keeps_receipts: whether the engine is deterministic.

    Raises ValueError or TypeError.
    """
    require("task", name, name in NAMES, f"one of {', '.join(NAMES)}")
    own = _options_of(name)
    if name == "generate":
        options = options | {"sampling": sampling}
    elif sampling:
        option, value = next(iter(sampling.items()))
        raise ValueError(f"{option}={quoted(value)}: is an option of task='generate', and this job has task={name!r}")
    for option, value in options.items():
        if option not in own and value is not None and value != _DEFAULTS[option]:
            of = " and ".join(repr(each) for each in NAMES if option in _options_of(each))
            raise ValueError(f"{option}={quoted(value)}: is an option of task={of}, and this job has task={name!r}")
    line_format = ReceiptFormat if keeps_receipts and name == "generate" else _FORMATS[name]
    given = {option: value for option, value in options.items() if option in own}
    return _TASKS[name](line_format(**given, keeps_receipts=keeps_receipts))


def _options_of(name: str) -> set[str]:
    return {field.name for field in fields(_FORMATS[name])}


def _default(field: Field) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


_DEFAULTS = {field.name: _default(field) for each in _FORMATS.values() for field in fields(each)}
