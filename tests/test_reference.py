"""docs/reference.md names every option, method and result key, with its default, and no other."""

import inspect
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from nanovllm import (
    LLM,
    ChatDelta,
    ClassOutput,
    EmbeddingOutput,
    EngineStats,
    ErrorOutput,
    PoolingParams,
    RankOutput,
    RequestOutput,
    SamplingParams,
    StreamDelta,
    StructuredOutputsParams,
)
from nanovllm.config import Config

PAGE = (Path(__file__).parents[1] / "docs" / "reference.md").read_text()


def rows(after: str) -> list[list[str]]:
    """Cells of the first table after this text, without its head."""
    table = re.search(r"\n\|.*?(?=\n\n|\Z)", PAGE[PAGE.index(after) :], re.DOTALL).group().strip().split("\n")
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)", cell)


@pytest.mark.parametrize(
    ("after", "cls"),
    [
        ("## Options of", Config),
        ("## `SamplingParams`", SamplingParams),
        ("## `PoolingParams`", PoolingParams),
        ("`StructuredOutputsParams` takes exactly", StructuredOutputsParams),
    ],
)
def test_options_and_their_defaults(after, cls):
    documented = {names(option)[0]: default.strip("`").replace('"', "'") for option, default, _ in rows(after)}
    assert documented == {f.name: "" if f.default is MISSING else repr(f.default) for f in fields(cls)}


def test_the_values_of_an_option_are_documented():
    meanings = {names(option)[0]: meaning for option, _, meaning in rows("## Options of")}
    for option in fields(Config):
        for value in option.metadata.get("choices", ()):
            assert f'"{value}"' in meanings[option.name] or value in names(meanings[option.name]), (option.name, value)


def test_every_engine_option_has_a_help_text():
    assert all(option.metadata["help"] for option in fields(Config))


def test_help_of_llm_has_the_options():
    """Editors and help() take them from the signature."""
    assert inspect.signature(LLM).parameters == inspect.signature(Config).parameters


@pytest.mark.parametrize(
    ("after", "cls"),
    [
        ("`RequestOutput`, from", RequestOutput),
        ("`StreamDelta`, from", StreamDelta),
        ("`EngineStats`, from", EngineStats),
    ],
)
def test_result_keys(after, cls):
    assert sorted(name for key, _ in rows(after) for name in names(key)) == sorted(cls.__annotations__)


def test_keys_that_other_results_have():
    added = ChatDelta.__annotations__.keys() - StreamDelta.__annotations__.keys()
    assert sorted(name for key, _ in rows("`ChatDelta`, from") for name in names(key)) == sorted(added)
    counts = {name for key, _ in rows("`EmbeddingOutput`, from") for name in names(key)}
    assert counts == EmbeddingOutput.__annotations__.keys()
    for cls in (ClassOutput, RankOutput):
        own = {name for key, _ in rows(f"`{cls.__name__}`, from") for name in names(key)}
        assert own == cls.__annotations__.keys() - counts
    assert ErrorOutput.__annotations__.keys() == RequestOutput.__required_keys__ | {"error"}


def test_methods_and_their_parameters():
    documented = {}
    for cell, _ in rows("## Methods"):
        name, parameters = re.match(r"`(\w+)\((.*)\)`", cell).groups()
        documented[name] = parameters.replace('"', "'")
    public = {name for name, _ in inspect.getmembers(LLM, inspect.isfunction) if not name.startswith("_")}
    assert set(documented) == public
    for name, parameters in documented.items():
        signature = list(inspect.signature(getattr(LLM, name)).parameters.values())[1:]
        assert parameters == ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in signature)
