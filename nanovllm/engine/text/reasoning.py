"""Reasoning: what a model thinks before it answers, taken out of the text of a chat's completion."""

from typing import Any

from nanovllm.engine.text.formats.all_formats import FORMATS
from nanovllm.engine.text.formats.by_tags import ByTags
from nanovllm.engine.text.formats.format import REASONING, ConversationFormat
from nanovllm.utils.checks import quoted

_TAIL_TOKENS = 24  # of a prompt: more than what opens the thinking and the space after it can have

Format = ConversationFormat | str | None  # one, its name, or None: by the tags of the text


def as_format(format: Format) -> ConversationFormat:
    """Raises ValueError for a name of no format."""
    if isinstance(format, ConversationFormat):
        return format
    if format is None:
        return ByTags()
    if format not in FORMATS:
        raise ValueError(f"format={quoted(format)}: must be None or one of {', '.join(FORMATS)}")
    return FORMATS[format]


def opens_reasoning(tokenizer: Any, prompt_token_ids: list[int]) -> bool:
    """Whether a prompt has begun the thinking, as some chat templates end it: the completion goes on from there."""
    text = tokenizer.decode(prompt_token_ids[-_TAIL_TOKENS:])
    return any(format.opens(text) for format in FORMATS.values())


def goes_on_reasoning(message: dict[str, Any], format: ConversationFormat) -> bool:
    """Whether the reasoning of a message that is to be continued has not ended."""
    parts = message.get("content") or ""
    return format.is_in_thinking(parts if isinstance(parts, str) else "".join(part["text"] for part in parts))


class ReasoningSplitter:
    """Splits a completion's text as it comes into `reasoning`, what stands between the tags of thinking, such as
    <think> and </think>, and `content`. Calls stay in the content as written; so do calls with which thinking ends that
    was never closed.

    Reasoning stands at the beginning or nowhere: a tag further on is content. White space around the reasoning belongs
    to neither part. Text that may be the beginning of a tag is held back until that is decided.

        splitter = ReasoningSplitter(opens_reasoning(tokenizer, prompt_token_ids))
        for delta in llm.stream([prompt_token_ids], params):
            reasoning, content = splitter.push(delta["text"], delta["finish_reason"] is not None)

    Attributes:
        has_reasoning: whether the text has such a part so far, which may be empty.
    """

    def __init__(self, is_open: bool = False, format: Format = None):
        """
        Args:
            is_open: whether the prompt has the opening tag already.
            format: a name of --chat-format's, or what find_format returns; None: by the tags of the text.
        """
        self._reader = as_format(format).reader(None, is_open)

    @property
    def has_reasoning(self) -> bool:
        return self._reader.has_reasoning

    def push(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """What a text adds to (reasoning, content). is_last: nothing comes after it."""
        reasoning, content = "", ""
        for event in self._reader.push(text, is_last):
            if event.kind == REASONING:
                reasoning += event.text
            else:
                content += event.text
        return reasoning, content


def split_reasoning(text: str, is_open: bool = False, format: Format = None) -> tuple[str | None, str]:
    """(reasoning, content) of a whole text; reasoning is None if there is none. The arguments are
    ReasoningSplitter's."""
    splitter = ReasoningSplitter(is_open, format)
    reasoning, content = splitter.push(text, is_last=True)
    return reasoning if splitter.has_reasoning else None, content
