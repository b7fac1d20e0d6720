"""The names that OpenAI's and vLLM's requests have for parameters, to SamplingParams' and the chat template's."""

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, NamedTuple, get_type_hints

from nanovllm import SamplingParams, StructuredOutputsParams
from nanovllm.utils.checks import is_whole, quoted, require
from nanovllm.utils.option_hints import HINTS
from nanovllm.utils.table_values import as_mapping
from nanovllm.utils.text_json import parse_json

Row = dict[str, Any]

SAMPLING_OPTIONS = tuple(option.name for option in fields(SamplingParams))
_KINDS = get_type_hints(SamplingParams)
_INTEGERS = {name for name, kind in _KINDS.items() if kind in (int, int | None)}
_TOKEN_IDS = {name for name, kind in _KINDS.items() if kind in (Collection[int], Collection[int] | None)}
_WHOLE = re.compile(r"([0-9]+)(\.0+)?")
CHAT_OPTIONS = ("tools", "chat_template_kwargs")  # They belong to a conversation, as its messages do.

# What does not change a request: the account's, the service's, or about things that a file lacks. Who takes calls out
# of an answer's text reads parallel_tool_calls.
_WITHOUT_EFFECT = {
    *("cache_salt", "guided_decoding_backend", "metadata", "model", "parallel_tool_calls", "priority"),
    *("prompt_cache_key", "request_id", "safety_identifier", "service_tier", "store", "stream_options", "user"),
}
_INNER = ("sampling_params", "extra_body")  # objects that hold further parameters
_GUIDED = {f"guided_{name}": name for name in ("json", "regex", "choice", "grammar", "whitespace_pattern")}
_TEMPLATE_VARIABLES = ("reasoning_effort", "documents")

# What can only be served with one of these values, or not at all; and what to do instead.
_UNSERVED: dict[str, tuple[tuple[Any, ...], str]] = {
    "add_generation_prompt": ((True,), ""),
    "add_special_tokens": ((), "token ids say exactly what a prompt is"),  # What is the default is served.
    "audio": ((), "answers are text"),
    "best_of": ((1,), HINTS["SamplingParams"]["best_of"]),
    "chat_template": ((), "--chat-template, or a job's chat_template, is for all requests"),
    "continue_final_message": ((False,), "render the conversation yourself, and give it as the prompt"),
    "detokenize": ((True,), ""),
    "do_sample": ((True,), HINTS["SamplingParams"]["do_sample"]),
    "echo": ((False,), "the request has the prompt"),
    "function_call": (("auto", "none"), "tool_choice takes its place"),
    "functions": (([],), "use tools"),
    "include_reasoning": ((True,), ""),
    "length_penalty": ((1,), HINTS["SamplingParams"]["length_penalty"]),
    "logprob_token_ids": ((), "LLM.generate can"),
    "logits_processors": (([],), HINTS["SamplingParams"]["logits_processors"]),
    "mm_processor_kwargs": (({},), "prompts are text"),
    "modalities": ((["text"],), "answers are text"),
    "prediction": ((), ""),
    "prompt_embeds": ((), "prompts are text or token ids"),
    "return_token_ids": ((False,), ""),
    "return_tokens_as_token_ids": ((False,), ""),
    "spaces_between_special_tokens": ((True,), HINTS["SamplingParams"]["spaces_between_special_tokens"]),
    "stream": ((False,), "a job writes whole answers"),
    "structural_tag": ((), HINTS["StructuredOutputsParams"]["structural_tag"]),
    "suffix": (("",), "put it into the prompt, as the model's format for filling in wants it"),
    "truncate_prompt_tokens": ((), HINTS["SamplingParams"]["truncate_prompt_tokens"]),
    "use_beam_search": ((False,), HINTS["SamplingParams"]["use_beam_search"]),
    "verbosity": (("medium",), "say it in the prompt"),
    "web_search_options": ((), ""),
}

# Names that a column of any table may have. They are parameters only beside `prompt`, `prompt_token_ids` or `messages`.
_EVERYDAY = {"audio", "documents", "echo", "functions", "modalities", "prediction", "stream", "suffix", "verbosity"}
_OTHER_MEANINGS = {"early_stopping", "max_length"}  # of transformers' names; nothing of OpenAI or vLLM is called so
_SERVED = (
    *("max_completion_tokens", "top_logprobs", "response_format", "tool_choice", "guided_decoding"),
    *("guided_json_object", *_INNER, *_GUIDED, *_TEMPLATE_VARIABLES),
)
PARAMETERS = {*SAMPLING_OPTIONS, *_SERVED, *_UNSERVED, *HINTS["SamplingParams"]} - _OTHER_MEANINGS
PARAMETERS_OF_TABLES = PARAMETERS - _EVERYDAY

# Objects and lists, which a cell of a table may hold as JSON text.
_AS_JSON = {
    *CHAT_OPTIONS,
    *_INNER,
    "documents",
    "guided_decoding",
    "logit_bias",
    "response_format",
    "structured_outputs",
}


class ChatOptions(NamedTuple):
    """What the chat template gets beside the messages."""

    tools: Any = None
    kwargs: Row | None = None
    needed: tuple[str, ...] = ()  # variables among kwargs that the template must use: a request says something by them


def read_parameters(given: Row, is_chat: bool) -> tuple[Row, ChatOptions]:
    """Options of SamplingParams, and those of the chat template.

    given: parameters of a request, under any of their names. Names that nobody knows become options of SamplingParams,
    which refuses them. Raises ValueError or TypeError with what cannot be served.
    """
    if not given:
        return {}, ChatOptions()
    given = {name: _as_object(name, value) for name, value in _flat(given).items() if name not in _WITHOUT_EFFECT}
    for name in [name for name in given if name in _UNSERVED]:
        value, (harmless, remedy) = given.pop(name), _UNSERVED[name]
        if value not in harmless and (name != "add_special_tokens" or value is is_chat):
            raise ValueError(f"{name}={quoted(value)}: cannot be served{remedy and f'; {remedy}'}")
    tools, kwargs = given.pop("tools", None), given.pop("chat_template_kwargs", {})
    variables = {name: given.pop(name) for name in _TEMPLATE_VARIABLES if name in given}
    kwargs = as_mapping(kwargs)
    require("chat_template_kwargs", kwargs, isinstance(kwargs, dict), "a JSON object")
    choice = given.pop("tool_choice", "auto")
    require("tool_choice", choice, choice in ("auto", "none"), "'auto' or 'none': a call cannot be forced")
    of_chat = {"tools": tools, "chat_template_kwargs": kwargs} | variables
    if not is_chat and (named := [name for name, value in of_chat.items() if value]):
        raise ValueError(f"{named[0]}: needs 'messages', because only a conversation has a chat template")
    _rename_logprobs(given)
    _rename(given, "max_completion_tokens", "max_tokens")
    _read_form(given)
    return given, ChatOptions(None if choice == "none" else tools, kwargs | variables, tuple(variables))


def as_token_ids(prompt: Any) -> Any:
    """Token ids with whole floats as the integers that they are. Any other prompt as it is."""
    if not isinstance(prompt, list) or float not in set(map(type, prompt)):
        return prompt
    return list(map(_as_integer, prompt))


def _as_integer(value: Any) -> Any:
    return int(value) if is_whole(value) else value


def _as_token_id(key: Any) -> Any:
    """Keys of JSON are texts."""
    match = _WHOLE.fullmatch(key) if isinstance(key, str) else None
    return _as_integer(key) if match is None else int(match[1])


def _with_integers(name: str, value: Any) -> Any:
    """An option's value with integers where JSON and tables have whole floats: a column of pandas has floats if one of
    its values is missing."""
    if name in _INTEGERS:
        return _as_integer(value)
    if name in _TOKEN_IDS:
        return as_token_ids(value)
    if name == "logit_bias" and isinstance(value := as_mapping(value), Mapping):
        return {_as_token_id(key): bias for key, bias in value.items()}
    return value


def make_params(options: Row) -> SamplingParams:
    """SamplingParams of options as they are written in JSON. Raises TypeError or ValueError."""
    form = options.get("structured_outputs")
    if isinstance(form, Mapping):
        options = options | {"structured_outputs": StructuredOutputsParams(**form)}
    return SamplingParams(**{name: _with_integers(name, value) for name, value in options.items()})


def _flat(given: Row) -> Row:
    """Adds the parameters that lie in objects. Raises ValueError for one that is given twice."""
    flat = {name: value for name, value in given.items() if name not in _INNER}
    for name in _INNER:
        if name not in given:
            continue
        inner = as_mapping(_as_object(name, given[name]))
        require(name, inner, isinstance(inner, dict), "a JSON object")
        for key, value in _flat({key: value for key, value in inner.items() if value is not None}).items():
            if flat.setdefault(key, value) != value:
                raise ValueError(f"{key}: is given twice, as {quoted(flat[key])} and in {name} as {quoted(value)}")
    return flat


def _as_object(name: str, value: Any) -> Any:
    if name not in _AS_JSON or not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"{name}={quoted(value)}: {error}") from None


def _rename(given: Row, name: str, to: str) -> None:
    if name in given:
        value = given.pop(name)
        if given.setdefault(to, value) != value:
            raise ValueError(f"{name}={quoted(value)}: {to}={quoted(given[to])} says otherwise")


def _rename_logprobs(given: Row) -> None:
    """OpenAI's chats say whether log-probabilities are wanted, and apart from that how many."""
    top = given.pop("top_logprobs", None)
    if isinstance(given.get("logprobs"), bool):
        if given.pop("logprobs"):
            given["logprobs"] = top or 0
        elif top:
            raise ValueError(f"top_logprobs={quoted(top)}: needs logprobs=true")
    elif top and given.setdefault("logprobs", None) != top:
        raise ValueError(f"top_logprobs={quoted(top)}: needs logprobs=true")


def _read_form(given: Row) -> None:
    """The form that an answer must have, by any of its names."""
    forms = {
        "structured_outputs": given.pop("structured_outputs", None),
        "guided_decoding": given.pop("guided_decoding", None),
    }
    forms["response_format"] = _read_response_format(given.pop("response_format", {"type": "text"}))
    guided = {to: given.pop(name) for name, to in _GUIDED.items() if name in given}
    if given.pop("guided_json_object", False):
        guided["json"] = {"type": "object"}
    forms["guided_..."] = guided or None
    found = {name: form for name, form in forms.items() if form is not None}
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)}: an answer has one form")
    for form in found.values():
        given["structured_outputs"] = form


def _read_response_format(form: Any) -> Row | None:
    match form:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() | str() as schema}}:
            return {"json": schema}
    types = "text, json_object, or json_schema with a schema"
    raise ValueError(f"response_format={quoted(form)}: must be of type {types}")
