"""One line of a job: from a row of input to a request, and from an answer to a row of output. Knows no files."""

from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from nanovllm import AnswerFormat, Conversation, SamplingParams, as_conversations, image_sources
from nanovllm.jobs.columns import Columns, column_name, is_missing, names_of
from nanovllm.openai_format import openai_batch
from nanovllm.openai_format.request_names import (
    CHAT_OPTIONS,
    PARAMETERS,
    PARAMETERS_OF_TABLES,
    ChatOptions,
    Row,
    as_token_ids,
    make_params,
    read_parameters,
)
from nanovllm.utils.checks import half_pair, is_whole, quoted, require
from nanovllm.utils.rules import FLAG, Rule, option
from nanovllm.utils.table_values import as_list
from nanovllm.utils.text_json import decode_json, parse_json

LineId = str | int

ANSWER_KEYS = ("id", "text", "finish_reason", "num_prompt_tokens", "num_completion_tokens")
PROMPTS = ("prompt", "prompt_token_ids", "messages")
IMAGES = "images"
OPTIONAL_KEYS = ("samples", "logprobs", "prompt_logprobs")  # with n > 1, and where a line asks for them

_OBJECT = Rule(lambda value: isinstance(value, dict), "a JSON object")


class NoObject(ValueError):
    """A line is no JSON object."""


class Split(NamedTuple):
    """How the answer to a chat is taken apart."""

    reasoning: bool  # whether what the model thinks is apart
    tools: list[Any] | None = None  # schemas of the tools whose calls are apart; None: calls are a part of the text
    has_one_call: bool = False  # calls after the first are left out (parallel_tool_calls=false)
    is_open: bool = False  # whether the prompt has begun the thinking


class Line(NamedTuple):
    """A line that can be served, as far as one knows without the model."""

    prompt: str | list[int] | Conversation  # a text, token ids, or messages for the chat template
    params: SamplingParams
    columns: Row  # what the answer repeats of the input
    chat_options: ChatOptions
    openai: openai_batch.Kind | None = None  # the kind of OpenAI's request, which is answered in OpenAI's format
    split: Split | None = None  # of a chat's answer; None: it stays as written
    asked: SamplingParams | None = None  # what the line itself asks for, if its job keeps receipts; None: params
    # Those beside a prompt that is no conversation, as `read_image` takes them; when they have been read, PackedImages.
    images: tuple[Any, ...] = ()
    num_images: int = 0  # also in a conversation
    kept_images: tuple[Row, ...] = ()  # what its receipt keeps of them, when they have been read

    @property
    def is_chat(self) -> bool:
        return _is_chat(self.prompt)

    @property
    def num_prompt_tokens(self) -> int:
        """When it has been prepared: its prompt is token ids."""
        return len(self.prompt)

    @property
    def num_sequences(self) -> int:
        """That an engine computes for it."""
        return self.params.n

    @property
    def num_image_bytes(self) -> int:
        """Of its images, when they have been read."""
        return sum(getattr(image, "num_bytes", 0) for image in self.images)

    @property
    def prefix(self) -> list[int]:
        """Token ids by which lines with the same beginning are found."""
        return self.prompt  # type: ignore[return-value]

    @property
    def may_need_packages(self) -> bool:
        """Whether an engine may need a package for it that other lines do without."""
        return self.params.structured_outputs is not None or self.params.thinking_token_budget is not None

    def most_tokens(self, max_len: int | None) -> int:
        """By which its answer moves the task's counter. max_len: tokens of a sequence; None is unknown."""
        if max_len is None:
            return self.params.n * (self.params.max_tokens or 0)
        return self.most_completion_tokens(max_len)

    def most_completion_tokens(self, max_len: int) -> int:
        """That an engine generates for it."""
        room = max_len - len(self.prompt)
        return self.params.n * min(self.params.max_tokens or room, room)


@dataclass(frozen=True)
class LineFormat(Columns):
    """How the lines of a job that generates are read. A prompt is a text, token ids or messages. Raises ValueError or
    TypeError for a wrong option."""

    PROMPTS = PROMPTS

    sampling: Row = field(default_factory=dict)  # options of SamplingParams for lines without their own
    # The column of a line's images: a path or a URL, or a list of them; None: "images" beside a prompt or messages.
    image_column: str | None = None
    system: str | None = None  # a system message; it makes a conversation of every prompt that is a text
    chat_template: str | None = None  # a Jinja template; None: the tokenizer's
    chat_template_kwargs: Row = field(default_factory=dict, metadata={"rules": (_OBJECT,)})  # its variables
    line_parameters: bool = option(True, FLAG)  # False: columns called as parameters are data
    # True: what a model thinks before </think> is a chat's `reasoning`, not its text.
    split_reasoning: bool = option(False, FLAG)
    # True: what a model calls of a chat's tools is its `tool_calls`, not its text.
    split_tool_calls: bool = option(False, FLAG)
    seed: int | None = None  # makes the answers reproducible, however often the job is interrupted; None: drawn afresh

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "seed", make_params({"seed": self.seed}).seed)  # Raises if it is none.
        _ = self.base_params

    @cached_property
    def added_keys(self) -> tuple[str, ...]:
        """Those that an answer may have."""
        return (*ANSWER_KEYS, *self.text_keys, *self.json_keys)

    @property
    def text_keys(self) -> tuple[str, ...]:
        """Those of added_keys that an answer may lack, and whose values are texts."""
        return ("reasoning",) if self.split_reasoning else ()

    @property
    def json_keys(self) -> tuple[str, ...]:
        """Those of added_keys that an answer may lack, and whose values are JSON in a table."""
        return ("tool_calls", *OPTIONAL_KEYS) if self.split_tool_calls else OPTIONAL_KEYS

    @cached_property
    def base_params(self) -> SamplingParams:
        return make_params(self.sampling)

    def read(self, row: Row, line_id: LineId, lacks_places: Callable[[str], bool] = lambda text: False) -> Line:
        """Raises ValueError or TypeError with what is wrong with the row.

        lacks_places: whether a text does not say where its images are, so that a conversation has to be made of it.
        """
        if openai_batch.is_request(row):
            kind, prompt, given = openai_batch.read_request(row)
            prompt = self._with_system(_read_prompt(kind.prompt, prompt))
            options, chat_options = read_parameters(given, _is_chat(prompt))
            # As OpenAI and vLLM do, such a request ends with its answer unless it says otherwise.
            params = self._params({"max_tokens": None} | self.sampling | options, line_id)
            split = self._split_of(given, chat_options) if _is_chat(prompt) else None
            num_images = _num_images(prompt)
            return Line(prompt, params, {}, self._with_kwargs(chat_options), kind, split, num_images=num_images)
        prompt = self._with_system(_read_prompt(*self._prompt(row)))
        images = self._images(row)
        if images and isinstance(prompt, str) and lacks_places(prompt):
            prompt = [{"role": "user", "content": prompt}]
        is_chat = _is_chat(prompt)
        if is_chat and images:
            prompt, images = _with_images(prompt, images), ()  # type: ignore[arg-type]
        given = {name: value for name, value in row.items() if self._is_parameter(name, value, is_chat)}
        options, chat_options = read_parameters(given, is_chat)
        columns = {
            column_name(name, row, self.added_keys): value
            for name, value in row.items()
            if self.copies(name) and not (name in CHAT_OPTIONS and name in given)
        }
        params = self._params(self.sampling | options, line_id)
        split = self._split_of(row if self.line_parameters else {}, chat_options) if is_chat else None
        num_images = len(images) or _num_images(prompt)
        given_images: Row = {"images": images, "num_images": num_images}
        return Line(prompt, params, columns, self._with_kwargs(chat_options), split=split, **given_images)

    @cached_property
    def _image_column(self) -> str | None:
        if self.image_column is None and self.line_parameters and self.prompt_names == PROMPTS:
            return IMAGES
        return self.image_column

    def check_columns(self, columns: list[str], has_requests: bool = False) -> None:
        super().check_columns(columns, has_requests)
        name = self.image_column
        if name is not None and name not in columns:
            raise ValueError(f"image_column={name!r}: no line has this column; there are: {names_of(columns)}")

    def copies(self, name: str) -> bool:
        return super().copies(name) and name != self._image_column

    def _images(self, row: Row) -> tuple[Any, ...]:
        """Raises ValueError."""
        name = self._image_column
        given = None if name is None else as_list(row.get(name))
        if name is None or is_missing(given):
            return ()
        if isinstance(given, str) and given.lstrip().startswith("["):
            with suppress(ValueError):
                given = parse_json(given)
        if isinstance(given, str | bytes | Mapping) and given:
            given = [given]
        is_right = isinstance(given, list | tuple) and all(isinstance(each, str | bytes | Mapping) for each in given)
        require(name, given, is_right, "a path, a URL, or a list of them")
        return tuple(given)  # type: ignore[arg-type]

    def _split_of(self, given: Row, chat_options: ChatOptions) -> Split | None:
        """given: the parameters of a chat's line."""
        tools = chat_options.tools if self.split_tool_calls and isinstance(chat_options.tools, list) else None
        if not self.split_reasoning and not tools:
            return None
        return Split(self.split_reasoning, tools or None, given.get("parallel_tool_calls") is False)

    @cached_property
    def _parameters(self) -> Container[str]:
        if not self.line_parameters:
            return ()
        return PARAMETERS if self.prompt_names == PROMPTS else PARAMETERS_OF_TABLES

    def _is_parameter(self, name: str, value: Any, is_chat: bool) -> bool:
        if is_missing(value) or not self.copies(name):
            return False
        if name in CHAT_OPTIONS:
            # Beside a text they are taken to say that they need a conversation.
            is_object = isinstance(value, list | dict) or (is_chat and str(value).lstrip()[:1] in ("[", "{"))
            is_request = self._parameters is PARAMETERS
            return (is_object or is_request) if is_chat else (is_object and is_request)
        return name in self._parameters

    def parameter_columns(self, columns: list[str]) -> list[str]:
        return [name for name in columns if name in self._parameters and self.copies(name)]

    def _with_system(self, prompt: str | list[int] | Conversation) -> str | list[int] | Conversation:
        if self.system is None:
            return prompt
        if isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if _is_chat(prompt) and prompt[0]["role"] not in ("system", "developer"):  # type: ignore[index]
            prompt = [{"role": "system", "content": self.system}, *prompt]  # type: ignore[list-item]
        return prompt

    def _with_kwargs(self, options: ChatOptions) -> ChatOptions:
        return options._replace(kwargs=self.chat_template_kwargs | (options.kwargs or {}))

    def _params(self, options: Row, line_id: LineId) -> SamplingParams:
        if self.seed is not None and "seed" not in options:
            options = options | {"seed": xxh3_64_intdigest(id_bytes(line_id), self.seed) >> 1}
        return self.base_params if options == self.sampling else make_params(options)


def _with_images(conversation: Conversation, images: Sequence[Any]) -> Conversation:
    """A conversation whose last message of a user begins with these images. Raises ValueError."""
    if image_sources(conversation):
        raise ValueError(f"has {IMAGES!r} and images in its messages; give them in one way")
    last = max((j for j, message in enumerate(conversation) if message["role"] == "user"), default=None)
    if last is None:
        raise ValueError(f"has {IMAGES!r}, but no message of a user, in which they would be")
    content = conversation[last]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [*({"type": "image", "image": image} for image in images), *parts]
    return [*conversation[:last], conversation[last] | {"content": parts}, *conversation[last + 1 :]]


def _num_images(prompt: Any) -> int:
    return len(image_sources(prompt)) if _is_chat(prompt) else 0


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, list) and isinstance(prompt[0], dict)


def _read_prompt(name: str, value: Any) -> str | list[int] | Conversation:
    """A prompt of a column; name: "" if a template has made it. Under the two names that say what it is, JSON text is
    read too. Raises ValueError."""
    given = value
    if not name:
        return value
    if name in ("prompt_token_ids", "messages") and isinstance(value, str):
        with suppress(ValueError):
            value = parse_json(value)
    if name not in ("prompt_token_ids", "messages") and isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value:
        value = as_token_ids(value)
        if name != "messages" and set(map(type, value)) == {int}:
            return value
        if name != "prompt_token_ids" and all(isinstance(message, dict) for message in value):
            try:
                (conversation,) = as_conversations([value])
            except ValueError as error:
                raise ValueError(str(error).removeprefix("conversation 0, ")) from None
            return conversation
    allowed = {
        "prompt_token_ids": "a list of integers",
        "messages": "a conversation, which is a list of objects with role and content",
    }
    form = allowed.get(name, "a text, token ids or messages, and not empty")
    raise ValueError(f"{name}={quoted(given)}: must be {form}")


# -- ids ---------------------------------------------------------------------------------------------------------------


def read_id(row: Row, id_column: str = "id") -> LineId | None:
    """The id of a row of input; None if it has none. Raises ValueError if it cannot be one."""
    name = "custom_id" if openai_batch.is_request(row) else id_column
    line_id: Any = row.get(name)
    if is_missing(line_id):
        return None
    if is_whole(line_id):
        return int(line_id)  # Tables with a missing value have floats.
    if not isinstance(line_id, str | int) or isinstance(line_id, bool):
        raise ValueError(f"{name}={quoted(line_id)}: must be a text or an integer")
    try:
        if isinstance(line_id, str):
            line_id.encode()
    except UnicodeEncodeError as error:  # Parquet could not hold it.
        raise ValueError(f"{name}={quoted(line_id)}: must be a text or an integer; it {half_pair(error)}") from None
    return line_id


def id_bytes(line_id: LineId) -> bytes:
    """What tells ids apart: 7 and "7" are one."""
    return str(line_id).encode("utf-8", "surrogatepass")


# -- answers -----------------------------------------------------------------------------------------------------------


def num_completion_tokens(output: Mapping[str, Any]) -> int:
    """Of all samples of a RequestOutput; 0 of an error."""
    return sum(len(sample["token_ids"]) for sample in output.get("samples") or [output])


def answer_row(line_id: LineId, line: Line, output: Mapping[str, Any], responder: openai_batch.Responder) -> Row:
    """A row of output. output: the RequestOutput."""
    if line.split is not None:
        output = _parted(output, responder.answers, line.split, is_openai=line.openai is not None)
    if line.openai is not None:
        return responder.answer(line.openai, line_id, output, line.params.logprobs)
    samples = output.get("samples") or [output]
    num_tokens = output["num_prompt_tokens"], num_completion_tokens(output)
    row = {"id": line_id} | _answer(output) | dict(zip(ANSWER_KEYS[-2:], num_tokens, strict=True))
    if len(samples) > 1:
        row["samples"] = list(map(_answer, samples))
    row |= {name: output[name] for name in ("logprobs", "prompt_logprobs") if output[name] is not None}
    return row | line.columns


def _answer(sample: Mapping[str, Any]) -> Row:
    """sample: a SampleOutput, or one with parts."""
    row = {"text": sample.get("content", sample["text"]), "finish_reason": sample["finish_reason"]}
    return row | {name: sample[name] for name in ("reasoning", "tool_calls") if name in sample}


def _parted(output: Mapping[str, Any], answers: AnswerFormat, split: Split, is_openai: bool) -> Row:
    """The result with `content`, and with `reasoning` and `tool_calls` if they are split, and so its samples.

    is_openai: whether they are as OpenAI writes them.
    """
    parts: Row = {}
    if output.get("samples") is not None:
        parts["samples"] = [_parted(sample, answers, split, is_openai) for sample in output["samples"]]
    splitter = answers.splitter(split.tools, split.is_open, split.reasoning)
    reasoning, content, calls = splitter.push(output["text"], output["token_ids"], output["finish_reason"])
    if split.reasoning or is_openai:
        parts["reasoning"] = reasoning if splitter.has_reasoning else None
    if split.tools is not None:
        calls = calls[:1] if split.has_one_call else calls
        parts["tool_calls"] = openai_batch.tool_calls(calls) if is_openai else calls
        if is_openai and calls and output["finish_reason"] == "stop":
            parts["finish_reason"] = "tool_calls"
    return {**output, **parts, "content": content}


class Answered(NamedTuple):
    """What a job needs to know of a row of output."""

    id: LineId
    num_prompt_tokens: int
    num_completion_tokens: int = 0  # Tasks that generate nothing do not write it.


def read_answer(row: Row) -> Answered:
    """Raises KeyError or TypeError if this is no row of output."""
    if "num_prompt_tokens" not in row:  # a request of OpenAI's
        usage = row["response"]["body"]["usage"]
        return Answered(row["custom_id"], usage["prompt_tokens"], usage.get("completion_tokens", 0))
    return Answered(row["id"], row["num_prompt_tokens"], row.get("num_completion_tokens", 0))


# -- JSON --------------------------------------------------------------------------------------------------------------


def from_json(raw: bytes) -> Row:
    """The JSON object of a line, of any depth. Raises NoObject."""
    try:
        row = decode_json(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise NoObject(f"is not UTF-8: {error}") from None
    except ValueError as error:
        raise NoObject(str(error)) from None
    if not isinstance(row, dict):
        raise NoObject(f"must be a JSON object, not {type(row).__name__}")
    return row
