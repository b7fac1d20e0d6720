"""What a chat template does with messages: which content it expects, and what it leaves out.

This is tried out, because templates may pass messages through macros; and once for each template, because a trial takes
as long as a short chat."""

import json
import logging
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = dict[str, Any]
Conversation = list[Message]

ROLES = ("system", "developer", "user", "assistant", "tool")  # that templates know
_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")  # of one thing; the first that is given counts
_REASONING = frozenset(_REASONING_NAMES)
_MAX_KNOWN = 64  # templates; what each expects is kept
_PROBES = ("first-probe", "second-probe")  # texts that no template has of its own
_USER: Message = {"role": "user", "content": "x"}
_ASSISTANT: Message = {"role": "assistant", "content": "x"}


def _call(name: str, arguments: Any) -> Message:
    function = {"name": name, "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function, **function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


class _Place(NamedTuple):
    """A role at the beginning of a conversation or later, in one template.

    Attributes:
        role: by which the template knows it.
        content: what the template shows of its content: "text", "parts" or both.
        is_shown: whether its content is in the text; None if the template refuses all messages that are tried.
    """

    role: str
    content: tuple[str, ...]
    is_shown: bool | None


class TemplateFacts:
    """Knows the templates of one tokenizer, and gives them messages as they expect them."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase | None"):
        self._tokenizer: Any = tokenizer  # Their types leave open what a call returns.
        self._place = lru_cache(_MAX_KNOWN * len(ROLES))(self._find_place)
        self._expected_content = lru_cache(_MAX_KNOWN * len(ROLES))(self._find_expected_content)
        self._expects_json = lru_cache(_MAX_KNOWN)(self._find_whether_json_is_expected)
        self._shows = lru_cache(_MAX_KNOWN * len(ROLES))(self._find_whether_it_shows)
        self._look_for_calls = lru_cache(_MAX_KNOWN)(self._warn_unless_it_shows_calls)
        self._reasoning_names = lru_cache(_MAX_KNOWN)(_find_reasoning_names)

    def as_expected(self, conversation: Conversation, template: str) -> tuple[Conversation, list[int]]:
        """The messages as the template expects them: their content as a text or a list of parts, the arguments of tool
        calls as mappings or as JSON text, reasoning by the template's name for it, and a developer's message as a
        system message unless the template knows developers. And the indices of those that the template leaves out, as
        far as one knows from their roles and places."""
        expected, hidden = [], []
        for j, message in enumerate(conversation):
            role, forms, is_shown = self._place(template, message["role"], j == 0)
            has_calls = "tool_calls" in message
            if is_shown is False:
                hidden.append(j)
            if has_calls:
                self._look_for_calls(template)
            if role != message["role"]:
                message = message | {"role": role}
            if has_calls and self._expects_json(template):
                message = message | {"tool_calls": [_with_json(call) for call in message["tool_calls"]]}
            if not _REASONING.isdisjoint(message):
                reasoning = next(message[name] for name in _REASONING_NAMES if name in message)
                message = dict.fromkeys(self._reasoning_names(template), reasoning) | message
            content = message.get("content")
            if isinstance(content, str):
                if forms == ("parts",):
                    message = message | {"content": [{"type": "text", "text": content}]}
            elif content is not None and "parts" not in forms:
                if any(part["type"] != "text" for part in content):
                    raise ValueError("it shows texts alone, and no images")
                message = message | {"content": "\n".join(part["text"] for part in content)}
            expected.append(message)
        return expected, hidden

    def shown_roles(self, template: str) -> list[str]:
        return [role for role in ROLES if self._shows(template, role, role in ("system", "developer"))]

    def _find_place(self, template: str, role: str, is_first: bool) -> _Place:
        is_shown = self._shows(template, role, is_first)
        if role == "developer" and not is_shown and self._shows(template, "system", True):
            role, is_shown = "system", self._shows(template, "system", is_first)
        if not self._shows(template, "user", True):
            is_shown = None  # This template shows other things than what people say.
        content = self._expected_content(template, role) or self._expected_content(template, "user")
        return _Place(role, content, is_shown)

    def _find_expected_content(self, template: str, role: str) -> tuple[str, ...]:
        """What the template shows of a message's content: "text", "parts", both or none."""
        expected = []
        parts = [{"type": "text", "text": probe} for probe in _PROBES]
        forms = {"text": " ".join(_PROBES), "parts": parts}
        for name, content in forms.items():
            message: Message = {"role": role, "content": content}
            conversation = [message] if role == "user" else [message, _USER] if role == "system" else [_USER, message]
            text = self._try_out(template, conversation) or ""
            # In quotes, it is the list as Python or JSON writes it.
            if all(probe in text and f"'{probe}'" not in text and f'"{probe}"' not in text for probe in _PROBES):
                expected.append(name)
        return tuple(expected)

    def _find_whether_json_is_expected(self, template: str) -> bool:
        """Whether the template writes arguments of tool calls only if they are a text."""
        name, value = _PROBES
        shown = []
        for arguments in ({name: value}, json.dumps({name: value})):
            text = self._try_out(template, [_USER, _call("f", arguments)]) or ""
            shown.append(name in text and f"'{name}': '{value}'" not in text)
        return shown == [False, True]

    def _find_whether_it_shows(self, template: str, role: str, is_first: bool) -> bool | None:
        """Whether messages of a role are in the text; None if the template refuses all that are tried."""
        probe = _PROBES[0]
        message: Message = {"role": role, "content": probe, "name": "f", "tool_call_id": "abcdefghi"}
        if self._expected_content(template, "user") == ("parts",):
            message["content"] = [{"type": "text", "text": probe}]
        before: Iterable[Conversation] = ([],)
        if not is_first:
            before = ([_USER], [_USER, _call("f", {"a": "b"})], [_USER, _call("f", '{"a": "b"}')], [_USER, _ASSISTANT])
        tried = ([*start, message, *end] for start in before for end in ([], [_USER]))
        return _any_shows(probe, (self._try_out(template, conversation) for conversation in tried))

    def _warn_unless_it_shows_calls(self, template: str) -> None:
        """No error, because a conversation that had tools may go on with a model that knows none."""
        probe = _PROBES[0]
        tried = ([_USER, _call(probe, arguments)] for arguments in ({probe: "b"}, json.dumps({probe: "b"})))
        if _any_shows(probe, (self._try_out(template, conversation) for conversation in tried)) is False:
            logger.warning("tool_calls: the chat template leaves them out of the prompt (this is logged once)")

    def _try_out(self, template: str, conversation: Conversation) -> str | None:
        """The rendered conversation; None if the template refuses it."""
        try:
            return self._tokenizer.apply_chat_template(conversation, chat_template=template, tokenize=False)
        except Exception:  # Templates raise whatever they like, also of what they do not expect.
            return None


def with_marks(conversation: Conversation, indices: Iterable[int]) -> tuple[Conversation, dict[int, str]]:
    """The conversation with a mark for the content of each of these messages, unless it is empty, and the marks."""
    marked, marks = list(conversation), dict[int, str]()
    for j in indices:
        if content := conversation[j].get("content"):
            mark = marks[j] = f"mark-of-message-{j}"
            text = mark if isinstance(content, str) else [{"type": "text", "text": mark}]
            marked[j] = conversation[j] | {"content": text}
    return marked, marks


def _any_shows(probe: str, texts: Iterable[str | None]) -> bool | None:
    found = None
    for text in texts:
        if text is not None and probe in text:
            return True
        found = found if text is None else False
    return found


def _find_reasoning_names(template: str) -> list[str]:
    return [name for name in _REASONING_NAMES if re.search(rf"\b{name}\b", template)]


def _with_json(call: dict[str, Any]) -> dict[str, Any]:
    """A tool call with its arguments as text."""
    function = call.get("function", call)
    function = function | {"arguments": json.dumps(function.get("arguments") or {}, ensure_ascii=False)}
    return call | {"function": function} if "function" in call else function
