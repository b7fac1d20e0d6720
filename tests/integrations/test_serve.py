"""`nanovllm serve`, asked by OpenAI's client: answers, streams, errors, clients that leave, and its end."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import transformers
from channels import (
    CALLS,
    HARMONY_CALLS,
    QWEN_CALLS,
    TOOLS,
    let_it_say,
    make_channels_checkpoint,
    make_qwen_checkpoint,
)
from checkpoints import assert_idle, greedy, make_ascii_checkpoint, make_llm

from nanovllm import LLM, SamplingParams
from nanovllm.openai_format import request_names

REASON = "needs OpenAI's client and the server's packages: pip install '.[test]'"
openai = pytest.importorskip("openai", reason=REASON)
pytest.importorskip("uvicorn", reason=REASON)
pytest.importorskip("starlette", reason=REASON)
server_module = pytest.importorskip("nanovllm.integrations.serving.server")
Metrics = pytest.importorskip("nanovllm.integrations.serving.metrics").Metrics
EngineLoop = pytest.importorskip("nanovllm.integrations.serving.engine_loop").EngineLoop
Responder = pytest.importorskip("nanovllm.openai_format.openai_batch").Responder

KEY = "secret"
MODEL = "tiny"
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [{"role": "user", "content": "name a block"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = make_ascii_checkpoint(tmp_path_factory.mktemp("serve"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


class Running:
    """A server in a thread of this process."""

    def __init__(self, llm: LLM, chat_template: str | None = None, **options):
        self.llm = llm
        self.engine = EngineLoop(llm, chat_template)
        self.server = server_module.Server(self.engine, Responder(MODEL, llm.get_tokenizer), KEY, **options)
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}/v1"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()

    def end(self):
        self.server.should_exit = True
        self.thread.join(60)
        self.listener.close()
        assert not self.thread.is_alive()

    def wait_until_idle(self):
        deadline = time.monotonic() + 60
        while (self.engine._open or not self.llm.is_finished()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert_idle(self.llm)
        assert self.engine._submissions == {} == self.engine._num_left
        assert not self.engine._open


@pytest.fixture(scope="module")
def running(path):
    with make_llm(path, skip_tokenizer_init=False, max_model_len=400, num_kvcache_blocks=1024) as llm:
        running = Running(llm)
        yield running
        running.end()


@pytest.fixture
def client(running):
    with openai.OpenAI(base_url=running.url, api_key=KEY, max_retries=0, timeout=120) as client:
        yield client
    running.wait_until_idle()


@pytest.fixture(scope="module")
def expected(path):
    """LLM.chat and LLM.generate of an engine of its own."""
    with make_llm(path, skip_tokenizer_init=False, max_model_len=400) as llm:
        yield llm


# -- answers -----------------------------------------------------------------------------------------------------------


def test_a_chat(client, expected):
    (whole,) = expected.chat(CHAT, greedy(20), use_tqdm=False)
    options = {"temperature": 0, "max_tokens": 20, "extra_body": {"ignore_eos": True}}
    answer = client.chat.completions.create(model=MODEL, messages=CHAT, **options)
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", whole["text"])
    assert choice.finish_reason == whole["finish_reason"]
    assert answer.usage.prompt_tokens == whole["num_prompt_tokens"]
    assert answer.usage.completion_tokens == len(whole["token_ids"])


def test_a_streamed_chat(client, expected):
    (whole,) = expected.chat(CHAT, greedy(20), use_tqdm=False)
    options = {"temperature": 0, "max_tokens": 20, "stream": True, "stream_options": {"include_usage": True}}
    options["extra_body"] = {"ignore_eos": True}
    *parts, end = client.chat.completions.create(model=MODEL, messages=CHAT, **options)
    assert {part.object for part in parts} == {"chat.completion.chunk"}
    assert len({part.id for part in parts}) == 1
    assert "".join(part.choices[0].delta.content for part in parts) == whole["text"]
    assert [part.choices[0].delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
    assert [part.choices[0].finish_reason for part in parts] == [None] * (len(parts) - 1) + [whole["finish_reason"]]
    assert len(parts) > 10, "as they come"
    assert end.choices == []
    assert end.usage.completion_tokens == len(whole["token_ids"])
    assert end.usage.prompt_tokens == whole["num_prompt_tokens"]


@pytest.mark.parametrize("is_open", [False, True], ids=["opened by the model", "opened by the template"])
def test_reasoning_apart_from_the_content(path, is_open):
    pytest.importorskip("llguidance", reason="needs the extra structured")
    form = "<think>\n" * (not is_open) + r"[a-z ]{30}\n</think>\n\n[a-z]{5}"
    options = {"temperature": 0.9, "max_tokens": 100, "seed": 2, "n": 2}
    options["extra_body"] = {"structured_outputs": {"regex": form}}
    with make_llm(path, skip_tokenizer_init=False, max_model_len=400, chat_format="think") as llm:
        running = Running(
            llm,
            TEMPLATE.replace("<assistant>", "<assistant><think>\n" if is_open else "<assistant>"),
            splits_reasoning=True,
        )
        with openai.OpenAI(base_url=running.url, api_key=KEY, max_retries=0, timeout=120) as client:
            whole = client.chat.completions.create(model=MODEL, messages=CHAT, **options)
            parts = [*client.chat.completions.create(model=MODEL, messages=CHAT, **options, stream=True)]
            options["extra_body"] = {"structured_outputs": {"regex": "[a-z]{9}"}}
            if is_open:
                options["extra_body"] |= {"thinking_token_budget": 12, "thinking_end_text": " so"}
            plain = client.chat.completions.create(model=MODEL, messages=CHAT, **options)
            pieces = [*client.chat.completions.create(model=MODEL, messages=CHAT, **options | {"n": 1}, stream=True)]
            # A form, because tokens that are drawn may be pieces of characters and give no text.
            form = {"structured_outputs": {"regex": "[a-z]{3}"}}
            text = client.completions.create(model=MODEL, prompt="a block", max_tokens=9, extra_body=form)
        running.end()
    for choice in whole.choices:
        message = choice.message
        assert re.fullmatch("[a-z ]{1,30}", message.reasoning_content)
        assert message.reasoning == message.reasoning_content
        assert re.fullmatch("[a-z]{5}", message.content)
        deltas = [part.choices[0].delta for part in parts if part.choices[0].index == choice.index]
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
        assert "".join(delta.content for delta in deltas) == message.content
        assert [delta.role for delta in deltas] == ["assistant"] + [None] * (len(deltas) - 1)
        assert len([delta for delta in deltas if getattr(delta, "reasoning", None)]) > 5, "as it comes"
    message = plain.choices[0].message
    assert re.fullmatch("[a-z]{9}", message.content)
    assert "".join(part.choices[0].delta.content for part in pieces) == message.content
    if is_open:  # The form begins where the budget ends the thinking.
        assert message.reasoning.endswith(" so")
    else:
        assert not hasattr(message, "reasoning")
    assert re.fullmatch("[a-z]{3}", text.choices[0].text), "a completion is no chat"


@pytest.mark.parametrize(
    ("make", "written", "answer"),
    [
        (
            make_channels_checkpoint,
            HARMONY_CALLS,
            "<|channel|>analysis<|message|>ef<|end|><|start|>assistant<|channel|>final<|message|>gh<|return|>",
        ),
        (make_qwen_checkpoint, QWEN_CALLS, "ef</think>gh<|im_end|>"),
    ],
    ids=["Harmony", "Qwen"],
)
def test_a_conversation_with_thinking_and_two_calls(make, written, answer, tmp_path):
    path = make(tmp_path)
    with make_llm(path, skip_tokenizer_init=False, max_model_len=600) as llm:
        running = Running(llm, splits_reasoning=True, splits_tool_calls=True)
        try:
            with openai.OpenAI(base_url=running.url, api_key=KEY, max_retries=0, timeout=120) as client:
                options = {"model": MODEL, "temperature": 0, "max_tokens": 200, "tools": TOOLS}
                let_it_say(llm, CHAT, written, tools=TOOLS)
                message = ask_both_ways(client, CHAT, "tool_calls", **options)
                assert (message.reasoning_content, message.content) == ("ab", "cd")
                calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
                assert calls == CALLS
                results = [{"role": "tool", "tool_call_id": call.id, "content": "2"} for call in message.tool_calls]
                messages = [*CHAT, message.model_dump(exclude_none=True), *results]
                let_it_say(llm, messages, answer, tools=TOOLS)
                message = ask_both_ways(client, messages, "stop", **options)
                assert (message.reasoning_content, message.content, message.tool_calls) == ("ef", "gh", None)
        finally:
            running.end()


def ask_both_ways(client, messages, finish_reason, **options):
    """The message that answers a chat. A stream of it adds up to the same."""
    (choice,) = client.chat.completions.create(messages=messages, **options).choices
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(messages=messages, stream=True, **options)]
    deltas, message = [chunk.delta for chunk in chunks], choice.message
    assert (choice.finish_reason, chunks[-1].finish_reason) == (finish_reason, finish_reason)
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == message.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == (message.content or "")
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    assert [part.index for part in parts] == list(range(len(message.tool_calls or ())))
    assert [part.function.model_dump() for part in parts] == [
        call.function.model_dump() for call in message.tool_calls or ()
    ]
    return message


def test_completions_of_several_prompts_and_samples(client, expected):
    prompts = ["a block is", "the table names"]
    params = SamplingParams(temperature=1, seed=5, max_tokens=12, n=2, logprobs=2, stop=["e"])
    outputs = expected.generate(prompts, params, use_tqdm=False)
    samples = [sample for output in outputs for sample in output["samples"]]
    options = {"temperature": 1, "seed": 5, "max_tokens": 12, "n": 2, "logprobs": 2, "stop": "e"}
    answer = client.completions.create(model=MODEL, prompt=prompts, **options)
    streamed = [{"text": "", "tokens": [], "offsets": []} for _ in samples]
    for part in client.completions.create(model=MODEL, prompt=prompts, **options, stream=True):
        (choice,) = part.choices
        streamed[choice.index]["text"] += choice.text
        streamed[choice.index]["tokens"] += choice.logprobs.tokens
        streamed[choice.index]["offsets"] += choice.logprobs.text_offset
    for choice, sample, parts in zip(answer.choices, samples, streamed, strict=True):
        assert choice.text == sample["text"] == parts["text"]
        assert choice.finish_reason == sample["finish_reason"]
        assert len(choice.logprobs.token_logprobs) == len(sample["token_ids"])
        assert parts["tokens"] == choice.logprobs.tokens
        assert parts["offsets"] == choice.logprobs.text_offset
    token_ids = client.completions.create(model=MODEL, prompt=[5, 6, 7], temperature=0, max_tokens=4)
    assert token_ids.usage.prompt_tokens == 3


def test_log_probabilities_and_forms_of_chats(client):
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = answer.choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in content] == [3] * 5
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, extra_body={"structured_outputs": {"choice": ["yes", "no"]}}
    )
    assert answer.choices[0].message.content in ("yes", "no")


def test_the_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "nanovllm"
    with pytest.raises(openai.NotFoundError, match="other"):
        client.models.retrieve("some/other")


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.nightly)])
def test_many_at_once(running, expected, count):
    prompts = [[5 + i % 7, 6, 7 + i % 50] for i in range(count)]
    whole = expected.generate(prompts, greedy(8), use_tqdm=False)

    async def ask_all():
        async with openai.AsyncOpenAI(base_url=running.url, api_key=KEY, max_retries=0, timeout=300) as client:

            async def ask(i):
                options = {"model": MODEL, "prompt": prompts[i], "temperature": 0, "max_tokens": 8}
                options["extra_body"] = {"ignore_eos": True}
                if i % 2:
                    return (await client.completions.create(**options)).choices[0].text
                return "".join(
                    [part.choices[0].text async for part in await client.completions.create(**options, stream=True)]
                )

            return await asyncio.gather(*map(ask, range(count)))

    assert asyncio.run(ask_all()) == [output["text"] for output in whole]
    running.wait_until_idle()


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.parametrize("splits_reasoning", [False, True])
def test_tool_calls_apart_from_the_content(path, splits_reasoning):
    pytest.importorskip("llguidance", reason="needs the extra structured")
    template = "{% for message in messages %}{{ message.content }}{% endfor %}{% if tools %}.{% endif %}"
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    regex = "[a-z]{5}" + re.escape(CALL) * 2
    with make_llm(path, skip_tokenizer_init=False, max_model_len=400, chat_format="hermes") as llm:
        running = Running(llm, template, splits_reasoning=splits_reasoning, splits_tool_calls=True)
        try:
            with openai.OpenAI(base_url=running.url, api_key=KEY, max_retries=0, timeout=120) as client:
                options = {"model": MODEL, "messages": CHAT, "temperature": 0, "max_tokens": 300}
                options |= {"extra_body": {"structured_outputs": {"regex": regex}}}
                (choice,) = client.chat.completions.create(tools=tools, **options).choices
                (plain,) = client.chat.completions.create(**options).choices
                chunks = list(client.chat.completions.create(tools=tools, stream=True, **options))
        finally:
            running.end()
    assert plain.message.content.endswith(CALL * 2)
    assert plain.message.tool_calls is None
    assert re.fullmatch("[a-z]{5}", choice.message.content)
    assert choice.finish_reason == "tool_calls"
    calls = choice.message.tool_calls
    assert [(each.function.name, each.function.arguments) for each in calls] == [("add", '{"a": 1}')] * 2
    assert len({each.id for each in calls}) == 2
    parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or ()]
    assert [(part.index, part.function.arguments) for part in parts] == [(0, '{"a": 1}'), (1, '{"a": 1}')]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["wrong", "s\u00e9cret", ""])
def test_a_wrong_key(running, key):
    request = post(running, {"model": MODEL, "messages": CHAT}, key=key)
    assert request[0] == 401
    assert request[1]["error"]["code"] == "invalid_api_key"
    with openai.OpenAI(base_url=running.url, api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match="wrong API key"):
            client.models.list()
        with pytest.raises(openai.AuthenticationError):
            client.completions.create(model=MODEL, prompt="a")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "empty"),
        ({"messages": [{"role": "user"}]}, "content"),
        ({"messages": [{"role": "user", "content": "a" * 5000}]}, "tokens"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"max_tokens": 5.5}, "max_tokens=5.5: must be an integer"),
        ({"extra_body": {"best_of": 3}}, "best_of=3: cannot be served; use n"),
        ({"extra_body": {"echo": True}}, "echo=True: cannot be served; the request has the prompt"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"extra_body": {"structured_outputs": {"regex": "a(b"}}}, "regex"),
        ({"extra_body": {"stream": "yes"}}, "stream"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests(client, options, message, stream):
    options = {"model": MODEL, "messages": CHAT, "stream": stream} | options
    if message == "surrogate":  # The client refuses to send it.
        status, body = post_text(client.base_url.port, json.dumps(options))
        assert status == 400
        assert "message 0, content: holds half of a surrogate pair" in body["error"]["message"]
        return
    with pytest.raises(openai.BadRequestError, match=message) as found:
        client.chat.completions.create(**options)
    assert found.value.type == "invalid_request_error"


def post_text(port: int, text: str, kind: str = "application/json", url: str = "/v1/chat/completions", key: str = KEY):
    """(status, JSON) of a request as no client would send it."""
    import http.client

    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"Authorization": f"Bearer {key}".encode(), "Content-Type": kind}
    connection.request("POST", url, body=text.encode(), headers=headers)
    response = connection.getresponse()
    found = response.status, json.loads(response.read())
    connection.close()
    return found


def post(running, body, **options):
    return post_text(running.listener.getsockname()[1], json.dumps(body), **options)


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("{", 400, "is not JSON"),
        ("[1]", 400, "must be a JSON object"),
        ("{}", 400, "has no 'messages'"),
        ('{"messages": ' + "[" * 500 + "]" * 500 + "}", 400, "nested"),
        ('{"model": "other", "messages": []}', 404, "'other' is not served"),
        (" " * (2**24 + 1), 413, "more than"),
    ],
    ids=["no JSON", "a list", "empty", "deep", "model", "large"],
)
def test_bad_bodies(running, text, status, message):
    found = post_text(running.listener.getsockname()[1], text)
    assert found[0] == status
    assert message in found[1]["error"]["message"]


def test_other_routes_and_kinds_of_bodies(running):
    port = running.listener.getsockname()[1]
    assert post_text(port, "{}", kind="text/plain")[0] == 415
    status, body = post_text(port, "{}", url="/v1/images/generations")
    assert (status, body["error"]["type"]) == (404, "invalid_request_error")
    assert post_text(port, "{}", url="/v1/models")[0] == 405


def test_an_answer_that_fails(running, client, monkeypatch):
    """Of logits that are NaN, one request learns, and the others go on."""
    deltas = running.llm.step_deltas

    def damaged():
        return [
            delta | {"finish_reason": "error", "error": "NaN"} if delta["finish_reason"] else delta
            for delta in deltas()
        ]

    monkeypatch.setattr(running.llm, "step_deltas", damaged)
    options = {"model": MODEL, "prompt": "a", "max_tokens": 3}
    with pytest.raises(openai.InternalServerError, match="NaN"):
        client.completions.create(**options)
    with pytest.raises(openai.APIError, match="NaN"):
        list(client.completions.create(**options, stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_roles_that_the_template_leaves_out(running, client, monkeypatch, stream):
    template = "{% for m in messages %}{% if m.role in ['system', 'user'] %}<{{ m.role }}>{{ m.content }}{% endif %}"
    monkeypatch.setattr(running.engine, "_chat_template", template + "{% endfor %}")
    options = {"model": MODEL, "max_tokens": 3, "stream": stream}
    with pytest.raises(openai.BadRequestError, match="message 1: role='critic': the chat template leaves it out"):
        client.chat.completions.create(messages=[*CHAT, {"role": "critic", "content": "b"}], **options)
    answers = [
        client.chat.completions.create(
            messages=[{"role": role, "content": "Be brief."}, *CHAT], temperature=0, **options
        )
        for role in ("system", "developer")
    ]
    if stream:
        answers = ["".join(part.choices[0].delta.content or "" for part in answer) for answer in answers]
    else:
        answers = [(answer.choices[0].message.content, answer.usage.prompt_tokens) for answer in answers]
    assert answers[0] == answers[1]


def test_errors_do_not_speak_of_batches():
    remedies = [remedy for _, remedy in request_names._UNSERVED.values()]
    assert not any("batch" in remedy for remedy in remedies)


def test_half_of_a_surrogate_pair_anywhere_in_a_body(running, client):
    """Each is an error of its own, which can be sent."""
    bodies = [
        ("/v1/completions", {"prompt": "a\ud83d"}, 400, "prompt: holds half of a surrogate pair"),
        ("/v1/completions", {"prompt": "a", "stop": "\ud83d"}, 400, "stop='\\ud83d': holds half of a surrogate pair"),
        ("/v1/completions", {"prompt": "a", "\ud83d": 1}, 400, "unknown option"),
        ("/v1/completions", {"prompt": "a", "model": "\ud83d"}, 404, "is not served"),
        ("/v1/chat/completions", {"messages": [{"role": "\ud83d", "content": "a"}]}, 400, "surrogate"),
    ]
    for url, body, status, says in bodies:
        found = post(running, body, url=url)
        assert found[0] == status, found
        assert says in found[1]["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_whole_floats_are_integers(client, stream):
    """As some programs write all numbers."""
    body = {"max_tokens": 5.0, "n": 1.0, "seed": 3.0, "top_k": 5.0, "min_tokens": 5.0, "logprobs": 1.0}
    answers = []
    for options in (body, {name: int(value) for name, value in body.items()}):
        options = {"prompt": [[5.0, 6.0]] if options is body else [5, 6], "model": MODEL, "extra_body": options}
        if stream:
            answers.append("".join(part.choices[0].text for part in client.completions.create(**options, stream=True)))
        else:
            answer = client.completions.create(**options)
            assert answer.usage.completion_tokens == 5
            answers.append(answer.choices[0].text)
    assert answers[0] == answers[1]


# -- for those who watch it --------------------------------------------------------------------------------------------


def test_health(running, monkeypatch):
    assert get(running, "/health")[0] == 200
    monkeypatch.setattr(running.engine, "error", RuntimeError("a card fell off the bus"))
    with pytest.raises(urllib.error.HTTPError) as found:
        get(running, "/health")
    assert found.value.code == 503


def get(running, url: str):
    """(status, type, text)."""
    request = urllib.request.Request(running.url.removesuffix("/v1") + url, headers={"Authorization": f"Bearer {KEY}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.status, answer.headers["Content-Type"], answer.read().decode()


def numbers(running) -> dict[str, float]:
    status, kind, text = get(running, "/metrics")
    assert status == 200
    assert kind.startswith("text/plain; version=0.0.4")
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    label = f'model_name="{MODEL}"'
    return {name.replace(f"{{{label}}}", "").replace(f"{label},", ""): float(value) for name, _, value in lines}


def test_metrics(running, client):
    before = numbers(running)
    assert before["nanovllm:num_requests_running"] == before["nanovllm:num_requests_waiting"] == 0
    assert before["nanovllm:kv_cache_usage_perc"] == 0
    options = {"model": MODEL, "prompt": [5, 6, 7], "extra_body": {"ignore_eos": True}}
    client.completions.create(**options, max_tokens=4, n=2)
    list(client.completions.create(**options, max_tokens=6, stream=True))
    with client.completions.create(**options, max_tokens=390, stream=True) as stream:
        next(iter(stream))
        under_way = numbers(running)
    assert under_way["nanovllm:num_requests_running"] == 1
    assert 0 < under_way["nanovllm:kv_cache_usage_perc"] < 1
    running.wait_until_idle()
    added = {name: value - before[name] for name, value in numbers(running).items()}
    assert added["nanovllm:prompt_tokens_total"] == 3 * 4, "of each sample, as the engine counts them"
    assert 14 < added["nanovllm:generation_tokens_total"] < 14 + 390
    assert added['nanovllm:request_success_total{finished_reason="length"}'] == 3
    assert added['nanovllm:request_success_total{finished_reason="abort"}'] == 1
    assert added["nanovllm:time_to_first_token_seconds_count"] == 3
    assert added['nanovllm:time_to_first_token_seconds_bucket{le="+Inf"}'] == 3
    assert added["nanovllm:time_to_first_token_seconds_sum"] > 0
    assert added["nanovllm:e2e_request_latency_seconds_count"] == 2, "those that have come to their end"


def test_metrics_are_prometheus_text(running):
    """A name, labels and a number a line; # HELP and # TYPE before each name; buckets that never fall."""
    _, _, text = get(running, "/metrics")
    assert text.endswith("\n")
    types, buckets = {}, {}
    for line in text.splitlines():
        if match := re.fullmatch(r"# (HELP|TYPE) (\S+) (.+)", line):
            types[match[2]] = match[3]
            continue
        name, value = re.fullmatch(r'([a-z:_0-9]+)\{(?:[a-z_]+="[^"]*",?)+\} ([0-9.e+-]+)', line).groups()
        base = re.sub("_(bucket|sum|count)$", "", name)
        assert types[base if base in types else name] in ("gauge", "counter", "histogram")
        if name.endswith("_bucket"):
            assert float(value) >= buckets.get(name, 0)
            buckets[name] = float(value)
    assert len(buckets) == 2


def test_names_of_models_are_escaped_in_metrics(running):
    text = Metrics('a"b\\c\n').text(running.llm.stats())
    assert 'model_name="a\\"b\\\\c\\n"' in text


def test_an_access_log(running, client, caplog):
    """A line a request, when it has ended: also of streams, of refused requests, and of those that are left."""
    caplog.set_level("INFO", "nanovllm.access")
    options = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "extra_body": {"ignore_eos": True}}
    client.completions.create(**options)
    list(client.completions.create(**options, stream=True))
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt="a", max_tokens=0)
    with client.completions.create(**options | {"max_tokens": 390}, stream=True) as stream:
        next(iter(stream))
    running.wait_until_idle()
    get(running, "/health?a%0Ab")
    wait_for(lambda: len(caplog.records) == 5)
    lines = [record.getMessage() for record in caplog.records]
    begins = r'\d{4}-\d\d-\d\dT[\d:+-]+ 127\.0\.0\.1 "POST /v1/completions" '
    served = rf"{begins}200 \d+\.\d{{3}}s prompt_tokens=3 completion_tokens=4 first_token=\d+\.\d{{3}}s finish=length"
    assert re.fullmatch(served, lines[0])
    assert re.fullmatch(served, lines[1])
    assert re.fullmatch(rf"{begins}400 \d+\.\d{{3}}s", lines[2])
    assert re.fullmatch(rf"{begins}200 .* finish=abort", lines[3])
    assert '"GET /health" 200' in lines[4]
    assert MODEL not in "".join(lines), "nothing of what is asked and answered"


# -- clients that leave ------------------------------------------------------------------------------------------------


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_a_stream_that_is_left(running, client):
    options = {"model": MODEL, "prompt": "a block", "extra_body": {"ignore_eos": True}, "n": 2}
    before = running.llm.stats()["generated_tokens"]
    with client.completions.create(**options, stream=True, max_tokens=390) as stream:
        next(iter(stream))
    running.wait_until_idle()
    assert running.llm.stats()["generated_tokens"] - before < 700


def test_an_answer_whose_client_leaves(running, client):
    slow = {"prompt": "a block", "max_tokens": 390, "ignore_eos": True, "n": 20}
    port = running.listener.getsockname()[1]
    before = running.llm.stats()["generated_tokens"]
    text = json.dumps(slow)
    with socket.create_connection(("127.0.0.1", port)) as connection:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json"
        )
        connection.sendall(f"{head}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        wait_for(lambda: running.llm.stats()["running"] == 20)
    running.wait_until_idle()
    assert running.llm.stats()["generated_tokens"] - before < 20 * 380


def test_many_streams_that_are_left(running):
    async def leave_all():
        async with openai.AsyncOpenAI(base_url=running.url, api_key=KEY, max_retries=0, timeout=300) as client:

            async def leave(i):
                options = {"model": MODEL, "prompt": [5, 6, i % 90], "max_tokens": 390, "stream": True}
                stream = await client.completions.create(**options, extra_body={"ignore_eos": True})
                async for _ in stream:
                    break
                await stream.close()

            await asyncio.gather(*map(leave, range(100)))

    asyncio.run(leave_all())
    running.wait_until_idle()


# -- the end -----------------------------------------------------------------------------------------------------------


def test_an_engine_that_dies(path, monkeypatch):
    """Whoever waits gets status 500, and so does whoever comes later; the server ends."""
    with make_llm(path, skip_tokenizer_init=False, max_model_len=400) as llm:
        running = Running(llm)
        steps = []
        step = llm.step_deltas

        def failing():
            steps.append(None)
            if len(steps) > 20:
                raise RuntimeError("a card fell off the bus")
            return step()

        monkeypatch.setattr(llm, "step_deltas", failing)
        options = {"model": MODEL, "prompt": "a block", "max_tokens": 390, "extra_body": {"ignore_eos": True}}
        with openai.OpenAI(base_url=running.url, api_key=KEY, max_retries=0, timeout=60) as client:
            stream = client.completions.create(**options, stream=True)
            next(iter(stream))
            with pytest.raises(openai.InternalServerError, match="a card fell off the bus"):
                client.completions.create(**options)
            with pytest.raises(openai.APIError, match="a card fell off the bus"):
                list(stream)
        assert not running.engine.is_serving
        running.thread.join(60)
        assert not running.thread.is_alive()
        running.end()


def start(path, *options, script=None) -> tuple[subprocess.Popen, str]:
    """A server as a process, and its address."""
    command = ["-m", "nanovllm"] if script is None else ["-c", script]
    engine = ["--device", "cpu", "--max-model-len", "400", "--dtype", "float32"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "NANOVLLM_API_KEY": KEY}
    process = subprocess.Popen(
        [sys.executable, *command, "serve", str(path), "--port", "0", *engine, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    line = process.stdout.readline()
    found = re.search(r"on (http://127\.0\.0\.1:\d+/v1)", line)
    if found is None:
        raise AssertionError(line + process.communicate()[1])
    return process, found[1]


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_the_command_ends_with_ctrl_c(path, number):
    process, url = start(path, "--served-model-name", MODEL)
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as client:
        options = {"model": MODEL, "messages": CHAT, "extra_body": {"ignore_eos": True}}
        with client.chat.completions.create(**options, stream=True) as stream:
            next(iter(stream))
            process.send_signal(number)
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "the server has ended" in errors


def test_the_command_says_what_killed_the_engine(path):
    script = (
        "import sys; from nanovllm import LLM; from nanovllm.cli import main\n"
        "def fail(self): raise RuntimeError('a card fell off the bus')\n"
        "LLM.step_deltas = fail\n"
        "sys.exit(main())"
    )
    process, url = start(path, script=script)
    client = openai.OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60)
    with client, pytest.raises(openai.InternalServerError, match="a card fell off the bus"):
        client.chat.completions.create(model=str(path), messages=CHAT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "nanovllm serve: the engine died: RuntimeError: a card fell off the bus" in errors


def test_an_address_that_is_taken(path):
    other = socket.create_server(("127.0.0.1", 0))
    with other, pytest.raises(OSError, match="in use"):  # before the model is loaded
        server_module.serve(str(path), port=other.getsockname()[1])
