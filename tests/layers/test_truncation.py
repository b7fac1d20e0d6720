"""Truncation against transformers' own logits processors, on the same logits."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from nanovllm.kernels.sampling.sampling_thresholds import sampling_thresholds

INF = math.inf
SETTINGS = st.tuples(
    st.floats(0.05, 4.0),
    st.sampled_from([0, 0, 1, 2, 5, 20, 64, 10**6, 2**31 - 1]),
    st.one_of(st.just(1.0), st.floats(1e-3, 1.0)),
    st.one_of(st.just(0.0), st.floats(1e-4, 1.0)),
)


def thresholds(logits, *rows) -> torch.Tensor:
    """rows: (temperature, top_k, top_p, min_p), one for each row of the logits."""
    temperatures, top_k, top_p, min_p = zip(*rows, strict=True)
    tensors = torch.tensor(temperatures), torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p)
    return sampling_thresholds(logits, *tensors, torch.tensor(min_p))


def warpers(temperature, top_k, top_p, min_p) -> list:
    """What transformers' generate makes of these options, in its order."""
    chain = [TemperatureLogitsWarper(temperature)]
    if top_k > 0:
        chain.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        chain.append(TopPLogitsWarper(top_p))
    if min_p > 0:
        chain.append(MinPLogitsWarper(min_p))
    return chain


def kept_by_transformers(logits, temperature, top_k, top_p, min_p) -> torch.Tensor:
    """bool [vocab_size]. In float64, so that rounding decides no case here."""
    scores = logits.double().unsqueeze(0)
    for warper in warpers(temperature, top_k, top_p, min_p):
        scores = warper(None, scores)
    return scores[0] > -INF


def is_near_a_boundary(logits, temperature, top_k, top_p, min_p) -> bool:
    """Whether a token's place depends on rounding: settings that differ in the sixth digit keep another set."""
    kept = kept_by_transformers(logits, temperature, top_k, top_p, min_p)
    near = [
        (min(top_p * (1 + sign * 1e-5), 1.0) if top_p < 1 else 1.0, min(min_p * (1 + sign * 1e-5), 1.0))
        for sign in (-1, 1)
    ]
    return any(not torch.equal(kept, kept_by_transformers(logits, temperature, top_k, p, m)) for p, m in near)


@given(st.integers(0, 2**31), st.integers(1, 90), st.lists(SETTINGS, min_size=1, max_size=5))
@settings(max_examples=150)
def test_keeps_what_transformers_keeps(seed, vocab_size, rows):
    generator = torch.Generator().manual_seed(seed)
    # Distinct to well beyond rounding, also once divided by the temperature.
    steps = torch.rand(len(rows), vocab_size, generator=generator) * 0.2 + 0.01
    order = torch.rand(len(rows), vocab_size, generator=generator).argsort(dim=1)
    logits = steps.cumsum(dim=1).gather(1, order) - 5
    cuts = thresholds(logits, *rows)
    assert cuts.dtype == torch.float32
    for i, row in enumerate(rows):
        if not is_near_a_boundary(logits[i], *row):
            assert torch.equal(logits[i] >= cuts[i], kept_by_transformers(logits[i], *row))


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(6, 500)
    rows = [(0.6, 20, 0.95, 0.0), (0.0, 5, 0.5, 0.5), (1.0, 0, 1.0, 0.0), (2.0, 0, 0.9, 0.0), (1.0, 7, 1.0, 0.1)]
    rows.append((0.6, 20, 0.95, 0.0))
    together = thresholds(logits, *rows)
    alone = [thresholds(logits[i : i + 1], row) for i, row in enumerate(rows)]
    assert torch.equal(together, torch.cat(alone))
    assert together[1:3].tolist() == [-INF, -INF]


def test_a_batch_without_rows_has_no_thresholds():
    empty = torch.zeros(0)
    assert sampling_thresholds.twin(torch.zeros(0, 7), empty, empty.int(), empty, empty).shape == (0,)
