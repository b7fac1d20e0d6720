"""Reasoning: what a model thinks before it answers, taken out of the text of a chat's completion."""

from typing import TYPE_CHECKING, Any

from nanovllm.engine.text.harmony import CHANNEL, HarmonySplitter
from nanovllm.engine.text.tool_calls import num_undecided

if TYPE_CHECKING:  # It needs torch, and jobs read their lines without.
    from nanovllm.engine.text.outputs import RequestOutput

OPENING, CLOSING = "<think>", "</think>"
_TAIL_TOKENS = 16  # of a prompt: more than a tag and the space after it can have


def opens_reasoning(tokenizer: Any, prompt_token_ids: list[int]) -> bool:
    """Whether a prompt ends with the opening tag, as some chat templates end it: the completion goes on from there."""
    return tokenizer.decode(prompt_token_ids[-_TAIL_TOKENS:]).rstrip().endswith(OPENING)


def goes_on_reasoning(message: dict[str, Any]) -> bool:
    """Whether the reasoning of a message that is to be continued has not ended."""
    parts = message.get("content") or ""
    text = parts if isinstance(parts, str) else "".join(part["text"] for part in parts)
    return text.lstrip().startswith(OPENING) and CLOSING not in text


class ReasoningSplitter:
    """Splits a completion's text as it comes into `reasoning`, what is between <think> and </think>, and `content`; or
    by channels, if it begins with <|channel|> (gpt-oss, with skip_special_tokens=False).

    Reasoning stands at the beginning or nowhere: a tag further on is content. White space around the reasoning belongs
    to neither part. Text that may be the beginning of a tag is held back until that is decided.

        splitter = ReasoningSplitter(opens_reasoning(tokenizer, prompt_token_ids))
        for delta in llm.stream([prompt_token_ids], params):
            reasoning, content = splitter.push(delta["text"], delta["finish_reason"] is not None)

    Attributes:
        has_reasoning: whether the text has such a part so far, which may be empty.
    """

    def __init__(self, is_open: bool = False):
        """is_open: whether the prompt has the opening tag already."""
        self.has_reasoning = is_open
        self._read = self._read_reasoning if is_open else self._read_start
        self._held = ""
        self._channels = HarmonySplitter()
        self._is_trimmed = False  # The white space before the reasoning is over.

    def push(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """What a text adds to (reasoning, content). is_last: nothing comes after it."""
        self._held += text
        return self._read(is_last)

    def _read_start(self, is_last: bool) -> tuple[str, str]:
        text = self._held.lstrip()
        if text.startswith(OPENING):
            self.has_reasoning = True
            self._held, self._read = text[len(OPENING) :], self._read_reasoning
            return self._read(is_last)
        if text.startswith(CHANNEL):
            self._read = self._read_channels
            return self._read(is_last)
        if (OPENING.startswith(text) or CHANNEL.startswith(text)) and not is_last:
            return "", ""
        self._read = self._read_content
        return self._read(is_last)

    def _read_channels(self, is_last: bool) -> tuple[str, str]:
        text, self._held = self._held, ""
        parts = self._channels.push(text, is_last)
        self.has_reasoning = self._channels.has_reasoning
        return parts

    def _read_reasoning(self, is_last: bool) -> tuple[str, str]:
        if not self._is_trimmed:
            self._held = self._held.lstrip()
            self._is_trimmed = self._held != ""
        reasoning, tag, rest = self._held.partition(CLOSING)
        if tag:
            self._held, self._read = rest, self._read_space
            return reasoning.rstrip(), self._read(is_last)[1]
        num_held = 0 if is_last else num_undecided(self._held, CLOSING)
        reasoning = self._held[: len(self._held) - num_held].rstrip()
        self._held = self._held[len(reasoning) :]
        return reasoning, ""

    def _read_space(self, is_last: bool) -> tuple[str, str]:
        self._held = self._held.lstrip()
        if self._held:
            self._read = self._read_content
        return "", self._read_content(is_last)[1]

    def _read_content(self, is_last: bool) -> tuple[str, str]:
        content, self._held = self._held, ""
        return "", content


def split_reasoning(text: str, is_open: bool = False) -> tuple[str | None, str]:
    """(reasoning, content) of a whole text; reasoning is None if there is none. is_open: as ReasoningSplitter's."""
    splitter = ReasoningSplitter(is_open)
    reasoning, content = splitter.push(text, is_last=True)
    return reasoning if splitter.has_reasoning else None, content


def add_reasoning(output: "RequestOutput", is_open: bool) -> None:
    """Give a chat's result and its samples the keys reasoning and content. is_open: as ReasoningSplitter's."""
    for sample in (output, *output.get("samples", ())):
        text = sample["text"]
        sample["reasoning"], sample["content"] = (None, None) if text is None else split_reasoning(text, is_open)
