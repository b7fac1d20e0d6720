"""LLM.chat on the demo model, whose tokenizer has a chat template, and its faults."""

import json
from pathlib import Path

import numpy as np
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
        ({"lora_request": 1}, TypeError, r"LLM\(model, lora=ADAPTER\)"),
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
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}, r"content\[1\] is an image"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, r"content\[0\]"),
        ({"role": "user", "content": [IMAGE]}, r"content\[0\] is an image, and this model reads no images"),
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
    conversations = [[HELLO], [HELLO | {"deep": nested(50_000)}]]
    with pytest.raises(ValueError, match=rf"^conversation [01]: .*({says})") as raised:
        llm.chat(conversations, PARAMS, use_tqdm=False, chat_template=template)
    assert len(str(raised.value)) < 1500


@pytest.mark.parametrize(
    ("where", "options"),
    [
        ("message 0, content", {"messages": [HELLO | {"content": "ab\ud83d"}]}),
        (
            "message 1, content",
            {"messages": [HELLO, {"role": "assistant", "content": [TWO_PARTS[0] | {"text": "\ud83d"}]}]},
        ),
        ("message 1, tool_calls", {"messages": a_call('{"query": "\\ud83d"}')}),
        ("message 0, name", {"messages": [HELLO | {"name": "\ud83d"}]}),
    ],
)
def test_half_of_a_surrogate_pair_is_named(llm, where, options):
    template = "{% for m in messages %}{{ m.content }}{{ m.name }}{% for c in m.tool_calls or [] %}"
    template += (
        "{% for name, value in c.function.arguments | items %}{{ name }}{{ value }}{% endfor %}{% endfor %}{% endfor %}"
    )
    says = rf"^conversation 0, {where}: holds half of a surrogate pair, '\\ud83d' at index [02], which is no character"
    with pytest.raises(ValueError, match=says):
        llm.chat(**options, sampling_params=PARAMS, use_tqdm=False, chat_template=template)


def test_half_of_a_surrogate_pair_in_a_tool_or_a_template(llm):
    template = "{% for t in tools or [] %}{{ t.description }}{% endfor %}{{ messages[0].content }}"
    with pytest.raises(ValueError, match=r"^tools\[0\]: holds half of a surrogate pair, '\\ud800' at index 1,"):
        chat(llm, [HELLO], chat_template=template, tools=[{"name": "f", "description": "a\ud800"}])
    with pytest.raises(ValueError, match=r"^conversation 0: the rendered text holds half of a surrogate pair"):
        chat(llm, [HELLO], chat_template="{{ 'half' + '\ud800' }}")


# -- what tables make of messages --------------------------------------------------------------------------------------

WHOLE = "{% for m in messages %}{{ m | tojson }}{% endfor %}"


@pytest.mark.parametrize("calls", [[], None, ()])
def test_tool_calls_that_are_none(llm, calls):
    template = "{% for m in messages %}{{ m.content }}{% if 'tool_calls' in m %} with calls{% endif %}{% endfor %}"
    assert rendered(llm, [HELLO | {"tool_calls": calls}], chat_template=template) == ["introduce yourself"]


def test_keys_that_only_other_rows_have(llm):
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": {"a": None}, "x": None}, "y": None}
    message = {"role": "user", "content": [{"type": "text", "text": "b", "image_url": None}], "name": None}
    (text,) = rendered(
        llm, [message | {"tool_calls": [call]}], chat_template=f"{{% if 0 %}}tool_calls{{% endif %}}{WHOLE}"
    )
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}  # This may be a value.
    assert json.loads(text) == {"role": "user", "content": "b", "tool_calls": [call]}
    schema = {"type": "object", "properties": {"city": {"type": "string", "enum": None, "default": None}, "days": None}}
    tool = {"type": "function", "function": {"name": "f", "strict": None, "parameters": schema}}
    (found,) = as_tools([tool])
    schema = {"type": "object", "properties": {"city": {"type": "string", "default": None}}}
    assert found == {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert tool["function"]["strict"] is None, "the caller's own stays as it is"


def test_maps_and_arrays_of_tables(llm):
    """Arrow gives the pairs of a map, pandas an array for a list."""
    calls = np.array([{"function": {"name": "f", "arguments": [("a", 1), ("b", np.array([1, 2]))]}}], object)
    message = [("role", "assistant"), ("content", None), ("tool_calls", calls)]
    for messages in ([HELLO, message], np.array([HELLO, dict(message)], object)):
        text = rendered(llm, messages, chat_template=WHOLE)[0].removeprefix(json.dumps(HELLO))
        call = {"function": {"name": "f", "arguments": {"a": 1, "b": [1, 2]}}}
        assert json.loads(text) == {"role": "assistant", "tool_calls": [call]}
    parameters = [("type", "object"), ("properties", [["city", {"type": "string"}]]), ("required", np.array(["city"]))]
    expected = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    assert as_tools(np.array([{"name": "f", "parameters": parameters}])) == [{"name": "f", "parameters": expected}]
    assert as_tools([{"name": "f", "parameters": {"properties": []}}]) == [
        {"name": "f", "parameters": {"properties": {}}}
    ]
    assert rendered(llm, np.array([[HELLO], [HELLO]], object), chat_template=TEXTS) == ["<user>introduce yourself"] * 2


# -- what templates leave out ------------------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant', 'tool'] %}<{{ m.role }}>{{ m.content }}"
)
CHATML += "{% endif %}{% endfor %}"
FIRST_SYSTEM = "{% if messages[0].role == 'system' %}[{{ messages[0].content }}]{% endif %}"
FIRST_SYSTEM += "{% for m in messages %}{% if m.role == 'user' %}<user>{{ m.content }}{% endif %}{% endfor %}"
DEVELOPERS = "{% for m in messages %}{% if m.role in ['developer', 'user'] %}<{{ m.role }}>{{ m.content }}{% endif %}"
DEVELOPERS += "{% endfor %}"
STRICT = "{% for m in messages %}{% if m.role not in ['system', 'user'] %}{{ raise_exception('no ' + m.role) }}"
STRICT += "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def said(*roles: str) -> list[dict]:
    return [{"role": role, "content": f"c{j}"} for j, role in enumerate(roles)]


@pytest.mark.parametrize(
    ("template", "roles", "text"),
    [
        (CHATML, ("developer", "user"), "<system>c0<user>c1"),
        (CHATML, ("user", "developer", "user"), "<user>c0<system>c1<user>c2"),
        (FIRST_SYSTEM, ("developer", "user"), "[c0]<user>c1"),
        (DEVELOPERS, ("developer", "user"), "<developer>c0<user>c1"),
        (STRICT, ("developer", "user"), "<system>c0<user>c1"),
        (TEXTS, ("developer", "critic", "function"), "<developer>c0<critic>c1<function>c2"),
    ],
)
def test_developers_are_the_system_where_templates_do_not_know_them(llm, template, roles, text):
    assert rendered(llm, said(*roles), chat_template=template) == [text]


@pytest.mark.parametrize(
    ("template", "roles", "says"),
    [
        (
            CHATML,
            ("user", "function"),
            "message 1: role='function': .*; it shows system, user, assistant, tool; calls go",
        ),
        (CHATML, ("user", "asistant", "user"), "message 1: role='asistant': the chat template leaves it out"),
        (FIRST_SYSTEM, ("system", "user", "system"), "message 2: role='system': .* leaves it out of the prompt here"),
        (FIRST_SYSTEM, ("user", "tool"), "message 1: role='tool': .*; it shows system, user$"),
        (FIRST_SYSTEM, ("user", "developer", "user"), "message 1: role='system'"),
        (DEVELOPERS, ("system", "user"), "message 0: role='system': .*; it shows developer, user$"),
        (STRICT, ("user", "assistant"), "the chat template cannot render it: no assistant"),
    ],
)
def test_a_role_that_the_template_leaves_out_is_refused(llm, template, roles, says):
    with pytest.raises(ValueError, match=f"^conversation 1(, |: ){says}"):
        llm.chat([[HELLO], said(*roles)], PARAMS, use_tqdm=False, chat_template=template)


def test_calls_that_the_template_leaves_out(llm, caplog):
    template = CHATML + "{# calls #}"
    for _ in range(2):
        assert rendered(llm, a_call("{}", content="I look."), chat_template=template)
    assert [record.message for record in caplog.records] == [
        "tool_calls: the chat template leaves them out of the prompt (this is logged once)"
    ]
    with pytest.raises(ValueError, match="message 1: function_call: tool_calls takes its place"):
        chat(llm, [HELLO, {"role": "assistant", "content": "a", "function_call": {"name": "f"}}])


def test_what_a_template_shows_under_a_condition_is_not_refused(llm):
    template = (
        "{% for m in messages %}{% if m.role != 'tool' or tools %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    )
    assert rendered(llm, said("user", "tool"), chat_template=template, tools=[SEARCH]) == ["<user>c0<tool>c1"]
    with pytest.raises(ValueError, match="role='tool'"):
        rendered(llm, said("user", "tool"), chat_template=template)


def test_templates_are_tried_out_once(llm, monkeypatch):
    renders = []
    apply = llm.tokenizer.apply_chat_template
    monkeypatch.setattr(llm.tokenizer, "apply_chat_template", lambda *a, **o: renders.append(1) or apply(*a, **o))
    template = CHATML + "{# once #}"
    conversations = [said("developer", "user", "assistant", "user")] * 2
    rendered(llm, conversations, chat_template=template)
    renders.clear()
    rendered(llm, conversations, chat_template=template)
    assert len(renders) == 2, "a conversation is rendered once"


@pytest.mark.parametrize("given", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("used", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_by_the_name_that_the_template_has(llm, monkeypatch, given, used):
    alias = "transformers.utils.chat_template_utils._alias_reasoning_fields"
    monkeypatch.setattr(alias, lambda chat: chat, raising=False)  # Releases before 5.24 have none.
    template = "{% for m in messages %}{{ m.content }}{% if m.NAME %}({{ m.NAME }}){% endif %}{% endfor %}"
    messages = [HELLO, {"role": "assistant", "content": "a", given: "hm"}]
    assert rendered(llm, messages, chat_template=template.replace("NAME", used)) == ["introduce yourselfa(hm)"]
