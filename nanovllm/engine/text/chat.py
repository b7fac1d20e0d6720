"""Conversations to prompts, through the tokenizer's chat template."""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jinja2 import TemplateError

from nanovllm.engine.text.prompts import NO_IMAGES
from nanovllm.engine.text.template_facts import Conversation, Message, TemplateFacts, with_marks
from nanovllm.sampling_params import misplaced_option
from nanovllm.utils.checks import half_pair, one_line, quoted, refuse_constant, shortened
from nanovllm.utils.table_values import as_list, as_mapping, is_map, plain, plain_schema, without_nulls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Iterable[Message] | Iterable[Iterable[Message]]  # one conversation or several, not checked yet
ToolCall = dict[str, Any]
Schema = dict[str, Any]  # of a tool, as OpenAI writes it
Tool = Schema | Callable
Template = str | os.PathLike  # a Jinja template, or its file
Variables = dict[str, Any]  # of a template

_OF_CHAT = ("add_generation_prompt", "chat_template", "continue_final_message", "messages", "tools")
# Arguments of apply_chat_template that are no variables of a template.
_OF_TRANSFORMERS = (
    *("conversation", "max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
    *("tokenize", "tokenizer_kwargs", "truncation"),
)

# How the types of a message's parts begin that nothing reads.
_UNREAD = ("video", "audio", "input_audio", "input_video", "file", "input_file")
# Of images: the type of a part, and the names under which it may have its image. OpenAI's come first.
_IMAGE_KEYS = {
    "image_url": ("image_url",),
    "input_image": ("image_url",),
    "image": ("image", "url", "path", "base64"),
}
_SOURCES = {name for names in _IMAGE_KEYS.values() for name in names}
_DETAILS = ("auto", "high", "original")  # What OpenAI calls reading an image as it is.


def as_conversations(messages: Any) -> list[Conversation]:
    """Checked conversations; the arguments of tool calls are dicts, also where they came as JSON text.

    What tables make of them is undone: a key whose value is null is left out, as an empty list of tool calls is, and
    arrays and the pairs of maps become lists and dicts.

    Args:
        messages: one conversation or a list of them. A message is {"role": ..., "content": ...}, where content is a
            text or a list of {"type": "text", "text": ...} and of images, which become {"type": "image", "image": a
            source as `read_image` takes it}; with "tool_calls" content is optional. Other keys are for the template.

    Raises ValueError, naming the conversation and the message.
    """
    if isinstance(messages, str | Mapping) or not hasattr(messages, "__iter__"):
        raise ValueError(f"messages: must be a list of messages or of conversations, not {type(messages).__name__}")
    messages = [as_list(each) for each in messages]
    is_one = any(not isinstance(each, list | tuple) or is_map(each) for each in messages)
    conversations = []
    for i, conversation in enumerate([messages] if is_one else messages):
        if not conversation:
            raise ValueError(f"conversation {i}: is empty: it must hold at least one message")
        conversations.append([_check_message(m, f"conversation {i}, message {j}") for j, m in enumerate(conversation)])
    return conversations


def _check_message(message: object, where: str) -> Message:
    message = as_mapping(message)
    if not isinstance(message, dict | Mapping):
        raise ValueError(f"{where}: must be a dict with role and content, not {type(message).__name__}")
    checked = without_nulls(message)
    role, content = checked.get("role"), as_list(checked.get("content"))
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}: role={quoted(role)}: must be a text such as 'user'")
    if "function_call" in checked:
        raise ValueError(f"{where}: function_call: tool_calls takes its place")
    calls = None
    if "tool_calls" in checked and (calls := _check_tool_calls(checked.pop("tool_calls"), where)):
        checked["tool_calls"] = calls
    if isinstance(content, str) or (content is None and calls):
        return checked
    if not isinstance(content, list | tuple):
        raise ValueError(f"{where}: content must be a text or a list of parts, not {type(content).__name__}")
    return checked | {
        "content": [_check_part(as_mapping(part), f"{where}: content[{k}]") for k, part in enumerate(content)]
    }


def _check_part(part: Any, where: str) -> dict[str, Any]:
    """A part of a message's content: a text, or an image as {"type": "image", "image": source}."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and kind in _IMAGE_KEYS:
        return {"type": "image", "image": _image_source(without_nulls(part), kind, where)}
    if isinstance(kind, str) and kind.startswith(_UNREAD):
        raise ValueError(f"{where} has type {quoted(kind)}, which is not read: texts and images are")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise ValueError(f'{where} must be {{"type": "text", "text": ...}} or an image')
    checked = without_nulls(part)
    if images := {"image", "image_url"} & checked.keys():
        raise ValueError(f"{where} is a text, and has {', '.join(sorted(images))}: an image is a part of its own")
    return checked


def _image_source(part: dict[str, Any], kind: str, where: str) -> Any:
    given = [name for name in part if name in _SOURCES]
    if len(given) > 1:
        raise ValueError(f"{where} is one image, and has {' and '.join(given)}: give it in one way")
    if part.get("text"):
        raise ValueError(f"{where} is an image, and has a text: that is a part of its own")
    if len(given) != 1 or given[0] not in _IMAGE_KEYS[kind]:
        form = '{"type": "image_url", "image_url": {"url": ...}} or {"type": "image", "image": ...}'
        raise ValueError(f"{where} is an image, and must have the form {form}")
    source, detail = part[given[0]], part.get("detail", "auto")
    if given[0] == "image_url" and isinstance(source := as_mapping(source), Mapping):
        detail, source = source.get("detail") or detail, source.get("url")
    if detail not in _DETAILS:
        raise ValueError(f"{where}: detail={quoted(detail)}: cannot be served: images are read as they are")
    if source is None or (given[0] in ("image_url", "url", "base64") and not isinstance(source, str)):
        raise ValueError(f"{where}: {given[0]} must be the text of a URL, not {type(source).__name__}")
    return f"data:;base64,{source}" if given[0] == "base64" else source


def image_sources(conversation: Conversation) -> list[Any]:
    """The images of a checked conversation, in its order, as `read_image` takes them."""
    parts = (part for message in conversation for part in _parts(message))
    return [part["image"] for part in parts if part["type"] == "image"]


def with_images(conversation: Conversation, images: Iterable[Any]) -> Conversation:
    """A checked conversation with these instead of its images, in its order."""
    left = iter(images)

    def replaced(part: dict[str, Any]) -> dict[str, Any]:
        return {"type": "image", "image": next(left)} if part["type"] == "image" else part

    return [
        message | {"content": list(map(replaced, parts))} if (parts := _parts(message)) else message
        for message in conversation
    ]


def _first_image(conversation: Conversation) -> str:
    """Where it is."""
    kinds = ((j, k, part["type"]) for j, m in enumerate(conversation) for k, part in enumerate(_parts(m)))
    return next(f"message {j}: content[{k}]" for j, k, kind in kinds if kind == "image")


def _without_sources(conversation: Conversation) -> Conversation:
    """The template says where images are, and has no use for what is in them."""
    place = {"type": "image"}
    return [
        message | {"content": [place if part["type"] == "image" else part for part in parts]}
        if (parts := _parts(message))
        else message
        for message in conversation
    ]


def _parts(message: Message) -> list[dict[str, Any]]:
    """None of a content that is a text."""
    content = message.get("content")
    return content if isinstance(content, list) else []


def _check_tool_calls(calls: object, where: str) -> list[ToolCall]:
    calls = as_list(calls)
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{where}: tool_calls must be a list, not {type(calls).__name__}")
    checked = []
    for k, each in enumerate(calls):
        call = as_mapping(each)
        call = without_nulls(call) if isinstance(call, Mapping) else call
        function = as_mapping(call.get("function", call)) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError(f'{where}: tool_calls[{k}] must be {{"function": {{"name": ..., "arguments": ...}}}}')
        function = without_nulls(function)
        if "arguments" in function:
            try:
                function["arguments"] = _as_arguments(function["arguments"])
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{where}: tool_calls[{k}]: arguments must be a JSON object, or the text of one: {error}"
                ) from error
        checked.append(call | {"function": function} if "function" in call else function)
    return checked


def _as_arguments(value: object) -> dict[str, Any]:
    if isinstance(value, str):
        parsed = json.loads(value or "{}", parse_constant=refuse_constant)
    else:
        parsed = plain(as_mapping(value))
    if not isinstance(parsed, dict):
        raise ValueError(f"{quoted(value)} is none")
    return parsed


def _read_template(chat_template: object, names: object) -> str | None:
    """The template of an argument: its text, the file that it names, or one of the tokenizer's templates by its name.
    Raises TypeError or ValueError, naming the argument."""
    if chat_template is None or (isinstance(chat_template, str) and isinstance(names, dict) and chat_template in names):
        return chat_template
    if not isinstance(chat_template, str | os.PathLike):
        raise TypeError(
            f"chat_template: must be the text of a Jinja template, or its file, not {type(chat_template).__name__}"
        )
    if isinstance(chat_template, str) and _is_template(chat_template):
        return chat_template
    try:
        text = Path(chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"chat_template={quoted(chat_template)}: is no Jinja template, which has {{{{ or {{%, and no file of one: "
            f"{shortened(error)}"
        ) from error
    if not _is_template(text):
        raise ValueError(
            f"chat_template={quoted(chat_template)}: this file is no Jinja template: it has no {{{{ or {{%"
        )
    return text


def _is_template(text: str) -> bool:
    return "{{" in text or "{%" in text


def _check_template_kwargs(chat_template_kwargs: object) -> None:
    """Raises TypeError or ValueError, naming the argument."""
    if chat_template_kwargs is None:
        return
    if not isinstance(chat_template_kwargs, Mapping) or not all(isinstance(name, str) for name in chat_template_kwargs):
        raise TypeError(
            f"chat_template_kwargs={quoted(chat_template_kwargs)}: must be a dict of the template's variables"
        )
    for name in chat_template_kwargs:
        if name in _OF_CHAT:
            raise ValueError(f"chat_template_kwargs: {name!r} is an argument of chat()")
        if name in _OF_TRANSFORMERS:
            raise ValueError(
                f"chat_template_kwargs: {name!r} is no variable of a template: chat() renders and reads whole prompts"
            )


def as_tools(tools: Iterable[Tool] | None) -> list[Schema] | None:
    """The schemas of tools, as chat templates read them; None if there are none. What tables make of schemas is undone,
    as in as_conversations.

    Args:
        tools: a list of OpenAI's tool schemas, or of functions with type hints and a docstring in Google's style.

    Raises TypeError or ValueError, naming the tool.
    """
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or callable(tools) or not hasattr(tools, "__iter__"):
        raise TypeError(f"tools: must be a list of schemas or functions, not {type(tools).__name__}")
    return [_as_schema(tool, f"tools[{i}]") for i, tool in enumerate(as_list(tools))] or None


def _as_schema(tool: object, where: str) -> Schema:
    tool = as_mapping(tool)
    if isinstance(tool, Mapping):
        try:
            schema: Any = plain_schema(tool)
        except RecursionError:
            raise ValueError(f"{where}: is nested too deep") from None
        function = schema.get("function", schema)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'{where}: must be {{"type": "function", "function": {{"name": ..., "description": ..., "parameters": '
                "...}}"
            )
        return schema
    if not callable(tool) or isinstance(tool, type):
        raise TypeError(f"{where}: must be a schema or a function, not {type(tool).__name__}")
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:  # transformers' own classes
        raise ValueError(f"{where}: no schema can be made of {quoted(tool)}: {shortened(error)}") from error


def misplaced_chat_option(name: str, value: object) -> str:
    """Where an option that chat() does not have probably belongs."""
    variable = f'a variable of the chat template goes into chat_template_kwargs={{"{name}": {quoted(value)}}}'
    return misplaced_option(name, value) or variable


class Rendered(NamedTuple):
    """A conversation as the prompt's text, and the sources of the images that have a place in it, in order."""

    text: str
    images: list[Any]


class TemplateRenderer:
    """Renders conversations with one tokenizer's chat template, or another.

    Attributes:
        reads_images: whether they may have images.
    """

    reads_images = False

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None"):
        self._tokenizer: Any = tokenizer  # Their types leave open what a call returns.
        self._facts = TemplateFacts(tokenizer)

    def render(
        self,
        messages: Messages,
        chat_template: Template | None,
        chat_template_kwargs: Variables | None,
        tools: Iterable[Tool] | None,
        needed: Iterable[str] = (),
        **options: Any,
    ) -> list[Rendered]:
        """The text of each conversation. Raises ValueError or TypeError, naming the argument or the conversation.

        Args:
            messages, tools: as in as_conversations and as_tools.
            chat_template: a Jinja template or its file; None uses the tokenizer's.
            chat_template_kwargs: variables of the template.
            needed: those of them that the template must use.
            options: other arguments of apply_chat_template.
        """
        own = getattr(self._tokenizer, "chat_template", None)
        template = _read_template(chat_template, own)
        _check_template_kwargs(chat_template_kwargs)
        if template is None and not own:
            raise ValueError(
                "chat_template: the model's tokenizer has none; pass one, or give generate() whole prompts"
            )
        conversations, tools = as_conversations(messages), as_tools(tools)
        template = self._tokenizer.get_chat_template(template, tools)
        for name in needed:
            if name not in template:
                raise ValueError(f"{name}: the chat template does not use it")
        if tools and "tools" not in template:
            raise ValueError("tools: the chat template has no place for them; pass a chat_template that has")
        options = {"chat_template": template, "tools": tools} | options | (chat_template_kwargs or {})
        rendered = []
        for i, conversation in enumerate(conversations):
            if images := image_sources(conversation):
                if not self.reads_images:
                    raise ValueError(f"conversation {i}, {_first_image(conversation)} {NO_IMAGES}")
                conversation = _without_sources(conversation)
            rendered.append(Rendered(self._render(conversation, template, options, f"conversation {i}"), images))
        return rendered

    def template_text(self, chat_template: Template | None) -> str:
        """The text of a template as `render` takes it: of all of the tokenizer's, if it has several."""
        own = getattr(self._tokenizer, "chat_template", None)
        template = _read_template(chat_template, own)
        if isinstance(own, dict):
            return "\n".join(own.values()) if template is None else own.get(template, template)
        return (own or "") if template is None else template

    def _render(self, conversation: Conversation, template: str, options: Variables, where: str) -> str:
        """Raises ValueError."""
        try:
            expected, hidden = self._facts.as_expected(conversation, template)
            text = self._apply(expected, options)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if hidden:
            self._check_shown(expected, hidden, template, options, where)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(_describe_half_pair(conversation, options["tools"], where, error)) from error
        return text

    def _check_shown(
        self, conversation: Conversation, indices: list[int], template: str, options: Variables, where: str
    ) -> None:
        """Raises ValueError for the first of these messages that is not in the text."""
        conversation, marks = with_marks(conversation, indices)
        try:
            text = self._apply(conversation, options)
        except ValueError:
            return  # The template reads what messages say.
        for j, mark in marks.items():
            if mark in text:
                continue
            role = conversation[j]["role"]
            roles = ", ".join(self._facts.shown_roles(template))
            hint = "; calls go into tool_calls, and what they return into the role tool" * (role == "function")
            raise ValueError(
                f"{where}, message {j}: role={quoted(role)}: the chat template leaves it out of the prompt here; it "
                f"shows {roles or 'no role'}{hint}"
            )

    def _apply(self, conversation: Conversation, options: Variables) -> str:
        """Raises ValueError."""
        try:
            return self._tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        except Exception as error:  # Templates raise whatever they like: they divide by zero and call themselves.
            # A message with tool calls alone has no content. Some templates add it to a text.
            if any("content" not in m for m in conversation):
                return self._apply([{"content": ""} | m for m in conversation], options)
            reason = shortened(error) if isinstance(error, TemplateError) else one_line(error)
            raise ValueError(f"the chat template cannot render it: {reason}") from error


def _describe_half_pair(
    conversation: Conversation, tools: list[Schema] | None, where: str, error: UnicodeEncodeError
) -> str:
    """Which message or tool holds half of a surrogate pair. error: of the whole text."""
    named = [(f"{where}, message {j}, {name}", value) for j, m in enumerate(conversation) for name, value in m.items()]
    for name, value in [*named, *((f"tools[{i}]", tool) for i, tool in enumerate(tools or ()))]:
        for text in _texts(value):
            try:
                text.encode()
            except UnicodeEncodeError as own:
                return f"{name}: {half_pair(own)}"
    return f"{where}: the rendered text {half_pair(error)}"


def _texts(value: Any) -> Iterator[str]:
    """All texts in a value of any depth, keys included."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            left += [*value.values(), *value]
        elif isinstance(value, list | tuple):
            left += value
