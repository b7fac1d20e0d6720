"""The task "embed": a vector for each line's text."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm import PromptEncoder
from nanovllm.jobs.lines import Row
from nanovllm.jobs.tasks.pooled import PooledLine, PooledTask, TextFormat
from nanovllm.openai_format.pooled_calls import EmbeddingCall
from nanovllm.utils.checks import quoted
from nanovllm.utils.rules import one_of, option

if TYPE_CHECKING:  # The reading process has no torch.
    from nanovllm import LLM, PoolingParams, RequestChecker

_TINY = np.float32(1e-12)  # LLM.embed's, by which a vector of zeros stays one


@dataclass(frozen=True)
class EmbedFormat(TextFormat):
    """The options of LLM.embed, and the type of the numbers. Raises ValueError for a wrong one."""

    ANSWERS = ("embedding",)

    pooling: str = "auto"
    normalize: bool = True
    dimensions: int | None = None  # None: all that the model gives
    prompt_name: str | None = None
    embedding_dtype: str = option("float32", one_of("float32", "float16"))

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.params

    @cached_property
    def params(self) -> "PoolingParams":
        from nanovllm import PoolingParams

        return PoolingParams(self.pooling, self.normalize, self.dimensions, "embed")  # type: ignore[arg-type]


@dataclass(frozen=True)
class Embed(PooledTask):
    """
    Attributes:
        prefix: what the model's files put before each text. None is unknown: the engine puts it there.
    """

    line_format: EmbedFormat
    prefix: str | None = None

    name = "embed"
    call = EmbeddingCall

    def of_model(self, checker: "RequestChecker") -> "Embed":
        return replace(self, prefix=checker.embedding_prefix(self.line_format.prompt_name))

    def _read_row(self, row: Row) -> PooledLine:
        return self.line_format.read(row)

    def _own_call(self, call: EmbeddingCall) -> EmbeddingCall:
        asked = call.options if call.prompt_name is None else call.options | {"prompt_name": call.prompt_name}
        for name, value in asked.items():
            of_job = getattr(self.line_format, name)
            if name != "dimensions" and value != of_job:
                raise ValueError(f"{name}={quoted(value)}: must be that of the job, {of_job!r}")
        return replace(call, inputs=[])  # The line has them.

    def encode(self, encoder: PromptEncoder, inputs: list[Any]) -> list[Any]:
        if self.prefix is None:
            return inputs
        return encoder.encode([self.prefix + each if isinstance(each, str) else self._checked(each) for each in inputs])

    def _checked(self, token_ids: list[int]) -> Any:
        if self.line_format.prompt_name is None:
            return token_ids
        return ValueError("is token ids: prompt_name puts a text before texts")

    def params(self, line: PooledLine | None) -> "PoolingParams":
        params = self.line_format.params
        return params if line is None else replace(params, dimensions=self._dimensions(line))

    def _dimensions(self, line: PooledLine) -> int | None:
        own = None if line.call is None else line.call.options.get("dimensions")
        return self.line_format.dimensions if own is None else own

    def iterate(self, llm: "LLM", inputs: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        # All dimensions, of any length: a line may ask for more of them than the job does.
        asked: Any = {"pooling": self.line_format.pooling, "normalize": False}
        name = self.line_format.prompt_name if self.prefix is None else None
        return llm.embed_iter(inputs, prompt_name=name, on_error="return", **asked)

    def _answer(self, line: PooledLine, outputs: list[Any]) -> Row:
        vector = outputs[0]["embedding"]
        with np.errstate(over="ignore"):  # What is too large for float16 becomes infinite, which no row may hold.
            return {"embedding": vector.astype(self.line_format.embedding_dtype)}

    def as_asked(self, line: PooledLine, outputs: list[Any]) -> list[Any]:
        size = self._dimensions(line)
        return [{**output, "embedding": self._cut(output["embedding"], size)} for output in outputs]

    def _cut(self, vector: np.ndarray, size: int | None) -> np.ndarray:
        """The bits that LLM.embed gives. Raises ValueError for a size that is too large."""
        if size is not None and size > len(vector):
            raise ValueError(f"dimensions={size}: must be in 1..{len(vector)}, the model's hidden_size")
        vector = vector[:size]
        return vector / max(np.linalg.norm(vector), _TINY) if self.line_format.normalize else vector

    def columns(self) -> Row:
        return super().columns() | {"embedding": np.dtype(self.line_format.embedding_dtype)}
