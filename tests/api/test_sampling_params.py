"""SamplingParams: what a request may ask for, and how a wrong wish is refused."""

import copy
import dataclasses
import inspect
import json
import math
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch

from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.utils.option_hints import HINTS, unknown_option

NAN, INF = math.nan, math.inf


def test_by_default_nothing_is_truncated_penalized_or_stopped():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos, params.seed) == (1.0, 64, False, None)
    # Nothing is truncated, penalized or stopped, and nothing is told but the text, unless somebody asks for it.
    assert (params.top_k, params.top_p, params.min_p, params.min_tokens, params.n) == (0, 1.0, 0.0, 0, 1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.stop, params.stop_token_ids, params.include_stop_str_in_output) == ((), (), False)
    assert (params.logprobs, params.prompt_logprobs, params.structured_outputs) == (None, None, None)
    assert params.skip_special_tokens
    assert (params.logit_bias, params.allowed_token_ids, params.bad_words) == ((), None, ())


FORM = StructuredOutputsParams(choice=("yes", "no"))
RIGHT = {
    "temperature": [0, 0.0, 1e-6, 100, 1.2e-38, 3.4e38],
    "max_tokens": [1, 10**9, None],
    "ignore_eos": [True, False],
    "seed": [0, 2**63 - 1, None],
    "top_k": [0, 1, 20, 2**31 - 1],
    "top_p": [1, 1.0, 0.95, 1e-9, 1.2e-38],
    "min_p": [0, 0.05, 1, 1.0],
    "min_tokens": [0, 1, 64],
    "stop": [(), ("a",), ("\n\n", "漢字", " ")],
    "include_stop_str_in_output": [True, False],
    "stop_token_ids": [(), (0,), (5, 2**31 - 1)],
    "n": [1, 2, 1000, 16384],
    "logprobs": [None, 0, 1, 20],
    "logprob_token_ids": [None],
    "prompt_logprobs": [None, 0, 1, 20],
    "prompt_logprobs_start": [0],
    "presence_penalty": [-2, 0, 0.5, 2],
    "frequency_penalty": [-2.0, 0, 0.5, 2],
    "repetition_penalty": [1e-6, 1, 1.05, 100, 1.2e-38, 3.4e38],
    "skip_special_tokens": [True, False],
    "structured_outputs": [None, FORM],
    "logit_bias": [(), ((0, -100.0), (5, 1.5), (2**31 - 1, 100.0))],
    "allowed_token_ids": [None, (0,), (5, 2**31 - 1)],
    "bad_words": [(), ("a",), ("\n\n", "漢字", " ")],
    "extra_args": [(), (("warmer", 2.0),), (("a", None), ("b", [1]))],
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
        ("stop_token_ids", np.array([3, 4]), (3, 4)),
        ("stop_token_ids", torch.tensor([3, 4]), (3, 4)),
        ("bad_words", "word", ("word",)),
        ("bad_words", ["a", "b"], ("a", "b")),
        ("bad_words", np.array(["a"]), ("a",)),
        ("bad_words", None, ()),
        ("allowed_token_ids", [3, 4], (3, 4)),
        ("allowed_token_ids", np.array([3, 4]), (3, 4)),
        ("logit_bias", {5: 1, 6: -2.5}, ((5, 1.0), (6, -2.5))),
        ("logit_bias", {"5": 1, np.int64(6): np.float32(-2.5)}, ((5, 1.0), (6, -2.5))),
        ("logit_bias", None, ()),
        # Of numpy and torch, as a column of a table or the outcome of a computation gives them.
        ("max_tokens", np.int64(5), 5),
        ("max_tokens", np.array(5), 5),
        ("max_tokens", torch.tensor(5), 5),
        ("seed", np.uint64(2**63 - 1), 2**63 - 1),
        ("top_k", np.int32(-1), 0),
        ("logprobs", np.uint8(5), 5),
        ("temperature", np.float64(0.6), 0.6),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", np.int64(0), 0.0),
        ("temperature", torch.tensor(0.5), 0.5),
        ("top_p", Fraction(1, 2), 0.5),
        ("ignore_eos", np.bool_(True), True),
        ("skip_special_tokens", torch.tensor(False), False),
        ("stop", np.str_("END"), ("END",)),
    ],
)
def test_other_spellings_of_a_value_become_one(name, value, kept):
    assert SamplingParams(**{name: value}) == SamplingParams(**{name: kept})
    found = getattr(SamplingParams(**{name: value}), name)
    assert found == kept
    assert type(found) is type(kept)
    assert not isinstance(found, tuple) or [*map(type, found)] == [*map(type, kept)]


BOOLEANS = [0, 1, None, "yes", "False", 1.0]
# Of those that float32 has not, one would be infinite and one 0.
PENALTIES = [-2.01, 2.01, NAN, INF, "0", None, True, [0.5], 1e-50]
LOGPROBS = [-1, 21, 1.0, "5", True, False, [1]]
TEXTS = [("",), ("a", ""), (b"a",), (5,), ("a", None)]
WRONG = {
    "temperature": [
        -1e-9,
        -1,
        NAN,
        INF,
        -INF,
        10**310,
        "0.5",
        None,
        True,
        False,
        [0.5],
        1j,
        3.5e38,
        1e300,
        1e-40,
        5e-324,
    ],
    "max_tokens": [0, -1, 1.0, 16.5, "16", True, NAN, INF, [16], 2**31],
    "ignore_eos": BOOLEANS,
    "seed": [-1, 2**63, 2**64, 1.0, "1", True, False, NAN, [1]],
    "top_k": [-2, 1.0, 2**31, "20", None, True, NAN],
    "top_p": [0, 0.0, -0.1, 1.0001, 2, NAN, INF, "0.9", None, True, [0.9], 1e-40, 1e-300],
    "min_p": [-0.1, 1.0001, NAN, INF, "0.1", None, True, 1e-40],
    "min_tokens": [-1, 65, 1.0, "1", None, True, NAN, 2**31],
    "include_stop_str_in_output": BOOLEANS,
    "n": [0, -1, 1.0, "2", None, True, [2], 16385, 10**9],
    "logprobs": LOGPROBS,
    "logprob_token_ids": [(), (-1,), (2**31,), (1.0,), ("1",), (True,), (None,), (5,)],
    "prompt_logprobs": LOGPROBS,
    "prompt_logprobs_start": [None, 1.0, "1", True, NAN, 2**31, -(2**31), [1], 1],
    "presence_penalty": PENALTIES,
    "frequency_penalty": PENALTIES,
    "repetition_penalty": [0, 0.0, -1, NAN, INF, "1", None, True, 1e300, 1e-300, 3.5e38, 1e-40],
    "skip_special_tokens": BOOLEANS,
    "structured_outputs": ["json", {"json": {}}, 1, True],
    # Those that come as several have their own spelling in the message.
    "stop": TEXTS,
    "bad_words": TEXTS,
    "stop_token_ids": [(-1,), (2**31,), (1.0,), ("1",), (True,), (None,)],
    "allowed_token_ids": [(), (-1,), (2**31,), (1.0,), ("1",), (True,), (None,)],
    "logit_bias": [
        ((5, 1.0), (5, 2.0)),
        ((-1, 0.0),),
        ((5, 100.5),),
        ((5, NAN),),
        (("a", 0.0),),
        ((True, 0.0),),
        ((5, "1"),),
    ],
    "extra_args": [(5,), ("a",), ((5, 1),), (("a", 1, 2),)],
}
ALLOWED = {
    "temperature": r"0 \(greedy\).*finite.*1\.2e-38\.\.3\.4e\+38",
    "max_tokens": r"integer.*1\.\.2\*\*31 - 1.*None",
    "ignore_eos": r"True or False",
    "seed": r"None.*integer.*0.*2\*\*63 - 1",
    "top_k": r"integer in 1\.\.2\*\*31 - 1.*0 or -1",
    "top_p": r"1\.2e-38\.\.1",
    "min_p": r"0\.\.1",
    "min_tokens": r"integer in 0\.\.2\*\*31 - 1|at most max_tokens, 64",
    "stop": r"texts, none of them empty",
    "include_stop_str_in_output": r"True or False",
    "stop_token_ids": r"token ids >= 0",
    "n": r"integer in 1\.\.16384",
    "logprobs": r"None.*0\.\.20",
    "logprob_token_ids": r"list of one or more token ids >= 0, or None|None where logprobs is not given",
    "prompt_logprobs": r"None.*0\.\.20",
    "prompt_logprobs_start": r"integer in -2\*\*31 \+ 1\.\.2\*\*31 - 1|0 where prompt_logprobs is not given",
    "presence_penalty": r"-2\.\.2",
    "frequency_penalty": r"-2\.\.2",
    "repetition_penalty": r"finite.*1\.2e-38\.\.3\.4e\+38",
    "skip_special_tokens": r"True or False",
    "structured_outputs": r"StructuredOutputsParams",
    "logit_bias": r"dict of token ids >= 0 to numbers in -100\.\.100",
    "allowed_token_ids": r"list of one or more token ids >= 0, or None",
    "bad_words": r"texts, none of them empty",
    "extra_args": r"dict of names to values",
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
    [
        ("stop", 5),
        ("stop", True),
        ("stop", b"a"),
        ("bad_words", 5),
        ("stop_token_ids", 5),
        ("stop_token_ids", "5"),
        ("allowed_token_ids", 5),
        ("logit_bias", 5),
        ("logit_bias", [5]),
        ("logit_bias", "5"),
        ("extra_args", 5),
    ],
)
def test_lists_that_are_no_lists(name, value):
    with pytest.raises(ValueError, match=f"{name}=.*must be a") as error:
        SamplingParams(**{name: value})
    assert isinstance(value, str | bytes) or f"{name}={value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("max_tokens", np.float64(5), "5.0"),  # A column of integers and gaps is one of floats.
        ("max_tokens", np.float64("nan"), "nan"),
        ("n", np.bool_(True), "True"),
        ("temperature", np.float32("nan"), "nan"),
        ("temperature", np.bool_(True), "True"),
        ("ignore_eos", np.int64(1), "1"),
    ],
)
def test_a_wrong_value_of_numpy_is_named_too(name, value, shown):
    with pytest.raises(ValueError, match=f"{name}={shown}: must be"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", ["stop", "bad_words"])
def test_a_lone_surrogate_is_refused(name):
    with pytest.raises(ValueError, match=rf"{name}='a\\ud800': holds half of a surrogate pair"):
        SamplingParams(**{name: ["fine", "a\ud800"]})


@pytest.mark.parametrize("options", [{}, {"json": {}, "regex": "a"}, {"regex": "a", "choice": ["a"]}])
def test_a_form_is_exactly_one_thing(options):
    with pytest.raises(ValueError, match="exactly one of json, regex, choice and grammar"):
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
        ("choice", ["a", "\ud800"]),
        ("regex", "a\udc00"),
        ("json", '{"const": "\ud800"}'),
        ("json", {"const": "\ud800"}),
        ("json", '{"const": NaN}'),
        ("json", {"maximum": INF}),
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


def test_whitespace_belongs_to_json():
    with pytest.raises(ValueError, match="whitespace_pattern=' ': must be None where json is not given"):
        StructuredOutputsParams(regex="a", whitespace_pattern=" ")
    with pytest.raises(ValueError, match="whitespace_pattern=5: must be a regular expression"):
        StructuredOutputsParams(json={}, whitespace_pattern=5)


def test_a_pydantic_model_is_its_schema():
    pydantic = pytest.importorskip("pydantic")

    class City(pydantic.BaseModel):
        name: str

    assert StructuredOutputsParams(json=City) == StructuredOutputsParams(json=City.model_json_schema())

    class Callback(pydantic.BaseModel):
        call: type[int] | object = pydantic.Field(json_schema_extra=lambda schema: 1 / 0)

    with pytest.raises(ValueError, match=r"json=.*Callback.*has no JSON schema"):
        StructuredOutputsParams(json=Callback)


@pytest.mark.parametrize(
    ("cls", "name", "hint"),
    [
        (SamplingParams, "max_token", "did you mean 'max_tokens'"),
        (SamplingParams, "temprature", "did you mean 'temperature'"),
        (SamplingParams, "max_new_tokens", "use max_tokens"),
        (SamplingParams, "best_of", "use n"),
        (SamplingParams, "guided_decoding", "use structured_outputs"),
        (SamplingParams, "nothing_like_it", "known: temperature, max_tokens, .*extra_args$"),
        (StructuredOutputsParams, "choices", "did you mean 'choice'"),
        (StructuredOutputsParams, "json_object", 'use json={"type": "object"}'),
    ],
)
def test_an_unknown_keyword_is_refused_with_what_to_use_instead(cls, name, hint):
    with pytest.raises(TypeError, match=f"unknown option '{name}': {hint}"):
        cls(**{name: 1})
    if cls is SamplingParams:
        with pytest.raises(TypeError, match=f"unknown option '{name}': {hint}"):
            dataclasses.replace(SamplingParams(), **{name: 1})


def test_the_signature_names_every_field():
    for cls in (SamplingParams, StructuredOutputsParams):
        assert list(inspect.signature(cls).parameters) == [field.name for field in dataclasses.fields(cls)]


def test_hints_for_the_engine_name_real_options():
    known = ["max_model_len", "kvcache_gib"]
    assert str(unknown_option("kv_cache_memory_bytes", known, HINTS["Config"])).endswith("use kvcache_gib")
    assert str(unknown_option("calculate_kv_scales", known, HINTS["Config"])).endswith("'calibrated'")
    assert str(unknown_option("max_model_length", known, HINTS["Config"])).endswith("did you mean 'max_model_len'?")
    assert str(unknown_option("x", known, HINTS["Config"])).endswith("known: max_model_len, kvcache_gib")


def test_one_object_can_serve_many_requests():
    params = SamplingParams(max_tokens=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.max_tokens = 6
    with pytest.raises((AttributeError, TypeError)):
        params.top_q = 1
    assert params == SamplingParams(max_tokens=5)
    assert len({params, SamplingParams(max_tokens=5)}) == 1


def test_copies_are_equal():
    form = StructuredOutputsParams(json={"type": "object"}, whitespace_pattern=" ?")
    params = SamplingParams(
        0.5, logit_bias={"5": -1}, allowed_token_ids=[5, 6], bad_words="no", stop="x", structured_outputs=form
    )
    for other in (pickle.loads(pickle.dumps(params)), copy.deepcopy(params), dataclasses.replace(params)):
        assert other == params
        assert hash(other) == hash(params)


def test_a_changed_copy_is_checked_too():
    params = SamplingParams(max_tokens=5, seed=1)
    assert dataclasses.replace(params, max_tokens=6) == SamplingParams(max_tokens=6, seed=1)
    with pytest.raises(ValueError, match="max_tokens=0"):
        dataclasses.replace(params, max_tokens=0)
