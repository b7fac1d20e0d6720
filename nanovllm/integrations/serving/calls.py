"""One call of OpenAI's API: from its body to a submission, and from the submission's events to its answer."""

from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from nanovllm import ReasoningSplitter, StreamDelta, ToolCallSplitter, split_reasoning, split_tool_calls
from nanovllm.integrations.serving.engine_loop import Submission
from nanovllm.integrations.serving.metrics import CallRecord
from nanovllm.openai_format.openai_batch import CHAT, COMPLETION, Kind, Responder, read_request, usage
from nanovllm.openai_format.request_names import Row, as_token_ids, make_params, read_parameters
from nanovllm.utils.checks import quoted
from nanovllm.utils.text_json import as_json


class FailedAnswer(RuntimeError):
    """The engine could not finish an answer: the model's logits are NaN, for example."""


class Call:
    """A call whose body can be served, as far as one knows without the model.

    Attributes:
        submission: what the engine gets.
        streams: whether the answer is sent in parts.
        record: what is counted of it.
    """

    def __init__(self, kind: Kind, body: Row, splits_reasoning: bool = False, splits_tool_calls: bool = False):
        """splits_reasoning: of chats; splits_tool_calls: of chats with tools. Raises ValueError or TypeError with what
        cannot be served."""
        self._kind = kind
        self._splits_reasoning = splits_reasoning and kind == CHAT
        body = {name: value for name, value in body.items() if value is not None}
        self.streams = body.pop("stream", False)
        if not isinstance(self.streams, bool):
            raise ValueError(f"stream={quoted(self.streams)}: must be true or false")
        options = body.pop("stream_options", {})
        if not isinstance(options, dict):
            raise ValueError(f"stream_options={quoted(options)}: must be an object")
        self._includes_usage = bool(options.get("include_usage"))
        # As OpenAI means it: with false an answer has at most one call. What the model writes after it is no call.
        self._allows_several_calls = body.pop("parallel_tool_calls", True)
        if not isinstance(self._allows_several_calls, bool):
            raise ValueError(f"parallel_tool_calls={quoted(self._allows_several_calls)}: must be true or false")
        prompts = None
        if kind == COMPLETION and _is_batch(body.get("prompt")):
            prompts = list(map(as_token_ids, body["prompt"]))
            body["prompt"] = prompts[0]
        _, prompt, given = read_request({"body": body, "url": kind.url})
        options, chat_options = read_parameters(given, kind == CHAT)
        # As in a job, an answer without max_tokens ends where the model ends it.
        params = make_params({"max_tokens": None} | options)
        if params.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs: is not served; use LLM.generate or LLM.score")
        self._num_logprobs = params.logprobs
        tools = chat_options.tools if kind == CHAT and splits_tool_calls else None
        self._tools: list[Any] | None = tools if isinstance(tools, list) and tools else None
        self.submission = Submission(
            [prompt] if prompts is None else prompts, params, chat_options if kind == CHAT else None
        )
        self.submission.splits_reasoning = self._splits_reasoning
        self.record = CallRecord()

    def end(self) -> None:
        """Called when nobody waits for more of the answer."""
        self.record.end(self.submission.num_choices)

    async def accepted(self) -> int:
        """The number of prompt tokens, when the engine has them all. Raises ValueError or TypeError if it refuses one,
        EngineDied."""
        num_prompt_tokens = _checked(await self.submission.events.get())
        self.record.num_prompt_tokens = num_prompt_tokens
        return num_prompt_tokens

    async def _deltas(self) -> AsyncIterator[tuple[int, StreamDelta]]:
        """Until all choices have ended. Raises EngineDied and FailedAnswer."""
        num_left = self.submission.num_choices
        while num_left:
            choice, delta = _checked(await self.submission.events.get())
            self.record.add(delta)
            if delta["finish_reason"] == "error":
                raise FailedAnswer(delta["error"])
            num_left -= delta["finish_reason"] is not None
            yield choice, delta

    async def answer(self, responder: Responder) -> Row:
        """The whole body. Raises as `accepted`, and FailedAnswer."""
        num_prompt_tokens = await self.accepted()
        samples = [Row(text="", token_ids=[], logprobs=[]) for _ in range(self.submission.num_choices)]
        async for choice, delta in self._deltas():
            sample = samples[choice]
            sample["text"] += delta["text"] or ""
            sample["token_ids"] += delta["token_ids"]
            sample["logprobs"] += delta["logprobs"] or []
            sample["finish_reason"] = delta["finish_reason"]
        if self._splits_reasoning:
            for sample in samples:
                parts = split_reasoning(sample["text"], self.submission.opens_reasoning)
                sample["reasoning"], sample["content"] = parts
        if self._tools is not None:
            for sample in samples:
                text = sample["content"] if "content" in sample else sample["text"]
                content, calls = split_tool_calls(text, self._tools)
                calls = self._allowed(calls)
                _add_tool_calls(sample, content, calls, sample["finish_reason"])
        output = {"num_prompt_tokens": num_prompt_tokens, "prompt_logprobs": None, "samples": samples}
        return responder.body(self._kind, output, self._num_logprobs)

    async def events(self, responder: Responder, num_prompt_tokens: int) -> AsyncIterator[str]:
        """The answer as server-sent events. An error that comes now is an event too."""
        head = responder.head(self._kind)
        if self._kind == CHAT:
            head["object"] = "chat.completion.chunk"
        if self._includes_usage:
            head["usage"] = None
        num_tokens, starts = 0, [0] * self.submission.num_choices
        begun: set[int] = set()
        splitters = (
            [ReasoningSplitter(self.submission.opens_reasoning) for _ in starts] if self._splits_reasoning else []
        )
        callers = [ToolCallSplitter(self._tools) for _ in starts] if self._tools is not None else []
        num_calls = [0] * self.submission.num_choices
        try:
            async for index, delta in self._deltas():
                num_tokens += len(delta["token_ids"])
                sample: Row = {**delta}
                if splitters:
                    parts = splitters[index].push(delta["text"] or "", delta["finish_reason"] is not None)
                    sample["reasoning"], sample["content"] = parts[0] or None, parts[1]
                has_text = any(parts) if splitters else bool(delta["text"])
                if callers:
                    text = parts[1] if splitters else delta["text"] or ""
                    content, calls = callers[index].push(text, delta["finish_reason"] is not None)
                    calls = self._allowed(calls, num_calls[index])
                    _add_tool_calls(sample, content, calls, delta["finish_reason"], num_calls[index])
                    num_calls[index] += len(calls)
                    has_text = bool(content or calls or sample["reasoning"])
                if not has_text and delta["finish_reason"] is None and not delta["logprobs"]:
                    continue  # The tokens so far are a part of a character, or of a tag.
                choice = responder.choice(self._kind, index, sample, self._num_logprobs)
                if self._kind == CHAT:
                    message = choice.pop("message")
                    if index in begun:
                        del message["role"]
                    choice["delta"] = message
                    begun.add(index)
                elif choice["logprobs"] is not None:
                    _shift(choice["logprobs"], starts, index)
                yield _event(head | {"choices": [choice]})
        except RuntimeError as error:
            yield _event(error_body(str(error), "server_error"))
            return
        if self._includes_usage:
            yield _event(head | {"choices": [], "usage": usage(num_prompt_tokens, num_tokens)})
        yield "data: [DONE]\n\n"

    def _allowed(self, calls: list[Row], num_before: int = 0) -> list[Row]:
        """Those of a choice's calls that are sent. num_before: that have been."""
        return calls if self._allows_several_calls else calls[: max(1 - num_before, 0)]


def _add_tool_calls(sample: Row, content: str, calls: list[Row], finish_reason: str | None, first: int = 0) -> None:
    """Put what a ToolCallSplitter found into an answer's sample, as OpenAI writes it. first: calls that came before."""
    sample["content"] = content
    sample.setdefault("reasoning", None)
    sample["tool_calls"] = [
        {"index": first + i, "id": f"call_{uuid4().hex}", "type": "function", "function": _as_json(call["function"])}
        for i, call in enumerate(calls)
    ]
    if finish_reason == "stop" and (calls or first):
        sample["finish_reason"] = "tool_calls"


def _as_json(function: Row) -> Row:
    return {"name": function["name"], "arguments": as_json(function["arguments"])}


def _is_batch(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(isinstance(each, str | list) for each in prompt)


def _checked(event: Any) -> Any:
    if isinstance(event, Exception):
        raise event
    return event


def _shift(logprobs: Row, starts: list[int], index: int) -> None:
    """Make the offsets of a part those of the whole text. starts: of the next part of each choice."""
    length = sum(map(len, logprobs["tokens"]))
    logprobs["text_offset"] = [starts[index] + offset for offset in logprobs["text_offset"]]
    starts[index] += length


def _event(body: Row) -> str:
    return f"data: {as_json(body)}\n\n"


def error_body(message: str, kind: str, code: str | None = None) -> Row:
    """An error as OpenAI writes it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
