"""The task "classify": what a classification head says of each line's text."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.jobs.lines import Row
from nanovllm.jobs.tasks.pooled import ROW_KEYS, PooledLine, PooledTask, TextFormat
from nanovllm.openai_format.pooled_calls import ClassifyCall

if TYPE_CHECKING:  # The reading process has no torch.
    from nanovllm import LLM, PoolingParams


@dataclass(frozen=True)
class ClassifyFormat(TextFormat):
    @cached_property
    def added_keys(self) -> tuple[str, ...]:
        return (*ROW_KEYS, "label", "probs", "logits")


@dataclass(frozen=True)
class Classify(PooledTask):
    line_format: ClassifyFormat

    name = "classify"
    call = ClassifyCall

    def _read_row(self, row: Row) -> PooledLine:
        return self.line_format.read(row)

    def params(self, line: PooledLine | None) -> "PoolingParams":
        from nanovllm import PoolingParams

        return PoolingParams(task="classify")

    def iterate(self, llm: "LLM", inputs: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        return llm.classify_iter(inputs, on_error="return")

    def _answer(self, line: PooledLine, outputs: list[Any]) -> Row:
        (output,) = outputs
        vectors = {name: np.asarray(output[name], np.float32) for name in ("probs", "logits")}
        return {"label": output["label"]} | vectors

    def columns(self) -> Row:
        import pyarrow as pa

        number = np.dtype(np.float32)
        return super().columns() | {"label": pa.string(), "probs": number, "logits": number}
