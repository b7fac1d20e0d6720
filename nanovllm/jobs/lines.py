"""One line of a job: from a row of input to a request, and from an answer to a row of output. Knows no files."""

import base64
import json
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from string import Formatter
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from nanovllm.engine.requests.chat import Conversation, as_conversations
from nanovllm.jobs import openai_batch
from nanovllm.jobs.openai_batch import CHAT_OPTIONS, Row
from nanovllm.sampling_params import MAX_SEED, SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import is_int, refuse_constant, require

LineId = str | int

SAMPLING_OPTIONS = tuple(option.name for option in fields(SamplingParams))
ANSWER_KEYS = ("id", "text", "finish_reason", "num_prompt_tokens", "num_completion_tokens")
OPTIONAL_KEYS = ("samples", "logprobs", "prompt_logprobs")  # with n > 1, and where a line asks for them


class Line(NamedTuple):
    """A line that can be served, as far as one knows without the model."""

    prompt: str | list[int] | Conversation  # a text, token ids, or messages for the chat template
    params: SamplingParams
    columns: Row  # what the answer repeats of the input
    chat_options: Row  # variables of the chat template, and tools
    openai: openai_batch.Kind | None = None  # the kind of OpenAI's request, which is answered in OpenAI's format

    @property
    def is_chat(self) -> bool:
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], dict)


@dataclass(frozen=True)
class LineFormat:
    """How the lines of a job are read. Raises ValueError or TypeError for a wrong option."""

    sampling: Row = field(default_factory=dict)  # options of SamplingParams for lines without their own
    # The column that holds the prompt: a text, token ids or messages. None: `prompt`, `prompt_token_ids` or `messages`.
    prompt_column: str | None = None
    template: str | None = None  # makes the prompt of columns: "Summarise: {text}"
    system: str | None = None  # a system message; it makes a conversation of every prompt that is a text
    chat_template_kwargs: Row = field(default_factory=dict)  # variables of the chat template
    seed: int | None = None  # makes the answers reproducible, however often the job is interrupted; None: drawn afresh

    def __post_init__(self) -> None:
        if self.template is not None and self.prompt_column is not None:
            raise ValueError("template: makes the prompt, so that prompt_column cannot be given as well")
        _check_chat_template_kwargs(self.chat_template_kwargs)
        require("seed", self.seed, self.seed is None or is_int(self.seed, 0, MAX_SEED), "None or in 0..2**63 - 1")
        _ = self._base_params, self._template_parts

    @cached_property
    def _base_params(self) -> SamplingParams:
        return make_params(self.sampling)

    @cached_property
    def _template_parts(self) -> list[tuple[str, str | None]]:
        """Pairs of a text and the column that follows it."""
        if self.template is None:
            return []
        try:
            parsed = list(Formatter().parse(self.template))
        except ValueError as error:
            raise ValueError(f"template={self.template!r}: {error}; a brace of the text is written twice") from None
        if not any(name for _, name, _, _ in parsed) or any(name == "" or spec or end for _, name, spec, end in parsed):
            raise ValueError(f"template={self.template!r}: must name columns in braces, as in 'Summarise: {{text}}'")
        return [(text, name) for text, name, _, _ in parsed]

    def read(self, row: Row, line_id: LineId) -> Line:
        """Raises ValueError or TypeError with what is wrong with the row."""
        if openai_batch.is_request(row):
            kind, prompt, options, chat_options = openai_batch.read_request(row)
            # As OpenAI and vLLM do, such a request ends with its answer unless it says otherwise.
            params = self._params({"max_tokens": None} | self.sampling | options, line_id)
            return self._line(prompt, params, {}, chat_options, kind)
        given = {name: row[name] for name in self._option_names if row.get(name) is not None}
        chat_options = {name: given.pop(name) for name in CHAT_OPTIONS if name in given}
        columns = {column_name(name, row): value for name, value in row.items() if self.copies(name)}
        return self._line(self._prompt(row), self._params(self.sampling | given, line_id), columns, chat_options, None)

    @cached_property
    def _prompt_names(self) -> tuple[str, ...]:
        """The columns of which a prompt is made."""
        if self.template is not None:
            return tuple(name for _, name in self._template_parts if name is not None)
        return ("prompt", "prompt_token_ids", "messages") if self.prompt_column is None else (self.prompt_column,)

    @cached_property
    def _option_names(self) -> tuple[str, ...]:
        return tuple(name for name in (*SAMPLING_OPTIONS, *CHAT_OPTIONS) if name not in self._prompt_names)

    def copies(self, name: str) -> bool:
        """Whether answers repeat this column of the input, as `column_name`."""
        return name != "id" and name not in self._option_names and name not in self._prompt_names

    def _prompt(self, row: Row) -> Any:
        if self.template is not None:
            return "".join(text if name is None else text + _text(row, name) for text, name in self._template_parts)
        given = [name for name in self._prompt_names if row.get(name) is not None]
        if len(given) == 1:
            return row[given[0]]
        columns = ", ".join(map(repr, list(row)[:10])) or "none"
        if given:
            raise ValueError(f"has {' and '.join(map(repr, given))}: a line has one prompt")
        missing = " or ".join(map(repr, self._prompt_names))
        raise ValueError(f"has no prompt: {missing} is missing; its columns: {columns}")

    def _line(
        self, prompt: Any, params: SamplingParams, columns: Row, chat_options: Row, kind: openai_batch.Kind | None
    ) -> Line:
        if self.system is not None and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            try:
                (prompt,) = as_conversations([prompt])
            except ValueError as error:
                raise ValueError(str(error).removeprefix("conversation 0, ")) from None
            if self.system is not None and prompt[0]["role"] != "system":
                prompt = [{"role": "system", "content": self.system}, *prompt]
        elif not isinstance(prompt, str | list) or not prompt:
            raise ValueError(f"the prompt must be a text, token ids or messages, and not empty: {prompt!r:.50}")
        elif isinstance(prompt, list) and set(map(type, prompt)) != {int}:
            raise ValueError(f"the prompt's token ids must be integers: {prompt!r:.50}")
        own = chat_options.get("chat_template_kwargs", {})
        _check_chat_template_kwargs(own)
        chat_options["chat_template_kwargs"] = self.chat_template_kwargs | own
        return Line(prompt, params, columns, chat_options, kind)

    def _params(self, options: Row, line_id: LineId) -> SamplingParams:
        if self.seed is not None and "seed" not in options:
            options = options | {"seed": xxh3_64_intdigest(id_bytes(line_id), self.seed) >> 1}
        return self._base_params if options == self.sampling else make_params(options)


def make_params(options: Row) -> SamplingParams:
    """SamplingParams of options as they are written in JSON. Raises TypeError or ValueError."""
    form = options.get("structured_outputs")
    if isinstance(form, Mapping):
        options = options | {"structured_outputs": StructuredOutputsParams(**form)}
    return SamplingParams(**options)


def column_name(name: str, columns: Container[str], added: Container[str] = (*ANSWER_KEYS, *OPTIONAL_KEYS)) -> str:
    """What one of the columns of the input is called in the output, where the names of `added` are taken."""
    if name not in added:
        return name
    name = f"input_{name}"
    while name in columns:
        name = f"input_{name}"
    return name


def _check_chat_template_kwargs(value: object) -> None:
    require("chat_template_kwargs", value, isinstance(value, dict), "a JSON object")


def _text(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None:
        raise ValueError(f"has no {name!r}, which the template needs; its columns: {', '.join(map(repr, row))}")
    return value if isinstance(value, str) else to_json(value)


# -- ids ---------------------------------------------------------------------------------------------------------------


def read_id(row: Row) -> LineId | None:
    """The id of a row of input; None if it has none. Raises ValueError if it cannot be one."""
    name = "custom_id" if openai_batch.is_request(row) else "id"
    line_id = row.get(name)
    if line_id is None or (isinstance(line_id, int) and not isinstance(line_id, bool)) or _is_text(line_id):
        return line_id
    raise ValueError(f"{name}={line_id!r:.50}: must be a text or an integer")


def _is_text(value: object) -> bool:
    """Half of a surrogate pair is none: Parquet could not hold it."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def id_bytes(line_id: LineId) -> bytes:
    """What tells ids apart: 7 and "7" are one."""
    return str(line_id).encode("utf-8", "surrogatepass")


# -- answers -----------------------------------------------------------------------------------------------------------


def answer_row(line_id: LineId, line: Line, output: Mapping[str, Any], model: str) -> Row:
    """A row of output. output: the RequestOutput."""
    samples = output.get("samples") or [output]
    num_tokens = output["num_prompt_tokens"], sum(len(sample["token_ids"]) for sample in samples)
    if line.openai is not None:
        return openai_batch.answer(line.openai, line_id, samples, num_tokens, model)
    row = dict(zip(ANSWER_KEYS, (line_id, output["text"], output["finish_reason"], *num_tokens), strict=True))
    if len(samples) > 1:
        row["samples"] = [{"text": each["text"], "finish_reason": each["finish_reason"]} for each in samples]
    row |= {name: output[name] for name in ("logprobs", "prompt_logprobs") if output[name] is not None}
    return row | line.columns


class Answered(NamedTuple):
    """What a job needs to know of a row of output."""

    id: LineId
    num_prompt_tokens: int
    num_completion_tokens: int


def read_answer(row: Row) -> Answered:
    """Raises KeyError or TypeError if this is no row of output."""
    if "num_prompt_tokens" not in row:  # a request of OpenAI's
        usage = row["response"]["body"]["usage"]
        return Answered(row["custom_id"], usage["prompt_tokens"], usage["completion_tokens"])
    return Answered(row["id"], row["num_prompt_tokens"], row["num_completion_tokens"])


# -- JSON --------------------------------------------------------------------------------------------------------------


_decoder = json.JSONDecoder(parse_constant=refuse_constant)


def from_json(raw: bytes) -> Row:
    """The JSON object of a line. Raises ValueError."""
    try:
        row = _decoder.decode(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(row, dict):
        raise ValueError(f"must be a JSON object, not {type(row).__name__}")
    return row


def to_json(value: Any) -> str:
    """JSON of one line. NaN and infinity become null, and what JSON lacks becomes text."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=_as_text, allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(value), ensure_ascii=False, default=_as_text)
    try:
        text.encode()
        return text
    except UnicodeEncodeError:  # Half of a surrogate pair can only be escaped.
        return json.dumps(_finite(value), default=_as_text)


def _as_text(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
