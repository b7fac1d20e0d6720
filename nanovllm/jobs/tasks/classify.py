"""The task "classify": what a classification head says of each line's text."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm import PromptEncoder, as_conversations
from nanovllm.jobs.lines import Row
from nanovllm.jobs.tasks.pooled import PooledLine, PooledTask, TextFormat
from nanovllm.openai_format.pooled_calls import ClassifyCall
from nanovllm.utils.text_json import parse_json

if TYPE_CHECKING:  # The reading process has no torch.
    from nanovllm import LLM, PoolingParams


@dataclass(frozen=True)
class ClassifyFormat(TextFormat):
    """Lines may hold a conversation too, for the chat template: what a reward model judges."""

    PROMPTS = (*TextFormat.PROMPTS, "messages")
    ANSWERS = ("label", "probs", "logits")

    def read(self, row: Row) -> PooledLine:
        name, value = self._prompt(row)
        if name == "messages" and isinstance(value, str):
            with suppress(ValueError):
                value = parse_json(value)
        if name != "messages" and not _is_chat(value):
            return super().read(row)
        try:
            if not _is_chat(value):
                raise ValueError("must be a list of objects with role and content, not empty")
            return PooledLine(as_conversations([value]), self.data(row))
        except ValueError as error:
            raise ValueError(f"{name}: {str(error).removeprefix('conversation 0, ')}") from None


@dataclass(frozen=True)
class Classify(PooledTask):
    line_format: ClassifyFormat

    name = "classify"
    call = ClassifyCall

    def _read_row(self, row: Row) -> PooledLine:
        return self.line_format.read(row)

    def encode(self, encoder: PromptEncoder, inputs: list[Any]) -> list[Any]:
        texts = iter(encoder.encode([each for each in inputs if not _is_chat(each)]))
        return [_encode_chat(encoder, each) if _is_chat(each) else next(texts) for each in inputs]

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


def _is_chat(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _encode_chat(encoder: PromptEncoder, conversation: Any) -> list[int] | Exception:
    """Token ids of a conversation that has its answer already."""
    try:
        (token_ids,) = encoder.encode_chats([conversation], None, None, None, add_generation_prompt=False)
        return token_ids
    except Exception as error:  # Templates raise whatever they like.
        return type(error)(str(error).removeprefix("conversation 0: "))
