"""The task "generate": texts, by the prompts of lines."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import count, tee
from typing import TYPE_CHECKING, Any

from nanovllm import AnswerFormat, PromptEncoder, find_format
from nanovllm.jobs.inputs import RawLine
from nanovllm.jobs.lines import ANSWER_KEYS, Line, LineFormat, LineId, Row, num_completion_tokens
from nanovllm.jobs.prepared import NO_IMAGES, Prepared
from nanovllm.jobs.receipt_images import kept_images
from nanovllm.jobs.receipts import row_with_receipt
from nanovllm.jobs.task import Output, Task
from nanovllm.openai_format.openai_batch import Responder
from nanovllm.openai_format.request_names import ChatOptions
from nanovllm.utils.text_json import as_json

if TYPE_CHECKING:  # The reading process has no torch.
    from nanovllm import LLM, ImageReader, RequestChecker

_MAX_TOOLS = 256  # sets of tools that are kept


@dataclass(frozen=True)
class Generate(Task):
    """Lines are prompts or conversations with their parameters, and rows have what the model writes."""

    line_format: LineFormat

    name = "generate"
    counter = "generated_tokens"

    def engine_options(self) -> Row:
        return {}

    def describe(self) -> Row:
        return self.line_format.sampling | self.line_format.given()

    def preparer(
        self, tokenizer: Any, max_len: int | None, chat_format: str | None, images: "ImageReader | str"
    ) -> "GeneratePreparer":
        return GeneratePreparer(tokenizer, self.line_format, max_len, chat_format, images)

    def check(self, checker: "RequestChecker", lines: Sequence[Line]) -> list[int | Exception]:
        errors = checker.check(map(_of_engine, lines), [line.params for line in lines])
        return [line.num_prompt_tokens if error is None else error for line, error in zip(lines, errors, strict=True)]

    def check_options(self, checker: "RequestChecker", lines: Sequence[Line]) -> None:
        errors = checker.check(map(_of_engine, lines), [self.line_format.base_params] * len(lines))
        # A prompt that is too long is refused before its parameters are looked at.
        of_options = [error for error in errors if error is None or str(error).startswith("sampling_params")]
        if of_options and all(of_options):
            raise of_options[0]  # type: ignore[misc]

    def answer(self, llm: "LLM", lines: Iterator[Prepared | None]) -> Iterator[tuple[Prepared, Output]]:
        from nanovllm import NO_PROMPT

        under_way: dict[int, Prepared] = {}

        def requests() -> Iterator[tuple[Any, Any]]:
            indices = count()
            for prepared in lines:
                if prepared is None:
                    yield NO_PROMPT, None
                else:
                    line: Line = prepared.line
                    if line.images:  # The engine alone keeps them, as long as it needs them.
                        prepared = prepared._replace(line=line._replace(images=()))
                    under_way[next(indices)] = prepared
                    yield _of_engine(line), line.params

        pairs, same_pairs = tee(requests())
        prompts, params = (prompt for prompt, _ in pairs), (params for _, params in same_pairs)
        outputs: Generator[Any, None, None] = llm.generate_iter(prompts, params, on_error="return")  # type: ignore
        with closing(outputs):
            for index, output in outputs:
                yield under_way.pop(index), output

    def num_tokens(self, output: Output) -> int:
        return num_completion_tokens(output)

    def row(self, line_id: LineId, line: Line, output: Output, responder: Responder) -> Row:
        return row_with_receipt(line_id, line, output, responder)

    def columns(self) -> Row:
        import pyarrow as pa

        return {name: pa.int64() if name.startswith("num_") else pa.string() for name in ANSWER_KEYS}

    def last_columns(self) -> Row:
        import pyarrow as pa

        return dict.fromkeys((*self.line_format.text_keys, *self.line_format.json_keys), pa.string())


def _of_engine(line: Line) -> Any:
    """A line's prompt as an engine takes it. Its images have been read."""
    if not line.images:
        return line.prompt
    from nanovllm import ImagePrompt

    token_ids: Any = line.prompt
    return ImagePrompt(token_ids, [image.unpack() for image in line.images])


class GeneratePreparer:
    """Turns lines into requests: chat template and tokenizer, many lines at a time."""

    def __init__(
        self,
        tokenizer: Any,
        line_format: LineFormat,
        max_len: int | None,
        chat_format: str | None = None,
        images: "ImageReader | str" = NO_IMAGES,
    ):
        """
        Args:
            max_len: tokens of the longest sequence, at most. None is unknown.
            chat_format: of answers to chats.
            images: reads those of lines; or why none are read.
        """
        self._tokenizer, self._format, self._chat_format = tokenizer, line_format, chat_format
        self._encoder, self._images = PromptEncoder(tokenizer, max_len), images
        if not isinstance(images, str):
            self._encoder.accept_images(images.write_images)
        self._tools: dict[str, list[Any]] = {}  # those of late, by their JSON

    @cached_property
    def _answers(self) -> AnswerFormat:
        template = self._encoder.template_text(self._format.chat_template)
        # The process that splits the answers says what is unknown.
        return AnswerFormat(self._tokenizer, find_format(self._tokenizer, template, self._chat_format, log=False))

    def prepare(self, raw_lines: Iterable[tuple[int, RawLine]]) -> list[Prepared]:
        """Raises nothing: what is wrong with a line is its error. Images are left to `read_images`: a line's prompt has
        one token for each of them."""
        lines = [(position, raw, self._read(raw)) for position, raw in raw_lines]
        prompts: Any = [line.prompt for _, _, line in lines if isinstance(line, Line) and not line.is_chat]
        encoded = iter(self._encoder.encode(prompts))
        prepared = []
        for position, raw, line in lines:
            result: Line | Exception = line
            if isinstance(line, Line):
                prompt: Any = self._encode_chat(line) if line.is_chat else next(encoded)
                if isinstance(prompt, dict):
                    line = line._replace(images=tuple(prompt["images"]))
                    prompt = prompt["prompt_token_ids"]
                # The engine's process gets no tools, unless it reads calls by them: many lines have the same thousands
                # of characters.
                if not line.num_images:
                    prompt = self._without_places(prompt)
                is_wrong = isinstance(prompt, Exception)
                result = prompt if is_wrong else line._replace(prompt=prompt, chat_options=ChatOptions())
                if line.split is not None and isinstance(result, Line):
                    is_open = self._answers.opens_reasoning(prompt)
                    split = line.split._replace(tools=self._shared(line.split.tools), is_open=is_open)
                    result = result._replace(split=split, params=self._answers.with_tags(line.params))
            outcome = (result, None) if isinstance(result, Line) else (None, str(result))
            prepared.append(Prepared(position, raw.id, raw.file, raw.number, *outcome))
        return prepared

    def _without_places(self, prompt: list[int] | Exception) -> list[int] | Exception:
        """The prompt of a line without images, or the error that it has a place for one."""
        if isinstance(prompt, list) and not isinstance(self._images, str):
            try:
                self._images.check_places(prompt, 0)
            except ValueError as error:
                return error
        return prompt

    def _shared(self, tools: list[Any] | None) -> list[Any] | None:
        """The same object for equal tools, which a pickle then holds once for many lines."""
        if tools is None:
            return None
        if len(self._tools) > _MAX_TOOLS:
            self._tools.clear()
        return self._tools.setdefault(as_json(tools), tools)

    def _read(self, raw: RawLine) -> Line | Exception:
        if raw.row is None:
            return ValueError(raw.error)
        try:
            line = self._format.read(raw.row, raw.id, self._lacks_places)
            if line.num_images and isinstance(self._images, str):
                raise ValueError(f"has images, and {self._images}")
            if line.images and isinstance(line.prompt, str):
                line = line._replace(prompt=self._images.write_images(line.prompt))  # type: ignore[union-attr]
            return line
        except (TypeError, ValueError) as error:
            return error

    def _lacks_places(self, text: str) -> bool:
        """Whether a text with images beside it needs the chat template, which writes their places."""
        is_blind = isinstance(self._images, str) or not self._encoder.template_text(self._format.chat_template)
        return not is_blind and not self._images.has_place(text)  # type: ignore[union-attr]

    def read_images(self, prepared: Prepared) -> Prepared:
        line: Line | None = prepared.line
        if line is None or not line.num_images:
            return prepared
        reader: Any = self._images
        try:
            reader.check_places(line.prompt, len(line.images))
            images = tuple(reader.read_all(line.images))
            if line.asked is not None:
                line = line._replace(kept_images=kept_images(line.images, images))
            return prepared._replace(line=line._replace(prompt=reader.expand(line.prompt, images), images=images))
        except (TypeError, ValueError, OSError, MemoryError) as error:
            return prepared._replace(line=None, error=str(error) or type(error).__name__)

    def _encode_chat(self, line: Line) -> list[int] | Exception:
        try:
            return self._encoder.encode_chat(line.prompt, self._format.chat_template, *line.chat_options)
        except Exception as error:  # Templates raise whatever they like.
            return error
