"""Values that are huge, deep, or odd in another way: an error that names the option and stays short."""

import dataclasses

import numpy as np
import pytest
import torch
from checkpoints import assert_idle, greedy

from nanovllm import SamplingParams, StructuredOutputsParams
from nanovllm.config import Config
from nanovllm.sampling_params import FORMS
from nanovllm.utils.checks import quoted


def nested(depth: int, make):
    value = make(None)
    for _ in range(depth):
        value = make(value)
    return value


MANY = 100_000
DEEP_DICT = nested(5000, lambda inner: {"a": inner})
DEEP_LIST = nested(5000, lambda inner: [inner])
ODD = {
    "huge-integer": 10**5000,
    "negative-huge-integer": -(10**5000),
    "list-of-huge-integers": [10**5000],
    "dict-of-huge-integers": {10**5000: 10**5000},
    "text-of-digits": {"9" * 5000: 1},
    "array-without-dimension": np.array(5),
    "array-of-None": np.array(None),
    "array-of-one-text": np.array("a"),
    "empty-array": np.array([]),
    "array-of-two-dimensions": np.array([[1, 2], [3, 4]]),
    "tensor-without-dimension": torch.tensor(5),
    "tensor": torch.tensor([[1, 2]]),
    "lone-surrogate": "\ud800",
    "list-of-lone-surrogates": ["a", "\ud800"],
    "deep-dict": DEEP_DICT,
    "deep-list": DEEP_LIST,
    "list-of-deep-dicts": [DEEP_DICT],
    "long-text": "x" * 10**6,
    "long-list-of-texts": ["x"] * MANY + [5],
    "long-list-of-integers": list(range(-1, MANY)),
    "long-dict": dict.fromkeys(range(MANY), 1e9),
    "long-range": range(10**5000, 10**5000 + 2),
    "long-bytes": b"x" * 10**6,
    "NUL": "a\0b",
}
CONFIG = {"model": "Qwen3-0.6B", "load_format": "dummy", "device": "cpu", "skip_tokenizer_init": True}
OPTIONS = [
    *[(SamplingParams, {}, field.name) for field in dataclasses.fields(SamplingParams)],
    *[(StructuredOutputsParams, {}, name) for name in FORMS],
    (StructuredOutputsParams, {"json": "{}"}, "whitespace_pattern"),
    *[(Config, CONFIG, field.name) for field in dataclasses.fields(Config) if field.name != "hf_config"],
]


@pytest.mark.parametrize(("cls", "others", "name"), OPTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_every_odd_value_of_an_option_is_accepted_or_named(cls, others, name):
    messages = []
    for value in ODD.values():
        try:
            cls(**others | {name: value})
        except (ValueError, FileNotFoundError) as error:
            messages.append(str(error))
    assert [message for message in messages if not message.startswith(f"{name}=")] == []
    assert max(map(len, map(str.encode, messages)), default=0) < 1500


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("stop", ["x"] * MANY + [5], f"entry {MANY} is 5"),
        ("stop_token_ids", [*range(MANY), -7], f"entry {MANY} is -7"),
        ("logit_bias", dict.fromkeys(range(50), 1) | {50: 500}, r"entry 50 is \(50, 500\.0\)"),
        ("allowed_token_ids", [1, 2, True], "entry 2 is True"),
    ],
)
def test_the_wrong_entry_of_a_long_collection_is_named(name, value, found):
    with pytest.raises(ValueError, match=f"^{name}=.*; {found}$"):
        SamplingParams(**{name: value})


def test_short_values_are_quoted_as_they_are():
    for value in (5, -1, None, True, 1.5, "a", "\n", b"a", (1, "a"), [], {}, {"a": [1]}, {1, 2}, range(3), 10**300):
        assert quoted(value) == repr(value)


def test_long_texts_say_how_long_they_are():
    assert quoted("ab" * 5000) == repr("ab" * 50) + "... (10000 characters)"


def test_a_token_id_of_thousands_of_digits(llm):
    with pytest.raises(ValueError, match=r"prompts\[0\]: token id an integer of 16610 bits is outside the vocabulary"):
        llm.generate([[10**5000]], greedy(1), use_tqdm=False)
    with pytest.raises(ValueError, match="request_id=an integer of 16610 bits"):
        llm.abort_request(10**5000)


def test_an_array_that_holds_one_text_is_one_prompt(llm):
    outputs = llm.generate(np.array("a text"), greedy(2), use_tqdm=False)
    assert outputs[0]["token_ids"] == llm.generate("a text", greedy(2), use_tqdm=False)[0]["token_ids"]
    assert len(outputs) == 1


@pytest.mark.parametrize("method", ["generate", "stream", "generate_iter", "add_request", "score"])
def test_an_option_of_sampling_params_is_sent_where_it_belongs(llm, method):
    arguments = ["a", "b"] if method == "score" else ["a"]
    with pytest.raises(TypeError, match=r"'temperature': pass sampling_params=SamplingParams\(temperature=0\)"):
        getattr(llm, method)(*arguments, temperature=0)
    with pytest.raises(TypeError, match="'prompt_token_ids': lists of token ids are prompts too"):
        getattr(llm, method)(prompt_token_ids=[[1]])
    with pytest.raises(TypeError, match=r"'use_tqm': (did you mean 'use_tqdm'|known: )"):
        getattr(llm, method)(*arguments, use_tqm=False)
    assert_idle(llm)
