"""Conversations to prompts, through the tokenizer's chat template."""

from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import TemplateError

from nanovllm.sampling_params import misplaced_option
from nanovllm.utils.checks import quoted, shortened

Message = dict[str, Any]
Conversation = list[Message]
Tool = dict[str, Any] | Callable

_OF_CHAT = ("add_generation_prompt", "chat_template", "continue_final_message", "messages", "tools")
# Arguments of apply_chat_template that are no variables of a template.
_OF_TRANSFORMERS = (
    *("conversation", "max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors"),
    *("tokenize", "tokenizer_kwargs", "truncation"),
)


def as_conversations(messages: Any) -> list[Conversation]:
    """Checked conversations; the text parts of a message are joined by line feeds.

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


def _check_message(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: must be a dict with role and content, not {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}: role={quoted(role)}: must be a text such as 'user'")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return dict(message)
    if not isinstance(content, list | tuple):
        raise ValueError(f"{where}: content must be a text or a list of text parts, not {type(content).__name__}")
    for k, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'{where}: content[{k}] must be {{"type": "text", "text": ...}}')
    return dict(message) | {"content": "\n".join(part["text"] for part in content)}


def _check_template_options(chat_template: Any, chat_template_kwargs: Any) -> None:
    """Raises TypeError or ValueError, naming the argument."""
    if chat_template is not None and not isinstance(chat_template, str):
        raise TypeError(f"chat_template: must be the text of a Jinja template, not {type(chat_template).__name__}")
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


def as_tools(tools: Any) -> list[dict[str, Any]] | None:
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


def _as_schema(tool: Any, where: str) -> dict[str, Any]:
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


def render_chat(
    tokenizer: Any,
    messages: Any,
    chat_template: str | None,
    chat_template_kwargs: dict[str, Any] | None,
    tools: Any,
    **options: bool,
) -> list[list[int]]:
    """Token ids of each conversation. Raises ValueError or TypeError, naming the argument or the conversation.

    Args:
        messages, tools: as in as_conversations and as_tools.
        chat_template: a Jinja template; None uses the tokenizer's.
        chat_template_kwargs: variables of the template.
        options: other arguments of apply_chat_template.
    """
    _check_template_options(chat_template, chat_template_kwargs)
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat_template: the model's tokenizer has none; pass one, or give generate() whole prompts")
    conversations, tools = as_conversations(messages), as_tools(tools)
    if tools and "tools" not in tokenizer.get_chat_template(chat_template, tools):
        raise ValueError("tools: the chat template has no place for them; pass a chat_template that has")
    options = {"chat_template": chat_template, "tools": tools} | options | (chat_template_kwargs or {})
    token_ids = []
    for i, conversation in enumerate(conversations):
        try:
            encoded = tokenizer.apply_chat_template(conversation, tokenize=True, return_dict=True, **options)
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"conversation {i}: the chat template cannot render it: {error}") from error
        token_ids.append(list(encoded["input_ids"]))
    return token_ids
