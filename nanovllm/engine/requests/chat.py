"""Conversations to prompts, through the tokenizer's chat template."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from jinja2 import TemplateError

from nanovllm.sampling_params import SamplingParams

Message = dict[str, Any]
Conversation = list[Message]
Tool = dict[str, Any] | Callable

# Arguments of apply_chat_template that are no variables of a template, and chat()'s or ours to choose.
_RESERVED = {
    "add_generation_prompt": "an argument of chat()",
    "chat_template": "an argument of chat()",
    "continue_final_message": "an argument of chat()",
    "conversation": "chat()'s messages",
    "max_length": "no variable of a template: whole prompts are rendered",
    "messages": "an argument of chat()",
    "padding": "no variable of a template: prompts are not padded",
    "return_assistant_tokens_mask": "no variable of a template: nothing would read it",
    "return_dict": "no variable of a template: chat() reads the tokens itself",
    "return_tensors": "no variable of a template: chat() reads the tokens itself",
    "tokenize": "no variable of a template: chat() needs tokens",
    "tools": "an argument of chat()",
    "truncation": "no variable of a template: prompts are not shortened",
}


def as_conversations(messages) -> list[Conversation]:
    """Checked conversations, the text parts of each message joined by line feeds.

    Args:
        messages: one conversation or a list of them. A message is {"role": ..., "content": ...}, its content a text or
            a list of {"type": "text", "text": ...}; with "tool_calls" it may have none. Other keys are the template's.

    Raises:
        ValueError: a malformed message; names the conversation and the message.
    """
    if isinstance(messages, str | Mapping) or not hasattr(messages, "__iter__"):
        raise ValueError(f"messages: must be a list of messages or of conversations, not {type(messages).__name__}")
    messages = list(messages)
    is_one = any(not isinstance(message, list | tuple) for message in messages)
    return [_check_conversation(c, i) for i, c in enumerate([messages] if is_one else messages)]


def _check_conversation(conversation, i: int) -> Conversation:
    if not conversation:
        raise ValueError(f"conversation {i}: is empty: it must hold at least one message")
    return [_check_message(message, f"conversation {i}, message {j}") for j, message in enumerate(conversation)]


def _check_message(message, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise ValueError(f"{where}: must be a dict with role and content, not {type(message).__name__}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{where}: role={role!r}: must be a text such as 'user'")
    if isinstance(content, str) or (content is None and message.get("tool_calls")):
        return dict(message)
    if not isinstance(content, list | tuple):
        raise ValueError(f"{where}: content must be a text or a list of text parts, not {type(content).__name__}")
    for k, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f'{where}: content[{k}] must be {{"type": "text", "text": ...}}')
    return dict(message) | {"content": "\n".join(part["text"] for part in content)}


def check_template_options(chat_template, chat_template_kwargs) -> None:
    """Raises TypeError or ValueError, naming the argument."""
    if chat_template is not None and not isinstance(chat_template, str):
        raise TypeError(f"chat_template: must be the text of a Jinja template, not {type(chat_template).__name__}")
    if chat_template_kwargs is None:
        return
    if not isinstance(chat_template_kwargs, Mapping) or not all(isinstance(name, str) for name in chat_template_kwargs):
        raise TypeError(f"chat_template_kwargs={chat_template_kwargs!r}: must be a dict of the template's variables")
    for name in chat_template_kwargs:
        if name in _RESERVED:
            raise ValueError(f"chat_template_kwargs: {name!r} is {_RESERVED[name]}")


def as_tools(tools) -> list[dict[str, Any]] | None:
    """The schemas of tools, as chat templates read them; None where there are none.

    Args:
        tools: a list of OpenAI's tool schemas, or of functions with type hints and a docstring in Google's style, of
            which transformers makes them.

    Raises:
        TypeError, ValueError: what is neither, or a function that no schema can be made of; the message names it.
    """
    if tools is None:
        return None
    if isinstance(tools, str | Mapping) or callable(tools) or not hasattr(tools, "__iter__"):
        raise TypeError(f"tools: must be a list of schemas or functions, not {type(tools).__name__}")
    return [_as_schema(tool, f"tools[{i}]") for i, tool in enumerate(tools)] or None


def _as_schema(tool, where: str) -> dict[str, Any]:
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
    except Exception as error:  # of its own kinds
        raise ValueError(f"{where}: no schema can be made of {tool!r}: {error}") from error


def misplaced_option(name: str, value) -> str:
    """Where an option that chat() does not have may belong."""
    if name in {field.name for field in fields(SamplingParams)}:
        return f"pass sampling_params=SamplingParams({name}={value!r})"
    return f'a variable of the chat template goes into chat_template_kwargs={{"{name}": {value!r}}}'


def render_chat(tokenizer, conversations: list[Conversation], chat_template: str | None, **options) -> list[list[int]]:
    """Token ids of each conversation.

    Args:
        chat_template: a Jinja template; None takes the tokenizer's own.
        options: apply_chat_template's, tools among them, and variables of the template.

    Raises:
        ValueError: there is no template, or it has no place for tools, or refuses a conversation, which is named.
    """
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat_template: the model's tokenizer has none; pass one, or give generate() whole prompts")
    tools = options.get("tools")
    if tools and "tools" not in tokenizer.get_chat_template(chat_template, tools):
        raise ValueError("tools: the chat template has no place for them; pass a chat_template that has")
    token_ids = []
    for i, conversation in enumerate(conversations):
        try:
            encoded = tokenizer.apply_chat_template(
                conversation, chat_template=chat_template, tokenize=True, return_dict=True, **options
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"conversation {i}: the chat template cannot render it: {error}") from error
        token_ids.append(list(encoded["input_ids"]))
    return token_ids
