"""ChatAnswers: what the model thinks, says and calls in its answers to conversations, whole or as they come."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import Any, cast

from nanovllm.engine.text.chat import Conversation, Tool, as_tools
from nanovllm.engine.text.formats.answers import AnswerFormat, AnswerSplitter, add_parts
from nanovllm.engine.text.outputs import ChatDelta, RequestOutput, StreamDelta, as_result
from nanovllm.engine.text.reasoning import goes_on_reasoning


class ChatAnswers:
    """Splits the answers of one call's conversations."""

    def __init__(
        self,
        answers: AnswerFormat,
        conversations: list[Conversation],
        prompts: list[Any],
        is_continued: bool,
        splits_reasoning: bool,
        tools: Iterable[Tool] | None,
        splits_tool_calls: bool,
    ):
        """
        Args:
            conversations, prompts: checked, and what `encode_chats` makes of them.
            is_continued: the last message of each conversation goes on, instead of being answered.
            tools: that the model may call.
        """
        self._answers, self._splits_reasoning = answers, splits_reasoning
        self._tools = (as_tools(tools) or []) if splits_tool_calls else None
        self._is_open = [
            (is_continued and goes_on_reasoning(conversation[-1], answers.format))
            or answers.opens_reasoning(_token_ids(prompt))
            for conversation, prompt in zip(conversations, prompts, strict=True)
        ]

    def params(self, sampling_params: Any) -> Any:
        """The parameters with which texts have all that is needed to split them."""
        return self._answers.with_tags(sampling_params)

    def add_parts(self, outputs: list[RequestOutput]) -> None:
        """Give results of all conversations, in order, their parts."""
        for output, is_open in zip(outputs, self._is_open, strict=True):
            add_parts(output, self._answers, is_open, self._splits_reasoning, self._tools)

    def splitter(self, index: int) -> AnswerSplitter:
        """For one answer to the conversation with this index."""
        return self._answers.splitter(self._tools, self._is_open[index], self._splits_reasoning)


def _token_ids(prompt: Any) -> list[int]:
    return prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt


def chat_deltas(deltas: Generator[StreamDelta, None, None], answers: ChatAnswers | None) -> Iterator[ChatDelta]:
    """The deltas of a stream with the parts that they add to. answers: None leaves all text in the content."""
    splitters: dict[tuple[int, int], AnswerSplitter] = {}
    with closing(deltas):  # at once, when nobody reads on
        for delta in deltas:
            reasoning, content, calls = "", delta["text"], cast(list[dict[str, Any]], [])
            if answers is not None:
                key = delta["index"], delta["sample"]
                splitter = splitters.get(key) or splitters.setdefault(key, answers.splitter(delta["index"]))
                reasoning, content, calls = splitter.push(content, delta["token_ids"], delta["finish_reason"])
            yield as_result(ChatDelta(**delta, reasoning=reasoning, content=content, tool_calls=calls))
