"""Answers of one checkpoint: which format they have, what requests for them need, and their parts."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

from nanovllm.engine.text.formats.all_formats import find_format
from nanovllm.engine.text.formats.format import CALL, CONTENT, ConversationFormat, Event, ToolCall, tool_call
from nanovllm.engine.text.formats.tag_reader import Tags
from nanovllm.sampling_params import SamplingParams

_TAIL_TOKENS = 24  # of a prompt: more than what opens the thinking and the space after it can have
# A tag that ordinary tokens spell is hidden from readers: its first character becomes half of a surrogate pair, which
# no text of a model has.
_HIDDEN = 0xDC00
_SHOWN = {_HIDDEN + code: code for code in range(128)}


class AnswerFormat:
    """How a checkpoint's model answers, with one chat template.

    answers = AnswerFormat(tokenizer, find_format(tokenizer))
    """

    def __init__(self, tokenizer: Any, format: ConversationFormat):
        self.format = format
        self._tokenizer = tokenizer

    @cached_property
    def tokens(self) -> "TagTokens":
        return TagTokens(self._tokenizer, self.format)

    def with_tags(self, params: Any) -> Any:
        """Parameters of requests whose answers are to be split: they keep special tokens, where tags are some.

        params: one SamplingParams, one for each prompt, or None.
        """
        if not self.tokens.are_special:
            return params
        if isinstance(params, list | tuple):
            return [self.with_tags(each) for each in params]
        params = SamplingParams() if params is None else params
        return replace(params, skip_special_tokens=False) if isinstance(params, SamplingParams) else params

    def opens_reasoning(self, prompt_token_ids: list[int]) -> bool:
        """Whether a prompt has begun the thinking: the completion goes on from there."""
        return self.format.opens(self._tokenizer.decode(prompt_token_ids[-_TAIL_TOKENS:]))

    def splitter(
        self, tools: Iterable[Any] | None = None, is_open: bool = False, splits_reasoning: bool = True
    ) -> "AnswerSplitter":
        """For one answer. tools, is_open: as ConversationFormat.reader's. splits_reasoning: False leaves what the model
        thinks in the content."""
        return AnswerSplitter(self, tools, is_open, splits_reasoning)


class AnswerSplitter:
    """Splits one answer into what the model thinks, what it says and what it calls.

        splitter = answers.splitter(tools)
        for delta in llm.stream([prompt_token_ids], params):
            reasoning, content, calls = splitter.push(delta["text"], delta["token_ids"], delta["finish_reason"])

    Attributes:
        has_reasoning: whether the answer has such a part so far, which may be empty.
    """

    def __init__(self, answers: AnswerFormat, tools: Iterable[Any] | None, is_open: bool, splits_reasoning: bool):
        self._reader = answers.format.reader(tools, is_open)
        self._marker = answers.tokens.marker()
        self._splits_reasoning = splits_reasoning

    @property
    def has_reasoning(self) -> bool:
        return self._splits_reasoning and self._reader.has_reasoning

    def push(
        self, text: str, token_ids: list[int], finish_reason: str | None = None
    ) -> tuple[str, str, list[ToolCall]]:
        """What a text and its tokens add to (reasoning, content, calls). finish_reason: not None with the last one."""
        marked = self._marker.mark(text, token_ids, finish_reason)
        events = self._reader.push(marked, finish_reason is not None)
        if self._marker.has_hidden:
            events = [_shown(event) for event in events]
        reasoning, content, calls = "", "", []
        for kind, piece, raw, name, arguments in events:
            if kind == CONTENT:
                content += piece if self._splits_reasoning else raw
            elif kind == CALL:
                if arguments is not None:
                    calls.append(tool_call(name, arguments))
            elif self._splits_reasoning:
                reasoning += piece
            else:
                content += raw
        return reasoning, content, calls


class TagTokens:
    """Those of a format's tags that are tokens of a tokenizer.

    Attributes:
        are_special: whether texts lack some of them, unless skip_special_tokens is False.
    """

    def __init__(self, tokenizer: Any, format: ConversationFormat):
        added = tokenizer.added_tokens_decoder
        known = {token.content: token_id for token_id, token in added.items() if token.content in format.tags}
        self.are_special = any(added[token_id].special for token_id in known.values())
        self.by_id = {token_id: text for text, token_id in known.items()}
        self.ends = {known[text]: text for text in format.ends if text in known}
        self.tags = Tags(known)
        self._tokenizer = tokenizer

    def marker(self) -> "_Marker":
        return _Marker(self)

    def num_spelled(self, token_ids: list[int]) -> int:
        """How often ordinary tokens spell a tag."""
        options = {"clean_up_tokenization_spaces": False, "spaces_between_special_tokens": False}
        return len(self.tags.find_all(self._tokenizer.decode(token_ids, skip_special_tokens=False, **options)))


class _Marker:
    """Tells the tags in one answer's text that are tokens of their own from those that ordinary tokens spell, and hides
    these. The text may come later than its tokens, but not earlier.

    Attributes:
        has_hidden: whether it has hidden any.
    """

    def __init__(self, tokens: TagTokens):
        self._tokens = tokens
        self._token_ids: list[int] = []
        self._num_read = 0  # of them
        self._known: deque[bool] = deque()  # of the next tags in the text: whether they are tokens
        self._num_ahead = 0  # tags in the text that were found to be spelled by tokens that are not read
        self._held = ""
        self.has_hidden = False

    def mark(self, text: str, token_ids: list[int], finish_reason: str | None) -> str:
        tokens = self._tokens
        if not tokens.by_id:
            return text
        self._token_ids += token_ids
        if not self._held and finish_reason is None and tokens.tags.firsts.isdisjoint(text):
            return text
        text = self._held + text
        if finish_reason is None:
            size = tokens.tags.num_free(text)
            text, self._held = text[:size], text[size:]
        matches = tokens.tags.find_all(text)
        if matches:
            pieces, at = [], 0
            for match in matches:
                if not self._is_token():
                    pieces += [text[at : match.start()], chr(_HIDDEN + ord(text[match.start()]))]
                    at = match.start() + 1
                    self.has_hidden = True
            text = "".join([*pieces, text[at:]])
        # Texts lack the token that has ended the answer.
        if finish_reason == "stop" and self._token_ids and self._token_ids[-1] in tokens.ends:
            end = tokens.ends[self._token_ids[-1]]
            return text if text.endswith(end) else text + end
        return text

    def _is_token(self) -> bool:
        """Whether the next tag of the text is one."""
        if not self._known:
            by_id, token_ids = self._tokens.by_id, self._token_ids
            at = next((i for i in range(self._num_read, len(token_ids)) if token_ids[i] in by_id), None)
            if at is None:
                self._num_ahead += 1
                return False
            num_spelled = self._tokens.num_spelled(token_ids[self._num_read : at]) - self._num_ahead
            self._known.extend([False] * num_spelled + [True])
            self._num_read, self._num_ahead = at + 1, 0
        return self._known.popleft()


def _shown(event: Event) -> Event:
    """The event with the tags that were hidden."""
    text, raw = event.text.translate(_SHOWN), event.raw.translate(_SHOWN)
    return Event(event.kind, text, raw, event.name.translate(_SHOWN), _shown_values(event.arguments))


def _shown_values(value: Any) -> Any:
    if isinstance(value, str):
        return value.translate(_SHOWN)
    if isinstance(value, dict):
        return {key.translate(_SHOWN): _shown_values(each) for key, each in value.items()}
    return [_shown_values(each) for each in value] if isinstance(value, list) else value


def with_channels(tokenizer: Any, params: Any) -> Any:
    """Parameters of requests whose texts are to be split: they keep special tokens, if the model's tags are some, such
    as the channels of gpt-oss.

    params: one SamplingParams, one for each prompt, or None.
    """
    return AnswerFormat(tokenizer, find_format(tokenizer, log=False)).with_tags(params)


def add_parts(
    output: Any, answers: AnswerFormat, is_open: bool, splits_reasoning: bool, tools: Iterable[Any] | None
) -> None:
    """Give a chat's result and its samples the keys content, reasoning if that is split, and tool_calls with tools.

    output: a RequestOutput. is_open, tools: as ConversationFormat.reader's.
    """
    tools = None if tools is None else list(tools)
    for sample in (output, *output.get("samples", ())):
        if sample["text"] is None:
            parts: Any = (None, None, [])
        else:
            splitter = answers.splitter(tools, is_open, splits_reasoning)
            parts = splitter.push(sample["text"], sample["token_ids"], sample["finish_reason"])
            parts = (parts[0] if splitter.has_reasoning else None, *parts[1:])
        if splits_reasoning:
            sample["reasoning"] = parts[0]
        sample["content"] = parts[1]
        if tools is not None:
            sample["tool_calls"] = parts[2]
