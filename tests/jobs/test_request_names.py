"""Parameters of lines under the names of OpenAI and vLLM: served, or the line is refused by name."""

import json
from typing import get_type_hints

import pytest
from job_files import read_folder, read_lines
from test_lines import USER, output

from nanovllm import SamplingParams
from nanovllm.jobs.lines import LineFormat, answer_row
from nanovllm.openai_format.openai_batch import Responder

SCHEMA = {"type": "object"}


def params(**row):
    return LineFormat().read({"messages": [USER], **row}, 1).params


def form(**row):
    return params(**row).structured_outputs


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"max_completion_tokens": 2}, {"max_tokens": 2}),
        ({"max_completion_tokens": 2, "max_tokens": 2}, {"max_tokens": 2}),
        ({"sampling_params": {"max_tokens": 2, "top_k": 5, "seed": None}}, {"max_tokens": 2, "top_k": 5}),
        ({"sampling_params": '{"max_tokens": 2}'}, {"max_tokens": 2}),
        ({"extra_body": {"top_k": 5, "sampling_params": {"min_p": 0.5}}}, {"top_k": 5, "min_p": 0.5}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False, "top_logprobs": None}, {"logprobs": None}),
        ({"logprobs": 2}, {"logprobs": 2}),
        ({"logit_bias": '{"5": -100}'}, {"logit_bias": ((5, -100.0),)}),
        ({"tool_choice": "auto", "best_of": 1, "stream": False, "model": "gpt", "user": "u"}, {}),
        ({"temperature": None, "top_p": float("nan")}, {"temperature": 1.0, "top_p": 1.0}),
    ],
    ids=str,
)
def test_names_that_are_served(row, options):
    found = params(**row)
    assert {name: getattr(found, name) for name in options} == options


INTEGERS = ("max_tokens", "max_completion_tokens", "seed", "n", "top_k", "min_tokens", "logprobs", "prompt_logprobs")


@pytest.mark.parametrize("name", INTEGERS)
def test_whole_floats_are_integers(name):
    """pandas makes floats of a column of integers in which one is missing, and some programs write all numbers so."""
    option = "max_tokens" if name == "max_completion_tokens" else name
    for found in (params(**{name: 5.0}), params(extra_body={name: 5.0}), form_of_openai(**{name: 5.0})):
        assert getattr(found, option) == 5
        assert type(getattr(found, option)) is int
    with pytest.raises(ValueError, match=rf"^{option}=5.5: must be .*an integer in"):
        params(**{name: 5.5})


def form_of_openai(**options):
    return LineFormat().read({"custom_id": "a", "body": {"messages": [USER], **options}}, "a").params


def test_every_integer_of_the_parameters_may_be_a_whole_float():
    """Also those that are added later."""
    kinds = get_type_hints(SamplingParams)
    names = [name for name, kind in kinds.items() if kind in (int, int | None)]
    assert {"prompt_logprobs_start", *INTEGERS} - {"max_completion_tokens"} <= set(names)
    needed = {"prompt_logprobs_start": {"prompt_logprobs": 1}}
    for name in names:
        assert type(getattr(params(**{name: 5.0}, **needed.get(name, {})), name)) is int
    found = params(stop_token_ids=[5.0, 6], allowed_token_ids=[5.0], logit_bias={"5.0": -1, "6": 2}, logprobs=0.0)
    assert (found.stop_token_ids, found.allowed_token_ids, found.logprobs) == ((5, 6), (5,), 0)
    assert found.logit_bias == ((5, -1.0), (6, 2.0))
    assert params(logprobs=True, top_logprobs=3.0).logprobs == 3
    for wrong in ({"stop_token_ids": [5.5]}, {"logit_bias": {"5.5": 1}}, {"seed": 1e300}, {"max_tokens": float("inf")}):
        with pytest.raises(ValueError, match=f"^{next(iter(wrong))}="):
            params(**wrong)
    assert LineFormat(seed=5.0).read({"prompt": "a"}, 1).params == LineFormat(seed=5).read({"prompt": "a"}, 1).params


def test_token_ids_may_be_whole_floats():
    for row in ({"prompt_token_ids": [5.0, 6]}, {"prompt": [5.0, 6.0]}, {"body": {"prompt": [5, 6.0]}}):
        prompt = LineFormat().read(row, 1).prompt
        assert prompt == [5, 6]
        assert set(map(type, prompt)) == {int}
        with pytest.raises(ValueError, match="prompt"):
            LineFormat().read(json.loads(json.dumps(row).replace("6", "6.5").replace(".5.0", ".5")), 1)


@pytest.mark.parametrize(
    "row",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": json.dumps({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}})},
        {"guided_json": SCHEMA},
        {"guided_json": json.dumps(SCHEMA)},
        {"guided_json_object": True},
        {"guided_decoding": {"json": SCHEMA}},
        {"structured_outputs": json.dumps({"json": SCHEMA})},
        {"extra_body": {"guided_json": SCHEMA}, "response_format": {"type": "text"}},
    ],
    ids=str,
)
def test_forms_of_an_answer(row):
    assert json.loads(form(**row).json) == SCHEMA
    assert form(guided_regex="a+").regex == "a+"
    assert form(guided_grammar="start: A").grammar == "start: A"
    assert form(guided_choice=["x", "y"]).choice == ("x", "y")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"max_completion_tokens": 2, "max_tokens": 3}, "max_completion_tokens=2: max_tokens=3 says otherwise"),
        ({"sampling_params": {"max_tokens": 2}, "max_tokens": 3}, "max_tokens: is given twice, as 3 and in sampling_p"),
        ({"sampling_params": {"max_token": 2}}, "unknown option 'max_token': did you mean 'max_tokens'"),
        ({"sampling_params": "x"}, "sampling_params='x': is not JSON"),
        ({"extra_body": [1]}, "extra_body=.1.: must be a JSON object"),
        ({"extra_body": {"anything": 1}}, "unknown option 'anything'"),
        ({"tool_choice": "required"}, "tool_choice='required': must be 'auto' or 'none'"),
        ({"tool_choice": {"type": "function"}}, "tool_choice="),
        ({"top_logprobs": 3}, "top_logprobs=3: needs logprobs=true"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "an answer has one form"),
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "exactly one of"),
        ({"structural_tag": "x"}, "structural_tag='x': cannot be served"),
        ({"best_of": 3}, "best_of=3: cannot be served; use n"),
        ({"stream": True}, "stream=True"),
        ({"suffix": "}"}, "suffix='}': cannot be served; put it into the prompt"),
        ({"max_new_tokens": 3}, "unknown option 'max_new_tokens': use max_tokens"),
        ({"functions": [{}]}, "functions=.*: cannot be served; use tools"),
        ({"chat_template": "x"}, "chat_template='x': cannot be served; --chat-template"),
        ({"messages": None, "prompt": "a", "tools": [{}]}, "tools: needs 'messages'"),
        ({"messages": None, "prompt": "a", "reasoning_effort": "low"}, "reasoning_effort: needs 'messages'"),
        ({"messages": None, "prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs: needs 'messages'"),
        ({"temperature": 1e999}, "temperature=inf"),
    ],
    ids=str,
)
def test_names_that_cannot_be_served(row, message):
    with pytest.raises((TypeError, ValueError), match=message):
        params(**row)


def test_columns_of_tables_are_no_requests():
    """With a template or a prompt_column, names of everyday meaning are data. What nobody calls so by chance counts."""
    row = {"text": "a", "stream": "Danube", "suffix": "Jr.", "functions": ["x"], "tools": "hammer", "user": "u"}
    for line_format in (LineFormat(template="{text}"), LineFormat(prompt_column="text")):
        line = line_format.read(row | {"max_completion_tokens": 3}, 1)
        assert line.params.max_tokens == 3
        assert line.columns == {name: value for name, value in row.items() if name != "text"} | {
            "max_completion_tokens": 3
        }
    assert LineFormat().read({"prompt": "a", "tools": "hammer"}, 1).columns == {"tools": "hammer"}
    data = {"temperature": "hot", "best_of": "x", "suffix": "y", "tools": [1]}
    line = LineFormat(line_parameters=False).read({"prompt": "a", **data}, 1)
    assert line.columns == data
    assert LineFormat().parameter_columns(["id", "prompt", "n", "user", "best_of"]) == ["n", "best_of"]
    assert LineFormat(template="{n}").parameter_columns(["n", "seed"]) == ["seed"]


def test_what_the_chat_template_gets():
    tools = [{"type": "function", "function": {"name": "add"}}]
    read = LineFormat(chat_template_kwargs={"a": 1, "b": 2}).read
    options = read({"messages": [USER], "tools": tools, "chat_template_kwargs": {"b": 3}}, 1).chat_options
    assert (options.tools, options.kwargs) == (tools, {"a": 1, "b": 3})
    assert read({"messages": [USER], "tools": tools, "tool_choice": "none"}, 1).chat_options.tools is None
    body = {"messages": [USER], "reasoning_effort": "low", "tools": tools}
    for row in (body, {"custom_id": "a", "body": body}):
        options = read(row, 1).chat_options
        assert (options.tools, options.kwargs["reasoning_effort"], options.needed) == (
            tools,
            "low",
            ("reasoning_effort",),
        )


def test_a_chat_template_for_all_lines(job, answers, llm):
    template = "{% for m in messages %}{{ m.content }}{% endfor %} {{ reasoning_effort }}"
    rows = [{"id": 1, "messages": [USER], "reasoning_effort": "low"}, {"id": 2, "prompt": "hi low"}]
    job(rows, chat_template=template)
    first, second = sorted(read_folder(answers), key=lambda row: row["id"])
    assert (first["text"], first["num_prompt_tokens"]) == (second["text"], second["num_prompt_tokens"])
    job(rows, answers.with_name("other"), chat_template="{{ messages[0].content }}")
    (error,) = read_lines(*answers.with_name("other").glob("*errors.jsonl"))
    assert error["error"] == "reasoning_effort: the chat template does not use it"


def test_log_probabilities_in_openais_format(job, answers, llm):
    chat = {"messages": [USER], "logprobs": True, "top_logprobs": 2, "temperature": 0, "max_tokens": 3}
    rows = [{"custom_id": "a", "body": chat}]
    rows += [{"custom_id": "b", "body": {"prompt": "hi", "logprobs": 2, "max_tokens": 3, "temperature": 0}}]
    job(rows, chat_template="{{ messages[0].content }}")
    bodies = {row["custom_id"]: row["response"]["body"]["choices"][0] for row in read_folder(answers)}
    content = bodies["a"]["logprobs"]["content"]
    assert len(content) == 3
    assert "".join(token["token"] for token in content) == bodies["a"]["message"]["content"]
    for token in content:
        assert bytes(token["bytes"]).decode() == token["token"]
        assert token["top_logprobs"][0]["token"] == token["token"]  # greedy
        assert token["logprob"] == token["top_logprobs"][0]["logprob"] >= token["top_logprobs"][1]["logprob"]
        assert len(token["top_logprobs"]) == 2
    logprobs = bodies["b"]["logprobs"]
    assert logprobs["tokens"] == [token["token"] for token in content]
    assert logprobs["token_logprobs"] == [token["logprob"] for token in content]
    assert [max(top, key=top.get) for top in logprobs["top_logprobs"]] == logprobs["tokens"]
    assert logprobs["text_offset"] == [0, len(logprobs["tokens"][0]), len("".join(logprobs["tokens"][:2]))]


def test_texts_of_tokens_keep_their_spaces():
    """A decoder of this kind strips the space before the first word."""

    class Tokenizer:
        words = ("a", " b", "\ufffd")

        def encode(self, text, add_special_tokens):
            return [0]

        def decode(self, token_ids, clean_up_tokenization_spaces):
            return "".join(self.words[token] for token in token_ids).removeprefix(" ")

    line = LineFormat().read({"custom_id": "x", "body": {"messages": [USER], "logprobs": True, "top_logprobs": 1}}, "x")
    result = output(token_ids=[1, 2], logprobs=[{1: -0.5, 0: -0.25}, {2: float("-inf"), 1: -1.0}])
    row = answer_row("x", line, result, Responder("m", Tokenizer))
    first, second = row["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert (first["token"], first["bytes"], first["top_logprobs"][0]["token"]) == (" b", [32, 98], "a")
    assert (second["token"], second["bytes"], second["logprob"]) == ("\ufffd", None, -9999.0)


def test_a_form_for_all_lines(job, answers):
    rows = [{"id": 1, "prompt": "a"}, {"id": 2, "prompt": "b", "guided_choice": ["maybe"]}]
    job(rows, structured_outputs={"choice": ["yes", "no"]}, bad_words=["yes"], max_tokens=20)
    assert {row["id"]: row["text"] for row in read_folder(answers)} == {1: "no", 2: "maybe"}
    with pytest.raises(ValueError, match="structured_outputs was"):
        job(rows, structured_outputs={"choice": ["yes"]}, bad_words=["yes"], max_tokens=20)
