"""Whole conversations by OpenAI's client over the server: thinking, two tool calls, their answers, and the end."""

import json

import pytest
from channels import HARMONY
from checkpoints import make_checkpoint, make_llm, make_tokenizer, make_usual
from script import Script
from test_serve import KEY, MODEL, Running

openai = pytest.importorskip("openai")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
QUESTION = {"role": "user", "content": "Oslo or Rome?"}
OSLO, ROME = {"city": "Oslo", "days": 2}, {"city": "Rome"}

# In the manner of Qwen3's: thinking and calls between tags, answers of tools in the user's turn.
QWEN = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response>{% else %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\\n' }}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Qwen3-Coder's and Qwen3.5's write calls as XML.
QWEN_XML = QWEN.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n',
    "<function={{ call.function.name }}>\n{% for name, value in call.function.arguments.items() %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>\n",
)
QWEN_TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# In the manner of gpt-oss's: what is thought and called is in channels, and a message has its recipient.
CHANNELS = (
    "{% if tools %}<|start|>developer<|message|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions.weather to=assistant<|channel|>commentary"
    "<|message|>{{ m.content }}<|end|>{% elif m.tool_calls %}"
    "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% for call in m.tool_calls %}<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary json"
    "<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def qwen_call(arguments: dict) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def qwen_xml_call(arguments: dict) -> str:
    inside = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())
    return f"<tool_call>\n<function=weather>\n{inside}</function>\n</tool_call>"


def channels_call(thought: str, arguments: dict) -> str:
    call = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{json.dumps(arguments)}<|call|>"
    return f"<|channel|>analysis<|message|>{thought}<|end|><|start|>assistant{call}<|return|>"


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    yield from serving(make_qwen(tmp_path_factory.mktemp("qwen"), QWEN))


@pytest.fixture(scope="module")
def qwen_xml(tmp_path_factory):
    yield from serving(make_qwen(tmp_path_factory.mktemp("qwen_xml"), QWEN_XML))


def make_qwen(directory, template: str):
    path = make_checkpoint(directory)
    make_tokenizer(path, ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *QWEN_TAGS), chat_template=template)
    make_usual(path, QWEN_TAGS)
    return path


@pytest.fixture(scope="module")
def harmony(tmp_path_factory):
    path = make_checkpoint(tmp_path_factory.mktemp("harmony"))
    make_tokenizer(path, HARMONY, "<|return|>", chat_template=CHANNELS)
    yield from serving(path)


def serving(path):
    options = {"skip_tokenizer_init": False, "max_model_len": 1500, "num_kvcache_blocks": 200, "features": [Script()]}
    with make_llm(path, **options) as llm:
        running = Running(llm, splits_reasoning=True, splits_tool_calls=True)
        try:
            yield running
        finally:
            running.end()


class Conversation:
    """One with a server, in which the model writes what it is told to."""

    def __init__(self, running: Running, streams: bool, **options):
        self.running, self._streams, self._options = running, streams, options
        self.messages: list[dict] = [QUESTION]

    def ask(self, written: str) -> dict:
        """The answer's message, which joins the conversation as it is, and its finish_reason."""
        token_ids = self.running.llm.tokenizer.encode(written, add_special_tokens=False)
        options = {"model": MODEL, "messages": self.messages, "tools": TOOLS, "max_tokens": len(token_ids) + 1}
        options |= {"extra_body": {"extra_args": {"script": token_ids}}} | self._options
        with openai.OpenAI(base_url=self.running.url, api_key=KEY, max_retries=0, timeout=120) as client:
            if self._streams:
                chunks = list(client.chat.completions.create(**options, stream=True))
                message, finish_reason = joined(chunks), chunks[-1].choices[0].finish_reason
            else:
                (choice,) = client.chat.completions.create(**options).choices
                message, finish_reason = choice.message.model_dump(), choice.finish_reason
        self.messages.append(message)
        return message | {"finish_reason": finish_reason}

    def tell(self, message: dict, *results: str) -> None:
        """What the tools of the message's calls return."""
        for call, result in zip(message["tool_calls"], results, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})

    def prompt(self) -> str:
        """Of the last question."""
        (token_ids,) = self.running.llm.prompt_encoder.encode_chats(self.messages, None, None, TOOLS)
        return self.running.llm.tokenizer.decode(token_ids)


def joined(chunks) -> dict:
    """The message of a stream's parts, as clients join them."""
    message = {"role": "assistant", "content": "", "reasoning_content": "", "tool_calls": []}
    for chunk in chunks:
        delta = chunk.choices[0].delta
        message["content"] += delta.content or ""
        message["reasoning_content"] += getattr(delta, "reasoning_content", None) or ""
        for part in delta.tool_calls or ():
            if part.index == len(message["tool_calls"]):
                function = {"name": part.function.name, "arguments": ""}
                message["tool_calls"].append({"id": part.id, "type": "function", "function": function})
            call = message["tool_calls"][part.index]
            call["function"]["arguments"] += part.function.arguments or ""
    return message


def calls_of(message: dict) -> list[tuple[str, dict]]:
    calls = message["tool_calls"] or []
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("server", "write"), [("qwen", qwen_call), ("qwen_xml", qwen_xml_call)])
def test_qwen(request, server, write, streams):
    talk = Conversation(request.getfixturevalue(server), streams)
    written = f"<think>\nI look both up.\n</think>\n\n{write(OSLO)}\n{write(ROME)}<|im_end|>"
    first = talk.ask(written)
    assert first["reasoning_content"] == "I look both up."
    assert (first["content"] or "", first["finish_reason"]) == ("", "tool_calls")
    assert calls_of(first) == [("weather", OSLO), ("weather", ROME)]
    talk.tell(first, "3 degrees", "20 degrees")
    prompt = talk.prompt()
    assert f"<think>\nI look both up.\n</think>\n\n\n{write(OSLO)}\n{write(ROME)}<|im_end|>" in prompt
    assert "<tool_response>\n20 degrees\n</tool_response>" in prompt
    last = talk.ask("<think>\nRome is warmer.\n</think>\n\nRome, with 20 degrees.<|im_end|>")
    assert last["reasoning_content"] == "Rome is warmer."
    assert (last["content"], last["finish_reason"]) == ("Rome, with 20 degrees.", "stop")
    assert calls_of(last) == []


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_harmony(harmony, streams):
    talk = Conversation(harmony, streams)
    for thought, arguments, result in (("First Oslo.", OSLO, "3 degrees"), ("Now Rome.", ROME, "20 degrees")):
        message = talk.ask(channels_call(thought, arguments))
        assert message["reasoning_content"] == thought
        assert (message["content"] or "", message["finish_reason"]) == ("", "tool_calls")
        assert calls_of(message) == [("weather", arguments)]
        talk.tell(message, result)
        prompt = talk.prompt()
        assert f"analysis<|message|>{thought}<|end|>" in prompt
        assert f"commentary json<|message|>{json.dumps(arguments)}<|call|>" in prompt
        assert f"<|message|>{result}<|end|>" in prompt
    final = "<|channel|>final<|message|>Rome, with 20 degrees.<|return|>"
    last = talk.ask(f"<|channel|>analysis<|message|>Rome is warmer.<|end|><|start|>assistant{final}")
    assert last["reasoning_content"] == "Rome is warmer."
    assert (last["content"], last["finish_reason"]) == ("Rome, with 20 degrees.", "stop")
    assert calls_of(last) == []


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("allowed", "expected"), [(False, [OSLO]), (True, [OSLO, ROME]), (None, [OSLO, ROME])])
def test_one_call_where_several_are_not_allowed(qwen, streams, allowed, expected):
    talk = Conversation(qwen, streams, parallel_tool_calls=allowed)
    message = talk.ask(f"So.\n{qwen_call(OSLO)}\n{qwen_call(ROME)}<|im_end|>")
    assert calls_of(message) == [("weather", arguments) for arguments in expected]
    assert (message["content"], message["finish_reason"]) == ("So.", "tool_calls")


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_half_of_a_surrogate_pair_that_the_model_writes(qwen, streams):
    """In a call's arguments it may be an escape of JSON, and it is sent as one."""
    message = Conversation(qwen, streams).ask(qwen_call({"city": "\ud83d"}) + "<|im_end|>")
    assert calls_of(message) == [("weather", {"city": "\ud83d"})]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_what_is_no_truth_value_for_parallel_calls(qwen, streams):
    with pytest.raises(openai.BadRequestError, match="parallel_tool_calls='no': must be true or false"):
        Conversation(qwen, streams, parallel_tool_calls="no").ask("<|im_end|>")
