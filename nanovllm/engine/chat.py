"""Conversations to prompts, through the tokenizer's chat template."""

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError

Message = dict[str, Any]
Conversation = list[Message]


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


def render_chat(tokenizer, conversations: list[Conversation], chat_template: str | None, **options) -> list[list[int]]:
    """Token ids of each conversation.

    Args:
        chat_template: a Jinja template; None takes the tokenizer's own.
        options: apply_chat_template's, and variables of the template.

    Raises:
        ValueError: there is no template, or the template refuses a conversation, which is named.
    """
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError("chat_template: the model's tokenizer has none; pass one, or give generate() whole prompts")
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
