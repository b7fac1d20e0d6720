"""SamplingParams: what a request may ask for, and how a wrong wish is refused."""

import dataclasses
import json
import math

import pytest

from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

NAN, INF = math.nan, math.inf


def test_defaults():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos, params.seed) == (1.0, 64, False, None)
    # Nothing is truncated, penalized or stopped, and nothing is told but the text, unless somebody asks for it.
    assert (params.top_k, params.top_p, params.min_p, params.min_tokens, params.n) == (0, 1.0, 0.0, 0, 1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.stop, params.stop_token_ids, params.include_stop_str_in_output) == ((), (), False)
    assert (params.logprobs, params.prompt_logprobs, params.structured_outputs) == (None, None, None)
    assert params.skip_special_tokens


FORM = StructuredOutputsParams(choice=("yes", "no"))
RIGHT = {
    "temperature": [0, 0.0, 1e-6, 100],
    "max_tokens": [1, 10**9, None],
    "ignore_eos": [True, False],
    "seed": [0, 2**63 - 1, None],
    "top_k": [0, 1, 20, 2**31 - 1],
    "top_p": [1, 1.0, 0.95, 1e-9],
    "min_p": [0, 0.05, 1, 1.0],
    "min_tokens": [0, 1, 64],
    "stop": [(), ("a",), ("\n\n", "漢字", " ")],
    "include_stop_str_in_output": [True, False],
    "stop_token_ids": [(), (0,), (5, 2**31 - 1)],
    "n": [1, 2, 1000],
    "logprobs": [None, 0, 1, 20],
    "prompt_logprobs": [None, 0, 1, 20],
    "presence_penalty": [-2, 0, 0.5, 2],
    "frequency_penalty": [-2.0, 0, 0.5, 2],
    "repetition_penalty": [1e-6, 1, 1.05, 100],
    "skip_special_tokens": [True, False],
    "structured_outputs": [None, FORM],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, value, id=f"{name}-{value!r:.20}") for name, values in RIGHT.items() for value in values],
)
def test_right_values_are_kept(name, value):
    assert getattr(SamplingParams(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("top_k", -1, 0),
        ("stop", "END", ("END",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", None, ()),
        ("stop_token_ids", [3, 4], (3, 4)),
        ("stop_token_ids", {3}, (3,)),
        ("stop_token_ids", None, ()),
    ],
)
def test_other_spellings_of_a_value_become_one(name, value, kept):
    assert SamplingParams(**{name: value}) == SamplingParams(**{name: kept})
    assert getattr(SamplingParams(**{name: value}), name) == kept


BOOLEANS = [0, 1, None, "yes", "False", 1.0]
PENALTIES = [-2.01, 2.01, NAN, INF, "0", None, True, [0.5]]
LOGPROBS = [-1, 21, 1.0, "5", True, False, [1]]
WRONG = {
    "temperature": [-1e-9, -1, NAN, INF, -INF, 10**400, "0.5", None, True, False, [0.5], 1j],
    "max_tokens": [0, -1, 1.0, 16.5, "16", True, NAN, INF, [16]],
    "ignore_eos": BOOLEANS,
    "seed": [-1, 2**63, 2**64, 1.0, "1", True, False, NAN, [1]],
    "top_k": [-2, 1.0, 2**31, "20", None, True, NAN],
    "top_p": [0, 0.0, -0.1, 1.0001, 2, NAN, INF, "0.9", None, True, [0.9]],
    "min_p": [-0.1, 1.0001, NAN, INF, "0.1", None, True],
    "min_tokens": [-1, 65, 1.0, "1", None, True, NAN],
    "include_stop_str_in_output": BOOLEANS,
    "n": [0, -1, 1.0, "2", None, True, [2]],
    "logprobs": LOGPROBS,
    "prompt_logprobs": LOGPROBS,
    "presence_penalty": PENALTIES,
    "frequency_penalty": PENALTIES,
    "repetition_penalty": [0, 0.0, -1, NAN, INF, "1", None, True],
    "skip_special_tokens": BOOLEANS,
    "structured_outputs": ["json", {"json": {}}, 1, True],
    # Those that come as several have their own spelling in the message.
    "stop": [("",), ("a", ""), (b"a",), (5,), ("a", None)],
    "stop_token_ids": [(-1,), (2**31,), (1.0,), ("1",), (True,), (None,)],
}
ALLOWED = {
    "temperature": r"finite.*>= 0",
    "max_tokens": r"integer.*>= 1.*None",
    "ignore_eos": r"True or False",
    "seed": r"None.*integer.*0.*2\*\*63 - 1",
    "top_k": r"integer >= 1.*0 or -1",
    "top_p": r"\(0, 1\]",
    "min_p": r"0\.\.1",
    "min_tokens": r"integer >= 0|at most max_tokens, 64",
    "stop": r"texts, none of them empty",
    "include_stop_str_in_output": r"True or False",
    "stop_token_ids": r"token ids >= 0",
    "n": r"integer >= 1",
    "logprobs": r"None.*0\.\.20",
    "prompt_logprobs": r"None.*0\.\.20",
    "presence_penalty": r"-2\.\.2",
    "frequency_penalty": r"-2\.\.2",
    "repetition_penalty": r"finite.*> 0",
    "skip_special_tokens": r"True or False",
    "structured_outputs": r"StructuredOutputsParams",
}


def test_the_tables_cover_every_field():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(WRONG) == set(ALLOWED) == set(RIGHT)


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, value, id=f"{name}-{value!r:.20}") for name, values in WRONG.items() for value in values],
)
def test_a_wrong_value_is_refused_with_its_field_itself_and_what_is_allowed(name, value):
    with pytest.raises(ValueError, match=ALLOWED[name]) as error:
        SamplingParams(**{name: value})
    assert f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop", 5), ("stop", True), ("stop", b"a"), ("stop_token_ids", 5), ("stop_token_ids", "5")],
)
def test_lists_that_are_no_lists(name, value):
    with pytest.raises(ValueError, match=f"{name}=.*must be a") as error:
        SamplingParams(**{name: value})
    assert isinstance(value, str | bytes) or f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize("options", [{}, {"json": {}, "regex": "a"}, {"regex": "a", "choice": ["a"]}])
def test_a_form_is_exactly_one_thing(options):
    with pytest.raises(ValueError, match="exactly one of json, regex and choice"):
        StructuredOutputsParams(**options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("json", 5),
        ("json", "{not json"),
        ("json", {"a": object()}),
        ("regex", ""),
        ("regex", 5),
        ("choice", []),
        ("choice", "yes"),
        ("choice", ["a", ""]),
        ("choice", [1]),
        ("choice", 5),
    ],
)
def test_a_form_of_the_wrong_kind(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        StructuredOutputsParams(**{name: value})


def test_a_form_can_be_hashed_as_all_parameters_can():
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert StructuredOutputsParams(json=schema) == StructuredOutputsParams(json=json.dumps(schema))
    assert StructuredOutputsParams(choice=["a", "b"]).choice == ("a", "b")
    hash(SamplingParams(structured_outputs=StructuredOutputsParams(json=schema), stop=["a"], stop_token_ids=[1]))


def test_an_unknown_keyword_is_refused_by_name():
    with pytest.raises(TypeError, match="max_token"):
        SamplingParams(max_token=5)


def test_one_object_can_serve_many_requests():
    params = SamplingParams(max_tokens=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 6
    with pytest.raises((AttributeError, TypeError)):
        params.top_q = 1
    assert params == SamplingParams(max_tokens=5)
    assert len({params, SamplingParams(max_tokens=5)}) == 1


def test_a_changed_copy_is_checked_too():
    params = SamplingParams(max_tokens=5, seed=1)
    assert dataclasses.replace(params, max_tokens=6) == SamplingParams(max_tokens=6, seed=1)
    with pytest.raises(ValueError, match="max_tokens=0"):
        dataclasses.replace(params, max_tokens=0)
