"""The code of docs/adding-a-format.md does what the page says."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_llm, random_prompt

from nanovllm.layers.formats import all_formats
from nanovllm.layers.formats.format import Weight
from nanovllm.layers.matmul.candidates.dequantized import Dequantized

GUIDE = (Path(__file__).parents[2] / "docs" / "adding-a-format.md").read_text()


@pytest.fixture
def guide(monkeypatch) -> SimpleNamespace:
    """What the page's Python defines, named where the page names it."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL):
        exec(block, names)
    guide = SimpleNamespace(**names)
    monkeypatch.setitem(all_formats.QUANTIZATIONS, "int8", guide.Int8())
    monkeypatch.setattr(all_formats, "DECLARED", (*all_formats.DECLARED, guide.Int8))  # for format_of_table
    monkeypatch.setattr(Dequantized, "formats", (*Dequantized.formats, "int8"))
    return guide


def test_rows_are_rounded_to_the_nearest_of_255_numbers(guide):
    weight = torch.cat([torch.randn(5, 33), torch.zeros(1, 33)])
    rounded = guide.Int8().quantize(weight, torch.float32)
    assert rounded.values.dtype == torch.int8
    error = (rounded.values * rounded.scale - weight).abs()
    assert (error <= rounded.scale / 2 + 1e-7).all()
    x = torch.randn(3, 33)
    torch.testing.assert_close(rounded.format.linear(x, rounded), x @ (rounded.values * rounded.scale).t())
    assert isinstance(rounded, Weight)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_a_model_in_the_format_of_the_guide(guide, tmp_path, load_format):
    path = make_checkpoint(tmp_path)
    scores = []
    for options in ({}, {"quantization": "int8"}):
        with make_llm(path, load_format=load_format, seed=0, **options) as llm:
            (score,) = llm.score([random_prompt(20, seed=1)], [random_prompt(30, seed=2)])
            scores.append(torch.tensor(score["logprobs"]))
            layer = llm.model_runner.model.model.layers[0]
            stored = layer.mlp.down_proj.weight.dtype
            assert stored == (torch.int8 if options else torch.float32)
    difference = (scores[0] - scores[1]).abs().max()
    assert 0 < difference < 0.1
