"""OpenAI's batch format, which vLLM's run-batch reads too: a line to a request, an answer to a line."""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple
from uuid import uuid4

from nanovllm import AnswerFormat, find_format
from nanovllm.openai_format.request_names import Row, as_token_ids
from nanovllm.utils.checks import require
from nanovllm.utils.text_json import as_json


class Kind(NamedTuple):
    """One of the two kinds of requests."""

    url: str
    prompt: str  # the key of the body that holds it
    id_prefix: str
    object: str


CHAT = Kind("/v1/chat/completions", "messages", "chatcmpl", "chat.completion")
COMPLETION = Kind("/v1/completions", "prompt", "cmpl", "text_completion")
_LOWEST = -9999.0  # OpenAI's log-probability of what cannot be; JSON has no infinity
_BESIDE_BODY = ("custom_id", "method", "url")


def is_request(row: Row) -> bool:
    """Whether a row is one of OpenAI's: it has a `body` with a prompt, or with OpenAI's other keys beside it. Any other
    `body` is a column like the rest."""
    body = row.get("body")
    if not isinstance(body, Mapping):
        return False
    return any(kind.prompt in body for kind in (CHAT, COMPLETION)) or not row.keys().isdisjoint(_BESIDE_BODY)


def read_request(row: Row) -> tuple[Kind, Any, Row]:
    """The kind of request, its prompt, and its parameters.

    row: one that `is_request`. Raises ValueError with what cannot be served.
    """
    body, url = row["body"], row.get("url")
    require("method", row.get("method"), row.get("method") in (None, "POST"), "'POST'")
    require("url", url, url in (None, CHAT.url, COMPLETION.url), f"{CHAT.url!r} or {COMPLETION.url!r}")
    kind = CHAT if url == CHAT.url or (url is None and "messages" in body) else COMPLETION
    given = {name: value for name, value in body.items() if value is not None}
    if kind.prompt not in given:
        raise ValueError(f"body: has no {kind.prompt!r}")
    prompt = given.pop(kind.prompt)
    if kind == COMPLETION:
        prompt = as_token_ids(prompt)
    if kind == COMPLETION and isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        raise ValueError("body: 'prompt' must be one text or one list of token ids; give each prompt a line of its own")
    return kind, prompt, given


def find_answers(tokenizer: Any) -> AnswerFormat:
    return AnswerFormat(tokenizer, find_format(tokenizer))


class Responder:
    """What answers in OpenAI's format need beside the outputs.

    Attributes:
        model: the name that they give.
    """

    def __init__(
        self, model: str, load_tokenizer: Callable[[], Any], find_answers: Callable[[Any], Any] = find_answers
    ):
        """
        Args:
            load_tokenizer: called when the first answer needs it.
            find_answers: makes the AnswerFormat of a tokenizer.
        """
        self.model = model
        self._load_tokenizer, self._find_answers = load_tokenizer, find_answers

    @cached_property
    def answers(self) -> AnswerFormat:
        """How the model's answers to chats are written."""
        return self._find_answers(self._load_tokenizer())

    def answer(self, kind: Kind, line_id: Any, output: Any, num_logprobs: int | None) -> Row:
        """A line of output. output: the RequestOutput. num_logprobs: the request's `logprobs`."""
        body = self.body(kind, output, num_logprobs)
        return {
            "id": f"batch_req_{uuid4().hex}",
            "custom_id": line_id,
            "response": {"status_code": 200, "request_id": body["id"], "body": body},
            "error": None,
        }

    def body(self, kind: Kind, output: Any, num_logprobs: int | None) -> Row:
        """The body of an answer; arguments as for `answer`."""
        samples = output.get("samples") or [output]
        num_completion_tokens = sum(len(sample["token_ids"]) for sample in samples)
        body = self.head(kind) | {
            "choices": [self.choice(kind, index, sample, num_logprobs) for index, sample in enumerate(samples)],
            "usage": usage(output["num_prompt_tokens"], num_completion_tokens),
        }
        if output["prompt_logprobs"] is not None:  # vLLM's: OpenAI has none.
            body["prompt_logprobs"] = output["prompt_logprobs"]
        return body

    def head(self, kind: Kind) -> Row:
        """What a body begins with."""
        return {
            "id": f"{kind.id_prefix}-{uuid4().hex}",
            "object": kind.object,
            "created": int(time.time()),
            "model": self.model,
        }

    def choice(self, kind: Kind, index: int, sample: Mapping[str, Any], num_logprobs: int | None) -> Row:
        """sample: a SampleOutput or a StreamDelta; one with `reasoning` and `content` is split."""
        choice = {"index": index, "finish_reason": sample["finish_reason"], "logprobs": None}
        if num_logprobs is not None:
            pairs = zip(sample["token_ids"], sample["logprobs"], strict=True)
            steps = [self._texts.step(token_id, logprobs, num_logprobs) for token_id, logprobs in pairs]
            choice["logprobs"] = _chat_logprobs(steps) if kind == CHAT else _completion_logprobs(steps)
        if kind == CHAT:
            return choice | {"message": {"role": "assistant"} | _message(sample)}
        return choice | {"text": sample["text"]}

    @cached_property
    def _texts(self) -> "_TokenTexts":
        return _TokenTexts(self._load_tokenizer())


def _message(sample: Mapping[str, Any]) -> Row:
    if "content" not in sample:
        return {"content": sample["text"]}
    if sample.get("tool_calls"):
        message = _message({**sample, "tool_calls": None})
        return message | {"content": message["content"] or None, "tool_calls": sample["tool_calls"]}
    if sample["reasoning"] is None:
        return {"content": sample["content"]}
    # DeepSeek's name, which chat templates read too, and vLLM's. Clients know one of them.
    names = ("reasoning_content", "reasoning")
    return {"content": sample["content"]} | dict.fromkeys(names, sample["reasoning"])


def tool_calls(calls: Iterable[Mapping[str, Any]], first: int = 0) -> list[Row]:
    """Calls as OpenAI writes them, with ids and with arguments as JSON text. calls: as `chat` gives them. first: how
    many the answer has had before."""
    return [
        {
            "index": index,
            "id": f"call_{uuid4().hex}",
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": as_json(call["function"]["arguments"])},
        }
        for index, call in enumerate(calls, first)
    ]


def usage(num_prompt_tokens: int, num_completion_tokens: int) -> Row:
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_completion_tokens,
        "total_tokens": num_prompt_tokens + num_completion_tokens,
    }


class _Step(NamedTuple):
    """A completion token, and the likeliest in its place: pairs of a text and a log-probability."""

    token: tuple[str, float]
    likeliest: list[tuple[str, float]]


class _TokenTexts:
    """Texts of single tokens. A decoder may strip a space at the beginning, so each is decoded behind another token."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._first: list[int] = tokenizer.encode("a", add_special_tokens=False)
        self._start = len(self._decode(self._first))
        self._texts: dict[int, str] = {}

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, clean_up_tokenization_spaces=False)

    def step(self, token_id: int, logprobs: Mapping[int, float], num_likeliest: int) -> _Step:
        """logprobs: of the token and of the likeliest ones, by token id."""
        likeliest = sorted(logprobs.items(), key=lambda item: -item[1])[:num_likeliest]
        pairs = [(self._text(each), max(logprob, _LOWEST)) for each, logprob in likeliest]
        return _Step((self._text(token_id), max(logprobs[token_id], _LOWEST)), pairs)

    def _text(self, token_id: int) -> str:
        if token_id not in self._texts:
            self._texts[token_id] = self._decode([*self._first, token_id])[self._start :]
        return self._texts[token_id]


def _chat_logprobs(steps: list[_Step]) -> Row:
    def token(text: str, logprob: float) -> Row:
        # A part of a character is no text of its own, so its bytes are not known here.
        return {"token": text, "logprob": logprob, "bytes": None if "\ufffd" in text else list(text.encode())}

    tokens = [token(*step.token) | {"top_logprobs": [token(*each) for each in step.likeliest]} for step in steps]
    return {"content": tokens, "refusal": None}


def _completion_logprobs(steps: list[_Step]) -> Row:
    texts = [step.token[0] for step in steps]
    return {
        "tokens": texts,
        "token_logprobs": [step.token[1] for step in steps],
        "top_logprobs": [dict(step.likeliest) for step in steps],
        "text_offset": [0, *accumulate(map(len, texts))][: len(texts)],
    }
