"""One line: what is read of a row, what an answer looks like, and what is refused."""

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.jobs.lines import (
    ANSWER_KEYS,
    OPTIONAL_KEYS,
    LineFormat,
    answer_row,
    from_json,
    id_bytes,
    read_answer,
    read_id,
)
from nanovllm.openai_format.openai_batch import Responder
from nanovllm.openai_format.request_names import PARAMETERS
from nanovllm.utils.text_json import as_json, to_json

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda values: st.lists(values, max_size=3) | st.dictionaries(TEXT, values, max_size=3),
    max_leaves=4,
)
IDS = st.integers() | TEXT
TAKEN = {"id", "prompt", "prompt_token_ids", "messages", "body", "tools", "chat_template_kwargs", *PARAMETERS}
OPTION_NAMES = sorted(TAKEN | {"url", "method", "custom_id"})
OPTIONS = st.dictionaries(st.sampled_from(OPTION_NAMES), VALUES, max_size=2)
COLUMNS = st.dictionaries(TEXT.filter(lambda name: name not in TAKEN), VALUES, max_size=4)


USER = {"role": "user", "content": "hi"}
RESPONDER = Responder("my-model", lambda: None)


def output(text="answer", **changes):
    result = {"text": text, "token_ids": [5, 6, 7], "finish_reason": "stop", "num_prompt_tokens": 4}
    return result | {"logprobs": None, "prompt_logprobs": None} | changes


@given(IDS, TEXT.filter(bool), COLUMNS, TEXT)
def test_an_answer_keeps_the_id_and_the_other_columns(line_id, prompt, columns, text):
    row = from_json(to_json({"id": line_id, "prompt": prompt, **columns}).encode())
    line = LineFormat().read(row, read_id(row))
    assert line.prompt == prompt
    answer = from_json(to_json(answer_row(read_id(row), line, output(text), RESPONDER)).encode())
    assert "\n" not in to_json(answer)
    assert answer.pop("id") == line_id
    assert answer.pop("text") == text
    assert read_answer({"id": line_id, **answer}) == (line_id, 4, 3)
    for name in ("finish_reason", "num_prompt_tokens", "num_completion_tokens"):
        del answer[name]
    taken = (*ANSWER_KEYS, *OPTIONAL_KEYS)
    assert answer == {f"input_{name}" if name in taken else name: value for name, value in columns.items()}


@given(
    st.dictionaries(
        TEXT.filter(lambda name: name and not set(name) & set("{}[]!:")), VALUES.filter(bool), min_size=1, max_size=3
    )
)
def test_a_template_puts_columns_into_a_text(row):
    names = list(row)
    template = "{{ " + ", ".join(f"{{{name}}}" for name in names) + " }}"
    values = [row[name] if isinstance(row[name], str) else as_json(row[name]) for name in names]
    line = LineFormat(template=template).read(row, "1")
    assert line.prompt == "{ " + ", ".join(values) + " }"
    assert not line.columns


def test_columns_of_an_earlier_job_keep_apart():
    """Its answers may be the next job's input, and that one's of a third."""
    row = {"prompt": "a", "text": "one", "input_text": "two", "input_input_text": "three", "finish_reason": "stop"}
    columns = LineFormat().read(row, 1).columns
    renamed = {"input_input_input_text": "one", "input_finish_reason": "stop"}
    assert columns == renamed | {"input_text": "two", "input_input_text": "three"}


def test_columns_that_are_called_as_openais():
    """They make no request of a row: a body that is a text, and a custom_id."""
    row = {"id": 7, "custom_id": "c", "subject": "s", "body": "b", "prompt": "a"}
    assert read_id(row) == 7
    assert LineFormat().read(row, 7).columns == {"custom_id": "c", "subject": "s", "body": "b"}
    assert LineFormat(template="{subject}: {body}").read(row, 7).prompt == "s: b"
    assert LineFormat(prompt_column="body").read(row, 7).prompt == "b"
    answer = answer_row(7, LineFormat().read(row, 7), output(), RESPONDER)
    assert answer["custom_id"] == "c"
    assert read_answer(answer) == (7, 4, 3)
    row = {"id": 8, "subject": "s", "body": {"html": None}}  # an object without a prompt, and nothing else of OpenAI's
    assert read_id(row) == 8
    assert LineFormat(template="{subject}: {body}").read(row, 8).prompt == 's: {"html": null}'
    with pytest.raises(ValueError, match="body: has no 'prompt'"):
        LineFormat().read({"custom_id": "c", "body": {"html": None}}, "c")


@given(st.binary())
def test_any_bytes_are_a_row_or_a_value_error(raw):
    with suppress(ValueError):
        assert isinstance(from_json(raw), dict)


@given(COLUMNS | OPTIONS, OPTIONS)
def test_any_row_is_a_line_or_an_error_with_words(row, options):
    for each in (row, {"prompt": "a", **options}, {"custom_id": "a", "body": {"prompt": "a", **options}}):
        with suppress(TypeError, ValueError):
            assert LineFormat().read(each, 1).prompt


def test_json_that_others_can_read():
    assert to_json({"a": float("nan"), "b": [float("inf"), 1.5]}) == '{"a": null, "b": [null, 1.5]}'
    assert to_json("grün") == '"grün"'
    assert to_json({"half": "\ud800"}).encode() == b'{"half": "\\ud800"}'
    assert to_json({"bytes": b"\x00\x01"}) == '{"bytes": "AAE="}'


@pytest.mark.parametrize("raw", [b"", b"[]", b"1", b"{", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_object(raw):
    with pytest.raises(ValueError, match=r"is not JSON|must be a JSON object|is not UTF-8|is nested more"):
        from_json(raw)


def test_the_prompts_of_a_line():
    read = LineFormat().read
    assert read({"prompt": "a"}, 1).prompt == "a"
    assert read({"prompt": [1, 2]}, 1).prompt == [1, 2]
    assert read({"prompt_token_ids": [1, 2]}, 1).prompt == [1, 2]
    assert read({"prompt": None, "messages": [{"role": "user", "content": "a"}]}, 1).is_chat
    assert LineFormat(prompt_column="text").read({"text": "a", "prompt": "b"}, 1).columns == {"prompt": "b"}
    assert LineFormat(prompt_column="turns").read({"turns": [{"role": "user", "content": "a"}]}, 1).is_chat


def test_a_system_message_makes_a_conversation_of_a_text():
    line_format = LineFormat(system="Be brief.", template="Sum {a}")
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sum 7"}
    assert line_format.read({"a": 7}, 1).prompt == [system, user]
    line_format = LineFormat(system="Be brief.")
    assert line_format.read({"messages": [user]}, 1).prompt == [system, user]
    own = {"role": "system", "content": "Be long."}
    assert line_format.read({"messages": [own, user]}, 1).prompt == [own, user]
    assert line_format.read({"prompt": [1, 2]}, 1).prompt == [1, 2]


def test_parameters_of_a_line_come_before_those_of_the_job():
    line_format = LineFormat({"temperature": 0.5, "max_tokens": 9})
    line = line_format.read({"prompt": "a", "temperature": 0, "top_k": None, "stop": ["x"], "topic": "y"}, 1)
    assert (line.params.temperature, line.params.max_tokens, line.params.stop) == (0.0, 9, ("x",))
    assert line.columns == {"temperature": 0, "top_k": None, "stop": ["x"], "topic": "y"}
    assert line_format.read({"prompt": "a"}, 1).params is line_format.read({"prompt": "b"}, 2).params
    form = line_format.read({"prompt": "a", "structured_outputs": {"choice": ["x", "y"]}}, 1).params.structured_outputs
    assert form.choice == ("x", "y")


def test_a_seed_gives_each_line_its_own():
    params = [LineFormat(seed=3).read({"prompt": "a"}, line_id).params for line_id in (1, 2, 1)]
    assert params[0] == params[2] != params[1]
    assert LineFormat(seed=3).read({"prompt": "a", "seed": 5}, 1).params.seed == 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "a"}, "has no prompt: 'prompt' or .* is missing; its columns: 'text'"),
        ({"prompt": "a", "messages": []}, "has 'prompt' and 'messages'"),
        ({"prompt": ""}, "must be a text, token ids or messages, and not empty"),
        ({"prompt": 7}, "must be a text, token ids or messages"),
        ({"messages": [{"role": "user"}]}, "^message 0: content must be"),
        ({"prompt": "a", "temperature": -1}, "temperature=-1"),
        ({"prompt": "a", "max_tokens": "x"}, "max_tokens='x'"),
        ({"prompt": "a", "structured_outputs": {}}, "exactly one of json, regex, choice and grammar"),
        ({"prompt": [1, "a"]}, "prompt=.* must be a text, token ids or messages"),
        ({"messages": [USER], "chat_template_kwargs": "[1]"}, "chat_template_kwargs=.1.: must be a JSON object"),
        ({"custom_id": "a", "body": 7}, "has no prompt: .*; its columns: 'custom_id', 'body'"),
        ({"body": {"messages": []}, "method": "GET"}, "method='GET'"),
        ({"body": {"input": "a"}, "url": "/v1/embeddings"}, "url='/v1/embeddings'"),
        ({"body": {}, "url": "/v1/chat/completions"}, "body: has no 'messages'"),
        ({"body": {"prompt": ["a", "b"]}}, "give each prompt a line of its own"),
        ({"body": {"prompt": "a", "stream": True}}, "stream=True: cannot be served"),
        ({"body": {"prompt": "a", "use_beam_search": True}}, "use_beam_search=True: cannot be served"),
        ({"body": {"prompt": "a", "response_format": {"type": "x"}}}, "response_format="),
        ({"body": {"prompt": "a", "response_format": "json"}}, "response_format="),
        ({"body": {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": None}}}, "with a schema"),
    ],
    ids=str,
)
def test_lines_that_cannot_be_served(row, message):
    with pytest.raises((TypeError, ValueError), match=message):
        LineFormat().read(row, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "no column"}, "must name columns in braces"),
        ({"template": "{}"}, "must name columns in braces"),
        ({"template": "{a"}, "template="),
        ({"template": "{a!r}"}, "must name columns in braces"),
        ({"template": "{a}", "prompt_column": "b"}, "template: makes the prompt"),
        ({"sampling": {"temperature": -1}}, "temperature=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs=.1.: must be a JSON object"),
    ],
    ids=str,
)
def test_formats_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        LineFormat(**options)


@pytest.mark.parametrize("line_id", [1.5, True, [1], {}, "\ud800"])
def test_an_id_is_a_text_or_an_integer(line_id):
    with pytest.raises(ValueError, match="must be a text or an integer"):
        read_id({"id": line_id})
    assert id_bytes(7) == id_bytes("7")


def test_half_of_a_surrogate_pair_in_an_id():
    with pytest.raises(ValueError, match=r"^id='a.ud83d': .* it holds half of a surrogate pair, '.ud83d' at index 1,"):
        read_id({"id": "a\ud83d"})


def test_a_systems_message_beside_a_developers():
    """Both are one to most templates."""
    line_format = LineFormat(system="Be brief.")
    messages = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "hi"}]
    assert line_format.read({"messages": messages}, 1).prompt == messages
    assert line_format.read({"messages": messages[1:]}, 1).prompt[0] == {"role": "system", "content": "Be brief."}


# The first lines of the files that vLLM's and OpenAI's guides give as examples, with words of our own.
VLLM_LINE = {
    "custom_id": "request-1",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "model": "some-org/some-model",
        "messages": [{"role": "system", "content": "Help."}, {"role": "user", "content": "Hello!"}],
        "max_completion_tokens": 10,
        "top_k": 5,
    },
}
OPENAI_LINE = {
    "custom_id": "request-2",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {
        "model": "gpt-4o-mini",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello!"}]}],
        "max_tokens": 20,
        "stop": None,
        "n": 2,
        "response_format": {"type": "json_object"},
        "logit_bias": {"5": -100},
        "user": "someone",
        "metadata": {"a": "b"},
    },
}


def test_requests_of_openais_format():
    line = LineFormat({"temperature": 0}).read(VLLM_LINE, "request-1")
    assert [message["content"] for message in line.prompt] == ["Help.", "Hello!"]
    assert (line.params.temperature, line.params.max_tokens, line.params.top_k) == (0, 10, 5)
    line = LineFormat().read(OPENAI_LINE, "request-2")
    assert line.prompt[0]["content"] == [{"type": "text", "text": "Hello!"}]
    assert (line.params.n, line.params.max_tokens, line.params.logit_bias) == (2, 20, ((5, -100.0),))
    assert json.loads(line.params.structured_outputs.json) == {"type": "object"}
    unlimited = {"body": {"prompt": "a", "echo": False}}
    assert LineFormat().read(unlimited, 1).params.max_tokens is None
    assert LineFormat({"max_tokens": 7}).read(unlimited, 1).params.max_tokens == 7


def test_answers_in_openais_format():
    line = LineFormat().read(OPENAI_LINE, "request-2")
    samples = [output("one"), output("two", finish_reason="length")]
    row = from_json(to_json(answer_row("request-2", line, output("one", samples=samples), RESPONDER)).encode())
    assert (row["custom_id"], row["error"], row["response"]["status_code"]) == ("request-2", None, 200)
    body = row["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "my-model")
    assert [choice["message"] for choice in body["choices"]] == [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
    ]
    assert [(choice["index"], choice["finish_reason"]) for choice in body["choices"]] == [(0, "stop"), (1, "length")]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert read_answer(row) == ("request-2", 4, 6)
    line = LineFormat().read({"custom_id": "c", "body": {"prompt": "a"}}, "c")
    body = answer_row("c", line, output("one"), RESPONDER)["response"]["body"]
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "one")
