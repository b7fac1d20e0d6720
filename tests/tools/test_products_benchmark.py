"""The benchmark of 4-bit products compares all candidates on the same numbers."""

from pathlib import Path

import pytest
import torch

from nanovllm.layers.formats.int4 import Int4
from nanovllm.layers.matmul.candidates.dequantized import Dequantized


@pytest.fixture
def products_4bit(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import products_4bit

    monkeypatch.setattr(products_4bit, "WEIGHT_BYTES", 1)
    return products_4bit


@pytest.mark.parametrize(("operation", "experts"), [("linear_add", 1), ("experts", 4)])
def test_timed_launches_do_not_change_what_the_next_candidate_adds_to(operation, experts, products_4bit):
    cpu = torch.device("cpu")
    product = products_4bit.Product(operation, 64, 64, experts, top_k=min(experts, 2))
    weights = products_4bit.make_weights(product, Int4(), cpu)
    case = products_4bit.make_case(product, weights, 3, cpu)
    before = case.result(Dequantized(), ())
    for launch in case.launches(Dequantized(), ()):
        launch()
    torch.testing.assert_close(case.result(Dequantized(), ()), before, atol=0, rtol=0)
