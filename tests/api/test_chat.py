"""LLM.chat on the demo model, whose tokenizer has a chat template, and its faults."""

from pathlib import Path

import pytest
from checkpoints import make_checkpoint, make_llm

from nanovllm import LLM, SamplingParams
from nanovllm.engine.text.chat import as_tools

DEMO_MODEL = Path(__file__).parents[2] / "assets" / "demo-model"
PARAMS = SamplingParams(temperature=0, max_tokens=12)
IMAGE = {"type": "image_url", "image_url": {"url": "file:///cat.png"}}
HELLO = {"role": "user", "content": "introduce yourself"}


@pytest.fixture(scope="module")
def shared_llm():
    with LLM(str(DEMO_MODEL), device="cpu", kvcache_gib=0.1) as llm:
        yield llm


def render(llm, conversation, **options) -> str:
    return llm.tokenizer.apply_chat_template(conversation, tokenize=False, **{"add_generation_prompt": True} | options)


def texts(outputs):
    return [output["text"] for output in outputs]


def generate(llm, prompts):
    return texts(llm.generate(prompts, PARAMS, use_tqdm=False))


def chat(llm, messages, **options):
    return texts(llm.chat(messages, PARAMS, use_tqdm=False, **options))


def test_chat_is_the_template_and_generate(llm):
    conversations = [
        [HELLO],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a tuple?"}],
        [HELLO, {"role": "assistant", "content": "I am a model."}, {"role": "user", "content": "Go on."}],
    ]
    expected = generate(llm, [render(llm, c) for c in conversations])
    assert chat(llm, conversations) == expected
    assert chat(llm, conversations[0]) == expected[:1]
    assert chat(llm, []) == []
    outputs = llm.chat(conversations, [PARAMS, PARAMS, SamplingParams(max_tokens=3, n=2)], use_tqdm=False)
    assert len(outputs[2]["samples"]) == 2


def test_variables_of_the_template(llm):
    prompt = render(llm, [HELLO], enable_thinking=False)
    assert prompt != render(llm, [HELLO])
    (output,) = llm.chat([HELLO], PARAMS, use_tqdm=False, chat_template_kwargs={"enable_thinking": False})
    assert output["num_prompt_tokens"] == len(llm.tokenizer(prompt)["input_ids"])
    assert [output["text"]] == generate(llm, [prompt])


def search(query: str, limit: int) -> str:
    """Look something up.

    Args:
        query: what to look for
        limit: how many results
    """


SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {
                "query": {"type": "string", "description": "what to look for"},
                "limit": {"type": "integer", "description": "how many results"},
            },
            "required": ["query", "limit"],
        },
        "return": {"type": "string"},
    },
}


def test_tools_are_the_templates(llm):
    template = "{% if tools %}{{ tools[0].function.name }} {{ tools|length }}{% endif %}{{ messages[0]['content'] }}"
    expected = generate(llm, ["search 1introduce yourself"])
    for tool in (search, SEARCH):
        assert chat(llm, [HELLO], chat_template=template, tools=[tool]) == expected
    assert as_tools([search]) == [SEARCH]
    for none in (None, []):
        assert chat(llm, [HELLO], chat_template=template, tools=none) == generate(llm, ["introduce yourself"])


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"tools": "search"}, TypeError, "tools: must be a list of schemas or functions, not str"),
        ({"tools": SEARCH}, TypeError, "tools: must be a list of schemas or functions, not dict"),
        ({"tools": search}, TypeError, "tools: must be a list of schemas or functions, not function"),
        ({"tools": [SEARCH, 5]}, TypeError, r"tools\[1\]: must be a schema or a function, not int"),
        (
            {"tools": [{"type": "function"}]},
            ValueError,
            r'tools\[0\]: must be \{"type": "function", "function": \{"name"',
        ),
        ({"tools": [SEARCH, lambda x: x]}, ValueError, r"tools\[1\]: no schema can be made of .*docstring"),
        ({"tools": [SEARCH]}, ValueError, "tools: the chat template has no place for them"),
        ({"chat_template": 5}, TypeError, "chat_template: must be the text of a Jinja template, or its file, not int"),
        ({"chat_template_kwargs": "x"}, TypeError, "chat_template_kwargs='x': must be a dict"),
        ({"chat_template_kwargs": {5: 1}}, TypeError, "chat_template_kwargs={5: 1}: must be a dict"),
        ({"chat_template_kwargs": {"tools": []}}, ValueError, "chat_template_kwargs: 'tools' is an argument of chat"),
        ({"chat_template_kwargs": {"tokenize": False}}, ValueError, "'tokenize' is no variable of a template"),
        (
            {"enable_thinking": False},
            TypeError,
            "unknown option 'enable_thinking': .*chat_template_kwargs={\"enable_thinking\": False}",
        ),
        ({"temperature": 0.5}, TypeError, r"'temperature': pass sampling_params=SamplingParams\(temperature=0.5\)"),
        ({"continue_last_message": True}, TypeError, "did you mean 'continue_final_message'"),
        ({"lora_request": 1}, TypeError, "LoRA is not supported"),
    ],
    ids=lambda value: f"{value:.40}" if isinstance(value, str) else "",  # A function's repr changes with each process.
)
def test_a_wrong_argument_is_named(llm, options, error, says):
    with pytest.raises(error, match=says):
        llm.chat([HELLO], PARAMS, use_tqdm=False, **options)


def test_a_template_of_the_callers_own(llm):
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:\n{% endif %}"
    messages = [{"role": "user", "content": "def fibonacci(n)"}]
    assert chat(llm, messages, chat_template=template) == generate(llm, ["def fibonacci(n):\n"])
    assert chat(llm, messages, chat_template=template, add_generation_prompt=False) == generate(
        llm, ["def fibonacci(n)"]
    )


def test_the_final_message_is_continued(llm):
    messages = [HELLO, {"role": "assistant", "content": "Hello! I am"}]
    prompt = render(llm, [HELLO]) + "Hello! I am"
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat(llm, messages, **options) == generate(llm, [prompt])
    with pytest.raises(ValueError, match=r"continue_final_message=True.*add_generation_prompt=False"):
        chat(llm, messages, continue_final_message=True)


def test_content_as_text_parts(llm):
    parts = [{"type": "text", "text": "introduce"}, {"type": "text", "text": "yourself"}]
    (output,) = llm.chat([{"role": "user", "content": parts}], PARAMS, use_tqdm=False)
    prompt = render(llm, [{"role": "user", "content": "introduce\nyourself"}])
    assert [output["text"]] == generate(llm, [prompt])
    assert parts == [{"type": "text", "text": "introduce"}, {"type": "text", "text": "yourself"}]


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        ("hello", "must be a dict"),
        (None, "must be a dict"),
        ({"content": "hello"}, "role=None"),
        ({"role": 5, "content": "hello"}, "role=5"),
        ({"role": "", "content": "hello"}, "role=''"),
        ({"role": "user"}, "content must be"),
        ({"role": "user", "content": None}, "content must be"),
        ({"role": "user", "content": 5}, "content must be"),
        ({"role": "user", "content": ["hello"]}, r"content\[0\]"),
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, r"content\[1\]"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, r"content\[0\]"),
        ({"role": "user", "content": [IMAGE]}, r"content\[0\] has type 'image_url': only the text part of a model"),
    ],
    ids=repr,
)
def test_a_malformed_message_is_named(llm, message, fault):
    with pytest.raises(ValueError, match=f"conversation 0, message 1: .*{fault}"):
        chat(llm, [HELLO, message])
    with pytest.raises(ValueError, match=f"conversation 1, message 0: .*{fault}"):
        chat(llm, [[HELLO], [message]])


@pytest.mark.parametrize("messages", ["hello", HELLO, 5, None])
def test_messages_that_are_none(llm, messages):
    with pytest.raises(ValueError, match="messages: must be a list"):
        chat(llm, messages)


def test_an_empty_conversation_is_named(llm):
    with pytest.raises(ValueError, match="conversation 1: is empty"):
        chat(llm, [[HELLO], []])


def test_a_template_that_refuses(llm):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match=r"conversation 0: .*roles must alternate"):
        chat(llm, [HELLO], chat_template=template)
    with pytest.raises(ValueError, match="conversation 0"):
        chat(llm, [HELLO], chat_template="{% if %}")


def test_no_template_and_no_tokenizer(tmp_path):
    path = make_checkpoint(tmp_path, tokenizer=True)
    with make_llm(path, skip_tokenizer_init=False) as llm, pytest.raises(ValueError, match=r"chat_template.*has none"):
        chat(llm, [HELLO])
    with make_llm(path) as llm, pytest.raises(ValueError, match="skip_tokenizer_init"):
        chat(llm, [HELLO])


# -- what templates expect of a message --------------------------------------------------------------------------------

TEXTS = "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for part in m['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }};{% endif %}{% endfor %}"
    "{% endfor %}"
)
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }};{% endfor %}{% endif %}{% endfor %}"
)
# As Llama 3.2 Vision's: the system's content is a text, the user's may be parts.
MIXED = (
    "{% if messages[0].role == 'system' %}[{{ messages[0].content|trim }}]{% set messages = messages[1:] %}{% endif %}"
)
MIXED += BOTH
MACRO = "{% macro show(content) %}{% for part in content %}{{ part.text }};{% endfor %}{% endmacro %}"
MACRO += "{% for m in messages %}<{{ m.role }}>{{ show(m.content) }}{% endfor %}"
TWO_PARTS = [{"type": "text", "text": "introduce"}, {"type": "text", "text": "yourself"}]


@pytest.mark.parametrize(
    ("template", "of_a_text", "of_parts"),
    [
        (TEXTS, "<user>hello", "<user>introduce\nyourself"),
        (PARTS, "<user>hello;", "<user>introduce;yourself;"),
        (MACRO, "<user>hello;", "<user>introduce;yourself;"),
        (BOTH, "<user>hello", "<user>introduce;yourself;"),
    ],
    ids=["texts", "parts", "macro", "both"],
)
def test_content_comes_as_the_template_expects_it(llm, template, of_a_text, of_parts):
    conversations = [[{"role": "user", "content": content}] for content in ("hello", TWO_PARTS)]
    assert rendered(llm, conversations, chat_template=template) == [of_a_text, of_parts]


def test_roles_may_expect_content_in_different_forms(llm):
    messages = [{"role": role, "content": TWO_PARTS} for role in ("system", "user", "assistant")]
    (text,) = rendered(llm, messages, chat_template=MIXED)
    assert text == "[introduce\nyourself]<user>introduce;yourself;<assistant>introduce;yourself;"


def rendered(llm, messages, **options) -> list[str]:
    """The text of each prompt, special tokens and all."""
    options = {"chat_template": None, "chat_template_kwargs": None, "tools": None} | options
    return [llm.tokenizer.decode(ids) for ids in llm.prompt_encoder.encode_chats(messages, **options)]


def a_call(arguments, **outer) -> list[dict]:
    call = {"id": "1", "type": "function", "function": {"name": "search", "arguments": arguments}}
    return [HELLO, {"role": "assistant", "tool_calls": [call], **outer}]


CALLS = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
WRITERS = {
    "Qwen2.5": "{{ c.function.arguments | tojson }}",
    "Qwen3": "{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
    "{{ c.function.arguments | tojson }}{% endif %}",
    "DeepSeek-R1": "{{ '' + c['function']['arguments'] + '' }}",
    "printed": "{{ c.function.arguments }}",
    "whole": "{{ c.function | tojson }}",
    "Qwen3-Coder": "{% for name, value in c.function.arguments | items %}{{ name }}={{ value }};{% endfor %}",
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("arguments", ['{"query": "größe", "limit": 3}', {"query": "größe", "limit": 3}], ids=type)
def test_arguments_of_tool_calls_are_a_mapping_and_their_text(llm, writer, arguments):
    (text,) = rendered(llm, a_call(arguments), chat_template=CALLS + writer + "{% endfor %}{% endfor %}")
    if writer == WRITERS["Qwen3-Coder"]:
        assert text == "query=größe;limit=3;"
    elif writer == WRITERS["whole"]:
        assert text == '{"name": "search", "arguments": {"query": "größe", "limit": 3}}'
    else:
        assert text == '{"query": "größe", "limit": 3}'


def test_tool_calls_alone_for_a_template_that_adds_content_to_a_text(llm):
    expected = rendered(llm, a_call("{}", content=""))
    assert rendered(llm, a_call("{}", content=None)) == rendered(llm, a_call("{}")) == expected
    # Others see that there is none.
    template = "{% for m in messages %}{{ 'none' if m.content is not defined or m.content is none }}{% endfor %}"
    assert rendered(llm, a_call("{}", content=None), chat_template=template) == ["none"]


def test_a_tool_call_without_arguments(llm):
    template = CALLS + "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    assert rendered(llm, a_call(""), chat_template=template) == ["{}"]
    flat = [HELLO, {"role": "assistant", "content": None, "tool_calls": [{"name": "search", "arguments": '{"a": 1}'}]}]
    template = CALLS + "{{ c.arguments.a }}{% endfor %}{% endfor %}"
    assert rendered(llm, flat, chat_template=template) == ["1"]


@pytest.mark.parametrize(
    ("calls", "says"),
    [
        ("search", r"conversation 0, message 1: tool_calls must be a list, not str"),
        ([5], r"message 1: tool_calls\[0\] must be \{"),
        ([{"function": "f"}], r"message 1: tool_calls\[0\] must be \{"),
        ([{"name": "f", "arguments": '{"a": '}], r"tool_calls\[0\]: arguments must be a JSON object.*Expecting value"),
        ([{"name": "f", "arguments": "[1]"}], r"tool_calls\[0\]: arguments must be a JSON object.*'\[1\]' is none"),
        ([{"name": "f", "arguments": 5}], r"tool_calls\[0\]: arguments must be a JSON object.*5 is none"),
        ([{"name": "f", "arguments": '{"a": NaN}'}], r"tool_calls\[0\]: arguments must be a JSON object.*NaN"),
    ],
)
def test_a_malformed_tool_call_is_named(llm, calls, says):
    with pytest.raises(ValueError, match=says):
        llm.chat([HELLO, {"role": "assistant", "content": "", "tool_calls": calls}], PARAMS, use_tqdm=False)


def test_a_template_may_be_a_file(llm, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text(TEXTS)
    for name in (file, str(file)):
        assert rendered(llm, [HELLO], chat_template=name) == ["<user>introduce yourself"]
        assert chat(llm, [HELLO], chat_template=name) == generate(llm, ["<user>introduce yourself"])


def test_what_is_no_template_is_refused(llm, tmp_path):
    file = tmp_path / "notes.txt"
    file.write_text("hello")
    for name, says in (
        ("template.jinja", r"chat_template='template.jinja': is no Jinja template, .* and no file of one: .*No such"),
        ("", "chat_template='': is no Jinja template"),
        ("x" * 5000, "is no Jinja template"),
        (str(file), "this file is no Jinja template"),
    ):
        with pytest.raises(ValueError, match=says):
            chat(llm, [HELLO], chat_template=name)


def nested(depth: int):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages | tojson }}", "RecursionError"),
        ("{{ messages[5]['content'] }}", "has no element 5"),
        ("{{ [].pop() }}", "IndexError|pop"),
        ("{{ raise_exception('x' * 10**6) }}", "x{1000}... "),
        ("{% for %}", "Expected|expected"),
    ],
)
def test_whatever_a_template_raises_names_the_conversation(llm, template, says):
    conversations = [[HELLO], [HELLO | {"deep": nested(5000)}]]
    with pytest.raises(ValueError, match=rf"^conversation [01]: .*({says})") as raised:
        llm.chat(conversations, PARAMS, use_tqdm=False, chat_template=template)
    assert len(str(raised.value)) < 1500


@pytest.mark.parametrize("template", [None, "{{ 'half' + '\ud800' }}"])
def test_half_of_a_surrogate_pair(llm, template):
    with pytest.raises(ValueError, match=r"^conversation 0: cannot be encoded: .*surrogates not allowed"):
        llm.chat([{"role": "user", "content": "\ud800"}], PARAMS, use_tqdm=False, chat_template=template)
