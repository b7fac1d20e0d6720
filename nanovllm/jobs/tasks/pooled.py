"""What tasks have in common whose requests end with their prompt. A line holds one or several inputs, and has a row."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from uuid import uuid4

from nanovllm import PromptEncoder
from nanovllm.jobs.columns import Columns
from nanovllm.jobs.inputs import RawLine
from nanovllm.jobs.lines import LineId, Row
from nanovllm.jobs.pooled_receipts import pooled_receipt
from nanovllm.jobs.prepared import Prepared
from nanovllm.jobs.receipts import RECEIPT
from nanovllm.jobs.task import Output, Task
from nanovllm.openai_format.openai_batch import Responder, is_request
from nanovllm.openai_format.pooled_calls import PooledCall, read_text_or_tokens
from nanovllm.utils.checks import require
from nanovllm.utils.text_json import parse_json

if TYPE_CHECKING:  # The reading process has no torch.
    from nanovllm import LLM, ImageReader, PoolingParams, RequestChecker

ROW_KEYS = ("id", "num_prompt_tokens")


class PooledLine(NamedTuple):
    """A line that can be served, as far as one knows without the model."""

    inputs: list[Any]  # texts or token ids; of ranks pairs of a query and a document
    columns: Row  # what the answer repeats of the input
    call: PooledCall | None = None  # a request in OpenAI's batch format, which is answered in it
    is_list: bool = False  # whether the line holds a list, which its row answers by a list
    num_prompt_tokens: int = 0  # of all inputs; 0 until they are token ids

    @property
    def num_sequences(self) -> int:
        return len(self.inputs)

    @property
    def prefix(self) -> list[int]:
        return self.inputs[0] if len(self.inputs) == 1 and self.num_prompt_tokens else []

    @property
    def may_need_packages(self) -> bool:
        return False

    def most_tokens(self, max_len: int | None) -> int:
        return self.num_prompt_tokens or len(self.inputs) * (max_len or 0)

    def most_completion_tokens(self, max_len: int) -> int:
        return 0


@dataclass(frozen=True)
class PooledFormat(Columns):
    """How lines of these tasks are read.

    Attributes:
        ANSWERS: what a row may have of the model, beside ROW_KEYS.
    """

    ANSWERS: ClassVar[tuple[str, ...]]

    @cached_property
    def added_keys(self) -> tuple[str, ...]:
        return (*ROW_KEYS, *self.ANSWERS, *([RECEIPT] if self.keeps_receipts else []))


@dataclass(frozen=True)
class PooledTask(Task):
    """Lines are texts, or requests in OpenAI's batch format, and rows have what a model says of them."""

    line_format: PooledFormat

    counter = "prompt_tokens"
    call: ClassVar[type[PooledCall]]

    # -- lines -----------------------------------------------------------------------------------------------------

    def preparer(
        self, tokenizer: Any, max_len: int | None, chat_format: str | None, images: "ImageReader | str"
    ) -> "PooledPreparer":
        return PooledPreparer(self, PromptEncoder(tokenizer, max_len))

    def read(self, row: Row) -> PooledLine:
        """Raises ValueError or TypeError with what is wrong with the row."""
        if not is_request(row):
            return self._read_row(row)
        body, url = row["body"], row.get("url")
        require("method", row.get("method"), row.get("method") in (None, "POST"), "'POST'")
        require("url", url, url in (None, *self.call.urls), f"{' or '.join(map(repr, self.call.urls))}{self._of_task}")
        call = self.call.read(body)
        return PooledLine(call.inputs, {}, self._own_call(call), is_list=True)

    @abstractmethod
    def _read_row(self, row: Row) -> PooledLine: ...

    def _own_call(self, call: Any) -> PooledCall:
        """Without inputs, which the line has. Raises ValueError for a request that asks for what the job says."""
        return replace(call, inputs=[])

    @property
    def _of_task(self) -> str:
        return f" with task={self.name!r}"

    def encode(self, encoder: PromptEncoder, inputs: list[Any]) -> list[Any]:
        """Token ids of inputs, or an error in the place of one; or inputs that the engine encodes."""
        return encoder.encode(inputs)

    # -- checks ----------------------------------------------------------------------------------------------------

    @abstractmethod
    def params(self, line: PooledLine | None) -> "PoolingParams":
        """What a line asks for. None: the job."""

    def prompts(self, checker: "RequestChecker", inputs: list[Any]) -> list[Any]:
        """What an engine computes for inputs: token ids, or an exception."""
        return inputs

    def check(self, checker: "RequestChecker", lines: Sequence[PooledLine]) -> list[int | Exception]:
        prompts = [self.prompts(checker, line.inputs) for line in lines]
        params = [self.params(line) for line in lines]
        flat = [(prompt, asked) for own, asked in zip(prompts, params, strict=True) for prompt in own]
        errors = iter(checker.check([prompt for prompt, _ in flat], [asked for _, asked in flat]))
        found: list[int | Exception] = []
        for own in prompts:
            wrong = [(place, error) for place, error in zip(range(len(own)), errors, strict=False) if error is not None]
            found.append(_of_input(*wrong[0], len(own)) if wrong else sum(map(len, own)))
        return found

    def check_options(self, checker: "RequestChecker", lines: Sequence[PooledLine]) -> None:
        """Raises what an engine would for any text."""
        (error,) = checker.check([[0]], [self.params(None)])
        if error is not None:
            raise error

    # -- the call --------------------------------------------------------------------------------------------------

    @abstractmethod
    def iterate(self, llm: "LLM", inputs: Iterator[Any]) -> Iterator[tuple[int, Any]]:
        """LLM's iterator over inputs, with on_error="return"."""

    def prompt_of(self, llm: "LLM", given: Any) -> Any:
        """The token ids that an engine computes for an input, for its receipt; of a wrong one anything."""
        return given

    def answer(self, llm: "LLM", lines: Iterator[Prepared | None]) -> Iterator[tuple[Prepared, Output]]:
        from nanovllm import NO_PROMPT

        under_way: dict[int, tuple[_Gathered, int]] = {}

        def inputs() -> Iterator[Any]:
            indices = count()
            for prepared in lines:
                if prepared is None:
                    yield NO_PROMPT
                    continue
                gathered = _Gathered(prepared)
                if self.line_format.keeps_receipts:
                    gathered.prompts = [self.prompt_of(llm, each) for each in prepared.line.inputs]
                for place, each in enumerate(prepared.line.inputs):
                    under_way[next(indices)] = gathered, place
                    yield each

        found: Any = self.iterate(llm, inputs())
        with closing(found):
            for index, output in found:
                gathered, place = under_way.pop(index)
                if gathered.is_whole_with(place, output):
                    yield gathered.prepared, gathered.output()

    def num_tokens(self, output: Output) -> int:
        return sum(each["num_prompt_tokens"] for each in output.get("outputs", ()))

    # -- rows ------------------------------------------------------------------------------------------------------

    def row(self, line_id: LineId, line: PooledLine, output: Output, responder: Responder) -> Row:
        outputs = self.as_asked(line, output["outputs"])
        receipt: Row = {}
        if self.line_format.keeps_receipts:
            receipt[RECEIPT] = pooled_receipt(self.params(line), output["prompts"], outputs)
        if line.call is None:
            num_tokens = sum(each["num_prompt_tokens"] for each in outputs)
            row = {"id": line_id, "num_prompt_tokens": num_tokens} | self._answer(line, outputs)
            return row | line.columns | receipt
        body = line.call.answer(outputs, responder.model)
        head = {"id": f"batch_req_{uuid4().hex}", "custom_id": line_id}
        response = {"status_code": 200, "request_id": body.get("id", head["id"]), "body": body}
        return head | {"response": response, "error": None} | receipt

    @abstractmethod
    def _answer(self, line: PooledLine, outputs: list[Any]) -> Row:
        """What a row has beside ROW_KEYS and the columns. outputs: of the line's inputs."""

    def as_asked(self, line: PooledLine, outputs: list[Any]) -> list[Any]:
        """Outputs as an engine gives them for `params` of the line. Raises ValueError if there can be none."""
        return outputs

    def columns(self) -> Row:
        import pyarrow as pa

        return {"id": pa.string(), "num_prompt_tokens": pa.int64()}

    def last_columns(self) -> Row:
        import pyarrow as pa

        return {RECEIPT: pa.string()} if self.line_format.keeps_receipts else {}


class _Gathered:
    """The outputs of a line's inputs, as they come.

    Attributes:
        prompts: token ids of the inputs, if the job keeps receipts.
    """

    def __init__(self, prepared: Prepared):
        self.prepared = prepared
        self.prompts: list[Any] = []
        self._outputs: list[Any] = [None] * len(prepared.line.inputs)
        self._num_left = len(self._outputs)

    def is_whole_with(self, place: int, output: Mapping[str, Any]) -> bool:
        self._outputs[place] = output
        self._num_left -= 1
        return self._num_left == 0

    def output(self) -> Output:
        for place, output in enumerate(self._outputs):
            if "error" in output:
                return {"error": str(_of_input(place, ValueError(output["error"]), len(self._outputs)))}
        return {"outputs": self._outputs, "prompts": self.prompts}


def _of_input(place: int, error: Exception, num_inputs: int) -> Exception:
    """An error that says which of a line's inputs it is about. Its kind stays."""
    if num_inputs == 1:
        return error
    return type(error)(f"input[{place}]: {str(error).partition(']: ')[2] or error}")


class PooledPreparer:
    """Reads and tokenizes lines, many at a time."""

    def __init__(self, task: PooledTask, encoder: PromptEncoder):
        self._task, self._encoder = task, encoder

    def prepare(self, raw_lines: Iterable[tuple[int, RawLine]]) -> list[Prepared]:
        lines = [(position, raw, self._read(raw)) for position, raw in raw_lines]
        inputs = [each for _, _, line in lines if isinstance(line, PooledLine) for each in line.inputs]
        encoded = iter(self._task.encode(self._encoder, inputs))
        prepared = []
        for position, raw, line in lines:
            result: PooledLine | Exception = line
            if isinstance(line, PooledLine):
                own = [next(encoded) for _ in line.inputs]
                wrong = [(place, each) for place, each in enumerate(own) if isinstance(each, Exception)]
                num_tokens = 0 if wrong else sum(len(each) for each in own if isinstance(each, list))
                result = line._replace(inputs=own, num_prompt_tokens=num_tokens)
                if wrong:
                    result = _of_input(*wrong[0], len(own))
            outcome = (result, None) if isinstance(result, PooledLine) else (None, str(result))
            prepared.append(Prepared(position, raw.id, raw.file, raw.number, *outcome))
        return prepared

    def _read(self, raw: RawLine) -> PooledLine | Exception:
        if raw.row is None:
            return ValueError(raw.error)
        try:
            return self._task.read(raw.row)
        except (TypeError, ValueError) as error:
            return error


@dataclass(frozen=True)
class TextFormat(PooledFormat):
    """How lines are read that hold one text. It is a text or token ids. Raises ValueError for a wrong option."""

    PROMPTS: ClassVar[tuple[str, ...]] = ("prompt", "prompt_token_ids", "text")

    def read(self, row: Row) -> PooledLine:
        """Raises ValueError with what is wrong with the row."""
        name, value = self._prompt(row)
        if name == "prompt_token_ids" and isinstance(value, str):
            with suppress(ValueError):
                value = parse_json(value)
        return PooledLine([read_text_or_tokens(value, name or "template")], self.data(row))
