"""One call of OpenAI's API: from its body to a submission, and from the submission's events to its answer."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

from nanovllm import AnswerFormat, AnswerSplitter, StreamDelta
from nanovllm.integrations.serving.engine_loop import Submission
from nanovllm.integrations.serving.metrics import CallRecord
from nanovllm.openai_format.openai_batch import CHAT, COMPLETION, Kind, Responder, read_request, tool_calls, usage
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

    def __init__(
        self,
        kind: Kind,
        body: Row,
        answers: AnswerFormat,
        splits_reasoning: bool = False,
        splits_tool_calls: bool = False,
    ):
        """
        Args:
            answers: how the model writes them.
            splits_reasoning: of chats.
            splits_tool_calls: of chats with tools.

        Raises ValueError or TypeError with what cannot be served.
        """
        self._kind, self._answers = kind, answers
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
        self.submission.splits_answers = self._splits_reasoning or self._tools is not None
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
        if self.submission.splits_answers:
            for sample in samples:
                self._split(sample, self._splitter(), sample)
        output = {"num_prompt_tokens": num_prompt_tokens, "prompt_logprobs": None, "samples": samples}
        return responder.body(self._kind, output, self._num_logprobs)

    def _splitter(self) -> AnswerSplitter:
        return self._answers.splitter(self._tools, self.submission.opens_reasoning, self._splits_reasoning)

    def _split(self, delta: Mapping[str, Any], splitter: AnswerSplitter, sample: Row, first: int = 0) -> None:
        """Put the parts of a delta, or of a whole answer, into an answer's sample, as OpenAI writes them. first: calls
        that came before."""
        finish_reason = delta["finish_reason"]
        reasoning, content, calls = splitter.push(delta["text"] or "", delta["token_ids"], finish_reason)
        sample["reasoning"] = reasoning if splitter.has_reasoning else None
        sample["content"] = content
        sample["tool_calls"] = tool_calls(self._allowed(calls, first), first)
        if finish_reason == "stop" and (calls or first):
            sample["finish_reason"] = "tool_calls"

    async def events(self, responder: Responder, num_prompt_tokens: int) -> AsyncIterator[str]:
        """The answer as server-sent events. An error that comes now is an event too."""
        head = responder.head(self._kind)
        if self._kind == CHAT:
            head["object"] = "chat.completion.chunk"
        if self._includes_usage:
            head["usage"] = None
        num_tokens, starts = 0, [0] * self.submission.num_choices
        begun: set[int] = set()
        splitters = [self._splitter() for _ in starts] if self.submission.splits_answers else []
        num_calls = [0] * self.submission.num_choices
        try:
            async for index, delta in self._deltas():
                num_tokens += len(delta["token_ids"])
                sample: Row = {**delta}
                has_text = bool(delta["text"])
                if splitters:
                    self._split(delta, splitters[index], sample, num_calls[index])
                    sample["reasoning"] = sample["reasoning"] or None
                    num_calls[index] += len(sample["tool_calls"])
                    has_text = any(sample[name] for name in ("reasoning", "content", "tool_calls"))
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
