"""SamplingParams: what a request may ask for, and how a wrong wish is refused."""

import dataclasses
import math

import pytest

from nanovllm.sampling_params import SamplingParams

NAN, INF = math.nan, math.inf


def test_defaults():
    params = SamplingParams()
    assert (params.temperature, params.max_tokens, params.ignore_eos, params.seed) == (1.0, 64, False, None)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 1e-6},
        {"temperature": 100},
        {"max_tokens": 1},
        {"max_tokens": 10**9},
        {"ignore_eos": True},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"seed": None},
    ],
    ids=str,
)
def test_right_values_are_kept(options):
    params = SamplingParams(**options)
    for name, value in options.items():
        assert getattr(params, name) == value


WRONG = {
    "temperature": [-1e-9, -1, NAN, INF, -INF, 10**400, "0.5", None, True, False, [0.5], 1j],
    "max_tokens": [0, -1, 1.0, 16.5, "16", None, True, NAN, INF, [16]],
    "ignore_eos": [0, 1, None, "yes", "False", 1.0],
    "seed": [-1, 2**63, 2**64, 1.0, "1", True, False, NAN, [1]],
}
ALLOWED = {
    "temperature": r"finite.*>= 0",
    "max_tokens": r"integer.*>= 1",
    "ignore_eos": r"True or False",
    "seed": r"None.*integer.*0.*2\*\*63 - 1",
}


def test_the_table_of_wrong_values_covers_every_field():
    assert {field.name for field in dataclasses.fields(SamplingParams)} == set(WRONG) == set(ALLOWED)


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, value, id=f"{name}-{value!r:.20}") for name, values in WRONG.items() for value in values],
)
def test_a_wrong_value_is_refused_with_its_field_itself_and_what_is_allowed(name, value):
    with pytest.raises(ValueError, match=ALLOWED[name]) as error:
        SamplingParams(**{name: value})
    assert f"{name}={value!r}" in str(error.value)


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
