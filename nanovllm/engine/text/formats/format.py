"""What a format of conversations is: how a family's models mark what they think, what they say and what they call.

A format is a subclass of `ConversationFormat`, a file of this folder each. It makes readers of answers. A reader gets
an answer's text as it comes and gives events. Whole answers and streams use the same reader, so that a stream adds up
to the whole however it is cut.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

ToolCall = dict[str, Any]  # {"type": "function", "function": {"name": ..., "arguments": {...}}}, as a message has it

REASONING, CONTENT, CALL = "reasoning", "content", "call"


def tool_call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


class Event(NamedTuple):
    """A piece of an answer. The `raw` texts of all events are the answer as written: nothing is lost."""

    kind: str  # REASONING, CONTENT or CALL
    text: str  # what a caller gets of it: without tags, and without the white space around tags; "" of a call
    raw: str  # what the model wrote for it
    # Of a call. It comes when it is whole, because a call that is cut is none: its text is content then.
    name: str = ""
    arguments: dict[str, Any] | None = None


class AnswerReader(ABC):
    """Reads one answer.

    Text that may be the beginning of a tag, or of a call, is held back until that is decided.

    Attributes:
        has_reasoning: whether the answer has such a part so far, which may be empty.
    """

    has_reasoning = False

    @abstractmethod
    def push(self, text: str, is_last: bool = False) -> list[Event]:
        """What a text adds. is_last: nothing comes after it."""


class ConversationFormat(ABC):
    """How a family's models write their answers.

    Attributes:
        name: what `--chat-format` calls it.
        thinking: the texts that begin and end what the model thinks; None if it does not think.
        answer: what must stand between the end of the thinking and the answer's content, beside white space; "" in
            formats whose content follows at once.
        ends: special tokens' texts that end an answer by the format, also where no file of the checkpoint says so.
        tags: texts that are tags only as special tokens, where the tokenizer has tokens for them.
    """

    name = ""
    thinking: tuple[str, str] | None = None
    answer = ""
    ends: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()

    @abstractmethod
    def reader(self, tools: Iterable[Any] | None = None, is_open: bool = False) -> AnswerReader:
        """Of one answer.

        Args:
            tools: schemas as in `chat`, whose types tell which arguments are no texts. None: calls are not read, and
                are content as written.
            is_open: whether the prompt has begun the thinking already.
        """

    def is_named_by(self, template: str) -> bool:
        """Whether a chat template writes this format."""
        return False

    def is_known_by(self, tokens: set[str]) -> bool:
        """Whether these special tokens are this format's."""
        return False

    def opens(self, text: str) -> bool:
        """Whether the end of a prompt has begun the thinking."""
        return self.thinking is not None and text.rstrip().endswith(self.thinking[0])

    def is_in_thinking(self, text: str) -> bool:
        """Whether the beginning of an answer is thinking that has not ended."""
        if self.thinking is None:
            return False
        opening, closing = self.thinking
        return text.lstrip().startswith(opening) and closing not in text
