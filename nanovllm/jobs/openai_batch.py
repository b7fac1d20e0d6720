"""OpenAI's batch format, which vLLM's run-batch reads too: a line to a request, an answer to a line."""

import time
from collections.abc import Mapping
from typing import Any, NamedTuple
from uuid import uuid4

Row = dict[str, Any]

# What a body may say without an effect on the answer: the account's, the service's, or about things that a file lacks.
_WITHOUT_EFFECT = {
    *("metadata", "model", "parallel_tool_calls", "priority", "prompt_cache_key", "request_id", "safety_identifier"),
    *("service_tier", "store", "stream_options", "user"),
}
_DEFAULTS = {"best_of": (1,), "echo": (False,), "stream": (False,), "tool_choice": ("auto", "none")}
CHAT_OPTIONS = ("tools", "chat_template_kwargs")


class Kind(NamedTuple):
    """One of the two kinds of requests."""

    url: str
    prompt: str  # the key of the body that holds it
    id_prefix: str
    object: str


CHAT = Kind("/v1/chat/completions", "messages", "chatcmpl", "chat.completion")
COMPLETION = Kind("/v1/completions", "prompt", "cmpl", "text_completion")
_BESIDE_BODY = ("custom_id", "method", "url")


def is_request(row: Row) -> bool:
    """Whether a row is one of OpenAI's: it has a `body` with a prompt, or with OpenAI's other keys beside it. Any other
    `body` is a column like the rest."""
    body = row.get("body")
    if not isinstance(body, Mapping):
        return False
    return any(kind.prompt in body for kind in (CHAT, COMPLETION)) or not row.keys().isdisjoint(_BESIDE_BODY)


def read_request(row: Row) -> tuple[Kind, Any, Row, Row]:
    """The kind of request, its prompt, the options of SamplingParams, and those of the chat template.

    row: one that `is_request`. Raises ValueError with what cannot be served.
    """
    body, url = row["body"], row.get("url")
    if row.get("method") not in (None, "POST"):
        raise ValueError(f"method={row['method']!r}: must be 'POST'")
    if url not in (None, CHAT.url, COMPLETION.url):
        raise ValueError(f"url={url!r}: must be {CHAT.url!r} or {COMPLETION.url!r}")
    kind = CHAT if url == CHAT.url or (url is None and "messages" in body) else COMPLETION
    given = {name: value for name, value in body.items() if value is not None and name not in _WITHOUT_EFFECT}
    if kind.prompt not in given:
        raise ValueError(f"body: has no {kind.prompt!r}")
    prompt = given.pop(kind.prompt)
    if kind == COMPLETION and isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        raise ValueError("body: 'prompt' must be one text or one list of token ids; give each prompt a line of its own")
    chat_options = {name: given.pop(name) for name in CHAT_OPTIONS if name in given}
    for name, harmless in _DEFAULTS.items():
        if name in given and given.pop(name) not in harmless:
            raise ValueError(f"body: {name}={body[name]!r}: cannot be served in a batch")
    return kind, prompt, _sampling_options(kind, given), chat_options


def _sampling_options(kind: Kind, given: Row) -> Row:
    """OpenAI's names to those of SamplingParams; vLLM's further ones are the same."""
    if "max_completion_tokens" in given:
        given["max_tokens"] = given.pop("max_completion_tokens")
    form = given.pop("response_format", {"type": "text"})
    match form:
        case {"type": "text"}:
            pass
        case {"type": "json_object"}:
            given["structured_outputs"] = {"json": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": schema}}:
            given["structured_outputs"] = {"json": schema}
        case _:
            types = "text, json_object, or json_schema with a schema"
            raise ValueError(f"body: response_format={form!r}: must be of type {types}")
    if given.get("logprobs") or given.get("top_logprobs"):
        raise ValueError("body: logprobs are not written in OpenAI's format; lines with 'messages' have them")
    given.pop("logprobs", None)
    given.pop("top_logprobs", None)
    return given


def answer(kind: Kind, line_id: Any, samples: list[Any], num_tokens: tuple[int, int], model: str) -> Row:
    """A line of output. samples: those of the RequestOutput. num_tokens: of the prompt, and of all samples."""
    body = {
        "id": f"{kind.id_prefix}-{uuid4().hex}",
        "object": kind.object,
        "created": int(time.time()),
        "model": model,
        "choices": [_choice(kind, index, sample) for index, sample in enumerate(samples)],
        "usage": {
            "prompt_tokens": num_tokens[0],
            "completion_tokens": num_tokens[1],
            "total_tokens": sum(num_tokens),
        },
    }
    return {
        "id": f"batch_req_{uuid4().hex}",
        "custom_id": line_id,
        "response": {"status_code": 200, "request_id": body["id"], "body": body},
        "error": None,
    }


def _choice(kind: Kind, index: int, sample: Mapping[str, Any]) -> Row:
    choice = {"index": index, "finish_reason": sample["finish_reason"], "logprobs": None}
    if kind == CHAT:
        return choice | {"message": {"role": "assistant", "content": sample["text"]}}
    return choice | {"text": sample["text"]}
