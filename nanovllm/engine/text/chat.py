"""Conversations to prompts, through the tokenizer's chat template."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from nanovllm.sampling_params import misplaced_option
from nanovllm.utils.checks import one_line, quoted, refuse_constant, shortened

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]
Conversation = list[Message]
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

# How the types of a message's parts begin that are no texts.
_NO_TEXTS = ("image", "video", "audio", "input_image", "input_audio")
_MAX_KNOWN = 64  # templates; what each expects is kept
_PROBES = ("first-probe", "second-probe")  # texts that no template has of its own


def as_conversations(messages: Any) -> list[Conversation]:
    """Checked conversations; the arguments of tool calls are dicts, also where they came as JSON text.

    Args:
        messages: one conversation or a list of them. A message is {"role": ..., "content": ...}, where content is a
            text or a list of {"type": "text", "text": ...}; with "tool_calls" content is optional. Other keys are for
            the template.

    Raises ValueError, naming the conversation and the message.
    """
    if isinstance(messages, str | Mapping) or not hasattr(messages, "__iter__"):
        raise ValueError(f"messages: must be a list of messages or of conversations, not {type(messages).__name__}")
    messages = list(messages)
    is_one = any(not isinstance(message, list | tuple) for message in messages)
    conversations = []
    for i, conversation in enumerate([messages] if is_one else messages):
        if not conversation:
            raise ValueError(f"conversation {i}: is empty: it must hold at least one message")
        conversations.append([_check_message(m, f"conversation {i}, message {j}") for j, m in enumerate(conversation)])
    return conversations


def _check_message(message: object, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: must be a dict with role and content, not {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}: role={quoted(role)}: must be a text such as 'user'")
    calls = message.get("tool_calls")
    checked = dict(message) if calls is None else dict(message) | {"tool_calls": _check_tool_calls(calls, where)}
    if isinstance(content, str) or (content is None and calls):
        return checked
    if not isinstance(content, list | tuple):
        raise ValueError(f"{where}: content must be a text or a list of text parts, not {type(content).__name__}")
    for k, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if isinstance(kind, str) and kind.startswith(_NO_TEXTS):
            raise ValueError(f"{where}: content[{k}] has type {quoted(kind)}: only the text part of a model is loaded")
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'{where}: content[{k}] must be {{"type": "text", "text": ...}}')
    return checked | {"content": [dict(part) for part in content]}


def _check_tool_calls(calls: object, where: str) -> list[ToolCall]:
    if not isinstance(calls, list | tuple):
        raise ValueError(f"{where}: tool_calls must be a list, not {type(calls).__name__}")
    checked = []
    for k, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise ValueError(f'{where}: tool_calls[{k}] must be {{"function": {{"name": ..., "arguments": ...}}}}')
        function = dict(function)
        if function.get("arguments") is not None:
            try:
                function["arguments"] = _as_arguments(function["arguments"])
            except (ValueError, RecursionError) as error:
                raise ValueError(
                    f"{where}: tool_calls[{k}]: arguments must be a JSON object, or the text of one: {error}"
                ) from error
        checked.append(dict(call) | {"function": function} if "function" in call else function)
    return checked


def _as_arguments(value: object) -> dict[str, Any]:
    parsed = json.loads(value or "{}", parse_constant=refuse_constant) if isinstance(value, str) else value
    if not isinstance(parsed, Mapping):
        raise ValueError(f"{quoted(value)} is none")
    return dict(parsed)


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
    """The schemas of tools, as chat templates read them; None if there are none.

    Args:
        tools: a list of OpenAI's tool schemas, or of functions with type hints and a docstring in Google's style.

    Raises TypeError or ValueError, naming the tool.
    """
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or callable(tools) or not hasattr(tools, "__iter__"):
        raise TypeError(f"tools: must be a list of schemas or functions, not {type(tools).__name__}")
    return [_as_schema(tool, f"tools[{i}]") for i, tool in enumerate(tools)] or None


def _as_schema(tool: object, where: str) -> Schema:
    if isinstance(tool, Mapping):
        function = tool.get("function", tool)
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f'{where}: must be {{"type": "function", "function": {{"name": ..., "description": ..., "parameters": '
                "...}}"
            )
        return dict(tool)
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


class TemplateRenderer:
    """Renders conversations with one tokenizer's chat template, or another."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None"):
        self._tokenizer: Any = tokenizer  # Their types leave open what a call returns.
        self._expected_content = lru_cache(_MAX_KNOWN)(self._find_expected_content)
        self._expects_json = lru_cache(_MAX_KNOWN)(self._find_whether_json_is_expected)

    def render(
        self,
        messages: Messages,
        chat_template: Template | None,
        chat_template_kwargs: Variables | None,
        tools: Iterable[Tool] | None,
        needed: Iterable[str] = (),
        **options: Any,
    ) -> list[str]:
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
        texts = []
        for i, conversation in enumerate(conversations):
            try:
                texts.append(self._render([self._as_expected(message, template) for message in conversation], options))
            except ValueError as error:
                raise ValueError(f"conversation {i}: {error}") from error
        return texts

    def template_text(self, chat_template: Template | None) -> str:
        """The text of a template as `render` takes it: of all of the tokenizer's, if it has several."""
        own = getattr(self._tokenizer, "chat_template", None)
        template = _read_template(chat_template, own)
        if isinstance(own, dict):
            return "\n".join(own.values()) if template is None else own.get(template, template)
        return (own or "") if template is None else template

    def _render(self, conversation: Conversation, options: Variables) -> str:
        """Raises ValueError."""
        try:
            return self._tokenizer.apply_chat_template(conversation, tokenize=False, **options)
        except Exception as error:  # Templates raise whatever they like: they divide by zero and call themselves.
            # A message with tool calls alone has None for its content. Some templates add content to a text.
            if any(m.get("content") is None for m in conversation):
                return self._render([m | {"content": m.get("content") or ""} for m in conversation], options)
            reason = shortened(error) if isinstance(error, TemplateError) else one_line(error)
            raise ValueError(f"the chat template cannot render it: {reason}") from error

    def _as_expected(self, message: Message, template: str) -> Message:
        """The message as the template expects it: its content as a text or a list of parts, the arguments of tool calls
        as mappings or as JSON text."""
        if message.get("tool_calls") and self._expects_json(template):
            message = message | {"tool_calls": [_with_json(call) for call in message["tool_calls"]]}
        content = message.get("content")
        if content is None:
            return message
        expected = self._expected_content(template, message["role"]) or self._expected_content(template, "user")
        if isinstance(content, str):
            is_right = "text" in expected or not expected
            return message if is_right else message | {"content": [{"type": "text", "text": content}]}
        return message if "parts" in expected else message | {"content": "\n".join(part["text"] for part in content)}

    def _find_expected_content(self, template: str, role: str) -> tuple[str, ...]:
        """What the template shows of a message's content: "text", "parts", both or none. Tried out, because templates
        may pass it through macros."""
        expected = []
        parts = [{"type": "text", "text": probe} for probe in _PROBES]
        forms = {"text": " ".join(_PROBES), "parts": parts}
        for name, content in forms.items():
            other: Message = {"role": "user", "content": "x"}
            message: Message = {"role": role, "content": content}
            conversation = [message] if role == "user" else [message, other] if role == "system" else [other, message]
            text = self._try_out(template, conversation)
            # In quotes, it is the list as Python or JSON writes it.
            if all(probe in text and f"'{probe}'" not in text and f'"{probe}"' not in text for probe in _PROBES):
                expected.append(name)
        return tuple(expected)

    def _find_whether_json_is_expected(self, template: str) -> bool:
        """Whether the template writes arguments of tool calls only if they are a text."""
        name, value = _PROBES
        shown = []
        for arguments in ({name: value}, json.dumps({name: value})):
            function = {"name": "f", "arguments": arguments}
            call = {"id": "abcdefghi", "type": "function", "function": function, **function}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
            text = self._try_out(template, [{"role": "user", "content": "x"}, message])
            shown.append(name in text and f"'{name}': '{value}'" not in text)
        return shown == [False, True]

    def _try_out(self, template: str, conversation: Conversation) -> str:
        """The rendered conversation, or nothing if the template refuses it."""
        try:
            return self._tokenizer.apply_chat_template(conversation, chat_template=template, tokenize=False)
        except Exception:  # Templates raise whatever they like, also of what they do not expect.
            return ""


def _with_json(call: ToolCall) -> ToolCall:
    """A tool call with its arguments as text."""
    function = call.get("function", call)
    function = function | {"arguments": json.dumps(function.get("arguments") or {}, ensure_ascii=False)}
    return call | {"function": function} if "function" in call else function
