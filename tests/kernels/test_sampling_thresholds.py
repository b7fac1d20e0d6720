"""The thresholds kernels against the definitions of top-k, top-p and min-p, by sorting."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

from nanovllm.kernels.sampling_thresholds import (  # noqa: E402
    ThresholdConfig,
    default_config,
    sampling_thresholds,
)

INF = float("inf")
# Small enough for short rows to have many tiles, splits and passes, and more candidates than fit.
SMALL = ThresholdConfig(
    tile=16, tiles_at_once=4, narrow_columns=64, narrow_pivots=4, settle_columns=128, capacity=32, narrow_rounds=0
)
CONFIGS = {
    "default": None,
    "a program a row": SMALL,
    "spread": SMALL._replace(narrow_rounds=8),
    "spread, then a program a row": SMALL._replace(narrow_rounds=2),
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def arguments(rows, device="cpu"):
    """temperatures, top_k, top_p and min_p of [(temperature, k, p, min_p)]."""
    temperatures, ks, ps, min_ps = zip(*rows, strict=True)
    return (
        torch.tensor(temperatures, dtype=torch.float32, device=device),
        torch.tensor(ks, dtype=torch.int32, device=device),
        torch.tensor(ps, dtype=torch.float32, device=device),
        torch.tensor(min_ps, dtype=torch.float32, device=device),
    )


def kept_by_definition(logits, temperature, k, p, min_p, slack=0.0):
    """The tokens of one row that stay, with `slack` (either sign) for the mass and the floor, in float64."""
    if temperature == 0:
        return torch.ones_like(logits, dtype=torch.bool)
    x = logits.double().nan_to_num(nan=-INF, posinf=INF, neginf=-INF)
    kept = torch.ones_like(x, dtype=torch.bool)
    if x.max() == -INF:
        return kept
    if 0 < k < len(x):
        kept = x >= x.topk(k).values[-1]
    scaled = (x - x.max()) / temperature
    order = x.argsort(descending=True)
    if p < 1:
        mass = torch.where(kept, scaled.exp(), 0.0)[order]
        upto = mass.cumsum(0) / mass.sum()
        ranked = x[order]
        # The first of equals has above it just what is strictly higher.
        first = torch.searchsorted(-ranked, -ranked, right=False)
        higher = torch.where(first > 0, upto[(first - 1).clamp(min=0)], 0.0)
        stays = (higher < p + slack) | (ranked == ranked[0])
        kept = kept & torch.zeros_like(kept).scatter(0, order, stays)
    if min_p > 0:
        kept = kept & ((scaled >= torch.tensor(min(min_p, 1.0)).double().log() - slack * 10) | (scaled == 0))
    return kept


def assert_right(logits, rows, config=None):
    """Keeps what the definition keeps, give or take tokens within rounding of a border."""
    thresholds = sampling_thresholds(logits, *arguments(rows, logits.device), config)
    assert thresholds.dtype == torch.float32
    assert thresholds.shape == (len(rows),)
    for i, row in enumerate(rows):
        x = logits[i].float().nan_to_num(nan=-INF, posinf=INF, neginf=-INF)
        got = x >= thresholds[i]
        at_least = kept_by_definition(logits[i], *row, slack=-3e-6)
        at_most = kept_by_definition(logits[i], *row, slack=3e-6)
        at_least = at_least & (x > -INF)  # a threshold may or may not drop what is never drawn
        assert not (at_least & ~got).any(), (i, row, "drops too much")
        assert not (got & ~at_most & (x > -INF)).any(), (i, row, "keeps too much")
    return thresholds


ROWS = [
    (0.6, 20, 0.95, 0.0),
    (1.0, 0, 0.95, 0.0),
    (0.0, 20, 0.5, 0.5),
    (1.0, 0, 1.0, 0.0),
    (1.3, 7, 1.0, 0.0),
    (0.9, 0, 1.0, 0.05),
    (0.7, 150, 0.8, 0.01),
    (1e-5, 5, 0.9, 0.0),
    (1e4, 0, 0.9, 0.0),
    (1e4, 12, 0.5, 0.0),
    (0.8, 0, 1e-6, 0.0),
    (0.8, 0, 0.0, 0.0),
    (0.8, 1, 1.0, 0.0),
    (0.8, 0, 1.0, 1.0),
    (0.8, 10**6, 0.999, 0.0),
    (2.0, 0, 0.7, 0.2),
]


@every_config
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("vocab_size", "spread"), [(1000, 3.0), (1283, 0.02)])
def test_definitions(vocab_size, spread, dtype, config, device):
    torch.manual_seed(vocab_size)
    logits = (torch.randn(len(ROWS), vocab_size, device=device) * spread).to(dtype)
    thresholds = assert_right(logits, ROWS, config)
    assert thresholds[2] == thresholds[3] == -INF
