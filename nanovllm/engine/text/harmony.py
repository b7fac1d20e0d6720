"""Harmony, the format of gpt-oss's answers (https://github.com/openai/harmony): messages in channels.

    <|channel|>analysis<|message|>Two and two.<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>

What the model thinks is in the channel analysis. Its answer is in final, and what it says before it calls a tool in
commentary. A message to a tool has its name in the header: `<|channel|>commentary to=functions.sum`.
"""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from nanovllm.engine.text.tool_calls import CLOSING, OPENING, num_undecided
from nanovllm.sampling_params import SamplingParams

CHANNEL = "<|channel|>"
_MESSAGE = "<|message|>"
# The first three end a message. The others begin one, where a model has left them out.
_ENDS = re.compile(r"<\|(?:end|return|call|start|channel)\|>")
_TAGS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", CHANNEL)


def has_channels(tokenizer: Any) -> bool:
    """Whether the tokenizer has Harmony's special tokens."""
    return {CHANNEL, _MESSAGE} <= set(tokenizer.get_added_vocab())


def with_channels(tokenizer: Any, params: Any) -> Any:
    """Parameters of requests whose texts are to be split: with Harmony they keep their special tokens, which tell the
    channels. params: one SamplingParams, one for each prompt, or None."""
    if not has_channels(tokenizer):
        return params
    if isinstance(params, list | tuple):
        return [with_channels(tokenizer, each) for each in params]
    params = SamplingParams() if params is None else params
    return replace(params, skip_special_tokens=False) if isinstance(params, SamplingParams) else params


class HarmonySplitter:
    """`ReasoningSplitter` of a text that begins with a channel. Messages to tools are content, in the form of Qwen3's
    calls, so that `ToolCallSplitter` takes them out.

    Attributes:
        has_reasoning: whether there has been a message of analysis.
    """

    def __init__(self) -> None:
        self.has_reasoning = False
        self._held = ""
        self._read: Callable[[bool], bool] = self._read_header
        self._parts = ["", ""]  # reasoning and content that are not given away yet
        self._has = [False, False]  # whether a message of each has begun
        self._part, self._is_call = 0, False  # of the message that is read

    def push(self, text: str, is_last: bool = False) -> tuple[str, str]:
        """What a text adds to (reasoning, content). is_last: nothing comes after it."""
        self._held += text
        while self._read(is_last):
            pass
        reasoning, content = self._parts
        self._parts = ["", ""]
        return reasoning, content

    def _read_header(self, is_last: bool) -> bool:
        """Returns whether it is over, and so for a body. A header that is not over is no text."""
        header, tag, rest = self._held.partition(_MESSAGE)
        if not tag:
            return False
        self._held, self._read = rest, self._read_body
        channel = header.rpartition(CHANNEL)[2]
        self._is_call = " to=" in header
        self._part = 0 if channel.split()[:1] == ["analysis"] and not self._is_call else 1
        self.has_reasoning |= self._part == 0
        if self._has[self._part]:
            self._parts[self._part] += "\n"
        self._has[self._part] = True
        recipient = re.search(r" to=([^\s<]+)", header.rpartition("<|start|>")[2])
        if self._is_call:
            name = json.dumps(recipient[1].removeprefix("functions.") if recipient else "")
            self._parts[1] += f'{OPENING}\n{{"name": {name}, "arguments": '
        return True

    def _read_body(self, is_last: bool) -> bool:
        end = _ENDS.search(self._held)
        num_held = 0 if is_last else num_undecided(self._held, *_TAGS)
        size = len(self._held) - num_held if end is None else end.start()
        self._parts[self._part] += self._held[:size]
        self._held = self._held[size:]
        if end is None and not is_last:
            return False
        if self._is_call:
            self._parts[1] += f"}}\n{CLOSING}"
        self._read = self._read_header
        return True
