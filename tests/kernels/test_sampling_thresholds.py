"""The thresholds kernels against the definitions of top-k, top-p and min-p, by sorting."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

from kernel_harness import nightly  # noqa: E402

from nanovllm.kernels.sampling import sampling_thresholds as kernels  # noqa: E402
from nanovllm.kernels.sampling.sampling_thresholds import sampling_thresholds  # noqa: E402

INF = float("inf")
# Small enough for short rows to have several candidates a lane, and more of them than there is room for.
CONFIGS = {
    "default": {},
    "whole rows": {"LANES": 32, "CAPACITY": 32, "BLOCK": 64},
    "some candidates": {"LANES": 128, "CAPACITY": 256, "BLOCK": 64},
}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS, indirect=True)


@pytest.fixture
def config(request, monkeypatch):
    for name, value in request.param.items():
        monkeypatch.setattr(kernels, name, value)


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


def assert_right(logits, rows):
    """Twin and kernel keep what the definition keeps, give or take tokens within rounding of a border. Returns the
    kernel's thresholds."""
    for function in (sampling_thresholds.twin, sampling_thresholds.kernel):
        thresholds = function(logits, *arguments(rows, logits.device))
        assert thresholds.dtype == torch.float32
        assert thresholds.shape == (len(rows),)
        assert_kept(thresholds, logits, rows)
    return thresholds


def assert_kept(thresholds, logits, rows):
    for i, row in enumerate(rows):
        x = logits[i].float().nan_to_num(nan=-INF, posinf=INF, neginf=-INF)
        got = x >= thresholds[i]
        at_least = kept_by_definition(logits[i], *row, slack=-3e-6)
        at_most = kept_by_definition(logits[i], *row, slack=3e-6)
        at_least = at_least & (x > -INF)  # a threshold may or may not drop what is never drawn
        assert not (at_least & ~got).any(), (i, row, "drops too much")
        assert not (got & ~at_most & (x > -INF)).any(), (i, row, "keeps too much")


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


@pytest.mark.parametrize(
    ("config", "dtype", "vocab_size"),
    [
        (CONFIGS["default"], torch.float32, 611),
        (CONFIGS["whole rows"], torch.float32, 211),
        (CONFIGS["some candidates"], torch.float32, 347),
        (CONFIGS["default"], torch.bfloat16, 700),
        *nightly((CONFIGS["default"], torch.float16, 513)),
    ],
    ids=str,
    indirect=["config"],
)
def test_definitions(dtype, vocab_size, config, device):
    torch.manual_seed(vocab_size)
    rows = ROWS if vocab_size > 400 else ROWS[::2] + ROWS[3:4]
    logits = torch.randn(len(rows), vocab_size, device=device) * 3
    logits[0], logits[-2] = logits[0] * 0.01, logits[-2] * 0.01
    thresholds = assert_right(logits.to(dtype), rows)
    assert thresholds[[row[0] == 0 or row[1:] == (0, 1.0, 0.0) for row in rows]].tolist() == [-INF] * 2


@every_config
def test_flat_logits(config, device):
    """Nothing sets a token apart, so no bound spares a pass."""
    logits = (torch.randn(3, 900, device=device) * 0.02).to(torch.bfloat16)
    assert_right(logits, [(1.0, 0, 0.95, 0.0), (0.6, 400, 0.95, 0.0), (1.0, 890, 1.0, 0.0)])


@every_config
def test_ties_stay_together(config, device):
    logits = torch.randint(-3, 3, (4, 400), device=device).bfloat16()
    logits[3] = -0.0
    logits[3, ::2] = 0.0
    rows = [(1.0, 5, 1.0, 0.0), (1.0, 0, 0.3, 0.0), (2.0, 200, 0.99, 0.0), (1.0, 3, 0.5, 0.9)]
    assert_right(logits, rows)
    for i, kept in enumerate(logits >= sampling_thresholds.kernel(logits, *arguments(rows, device)).unsqueeze(1)):
        assert set(logits[i][kept].tolist()).isdisjoint(logits[i][~kept].tolist())
    assert kept.all()


@pytest.mark.parametrize(
    ("config", "k", "p", "min_p"),
    [
        (CONFIGS["default"], 4, 1.0, 0.0),
        (CONFIGS["some candidates"], 0, 0.9, 0.0),
        (CONFIGS["whole rows"], 300, 0.9, 0.1),
        (CONFIGS["default"], 0, 1.0, 0.1),
        *nightly(*((config, *each) for config in CONFIGS.values() for each in [(4, 1.0, 0.0), (0, 0.9, 0.0)])),
        *nightly(*((config, *each) for config in CONFIGS.values() for each in [(0, 1.0, 0.1), (300, 0.9, 0.1)])),
    ],
    ids=str,
    indirect=["config"],
)
def test_masked_and_undefined_logits(config, k, p, min_p, device):
    logits = torch.randn(7, 500, device=device).to(torch.bfloat16)
    logits[0] = -INF
    logits[1] = float("nan")
    logits[2, 3:] = -INF
    logits[3, :450] = float("nan")
    logits[4, 1::2] = -INF
    logits[4, ::4] = float("nan")
    logits[5, 7] = logits[5, 490] = INF
    logits[6] = torch.finfo(torch.bfloat16).min
    thresholds = assert_right(logits[:5], [(0.7, k, p, min_p)] * 5)
    assert thresholds[0] == thresholds[1] == -INF
    assert not thresholds.isnan().any()
    thresholds = sampling_thresholds.kernel(logits[5:], *arguments([(0.7, k, p, min_p)] * 2, device))
    assert INF >= thresholds[0] > -INF
    assert logits[6, 0] >= thresholds[1]


@pytest.mark.parametrize("vocab_size", [1, 2, 31])
def test_tiny_vocabularies(vocab_size, device):
    rows = ROWS[:2] + ROWS[5:8]
    assert_right(torch.randn(len(rows), vocab_size, device=device), rows)


@settings(max_examples=8)
@given(data=st.data())
def test_any_rows_keep_what_the_definition_keeps(device, data):
    vocab_size = data.draw(st.integers(1, 400), "vocab_size")
    row = st.tuples(
        st.sampled_from([0.0, 1e-3, 0.3, 0.6, 1.0, 5.0, 1e6]),
        st.one_of(st.just(0), st.integers(1, 450)),
        st.one_of(st.just(1.0), st.floats(0.0, 1.0, width=32)),
        st.one_of(st.just(0.0), st.floats(0.0, 1.0, width=32, allow_subnormal=False)),
    )
    rows = data.draw(st.lists(row, min_size=1, max_size=4), "rows")
    torch.manual_seed(data.draw(st.integers(0, 2**16), "seed"))
    logits = torch.randn(len(rows), vocab_size, device=device)
    logits *= data.draw(st.sampled_from([0.0, 0.02, 3.0, 100.0]), "spread")
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), "dtype")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in data.draw(st.sampled_from(list(CONFIGS.values())), "config").items():
            patch.setattr(kernels, name, value)
        assert_right(logits.to(dtype), rows)


def test_rows_of_a_wider_tensor(device):
    wide = torch.randn(4, 777, device=device).to(torch.bfloat16)
    given_arguments = arguments([(0.8, 9, 0.9, 0.0), (0.8, 0, 0.9, 0.0)] * 2, device)
    alone = sampling_thresholds.kernel(wide[:, 5:705].clone(), *given_arguments)
    assert torch.equal(sampling_thresholds.kernel(wide[:, 5:705], *given_arguments), alone)
    # Nothing is left behind in a row by those before it, and no row looks at another.
    backwards = [argument.flip(0) for argument in given_arguments]
    assert torch.equal(sampling_thresholds.kernel(wide[:, 5:705].flip(0), *backwards).flip(0), alone)


def test_a_batch_without_rows_has_no_thresholds(device):
    assert sampling_thresholds.kernel(
        torch.zeros(0, 5, device=device), *(torch.zeros(0, device=device),) * 4
    ).shape == (0,)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 9, 64, 65, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spread", [3.0, 0.02])
def test_real_vocabulary(batch, dtype, spread):
    logits = (torch.randn(batch, 151_936, device="cuda") * spread).to(dtype)
    rows = [((0.6, 20, 0.95, 0.0), (1.0, 0, 0.95, 0.0), *ROWS, (1.0, 5000, 0.9, 0.0))[i % 19] for i in range(batch)]
    thresholds = sampling_thresholds.kernel(logits, *arguments(rows, "cuda"))
    for _ in range(5):
        assert torch.equal(sampling_thresholds.kernel(logits, *arguments(rows, "cuda")), thresholds)
    checked = range(0, batch, max(1, batch // 20))
    assert_right(logits[list(checked)], [rows[i] for i in checked])
    assert_right(logits[:40], rows[:40])


@pytest.mark.gpu
def test_captured_in_a_cuda_graph():
    logits = torch.randn(len(ROWS), 151_936, device="cuda", dtype=torch.bfloat16) * 3
    given_arguments = arguments(ROWS, "cuda")
    sampling_thresholds.kernel(logits, *given_arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        thresholds = sampling_thresholds.kernel(logits, *given_arguments)
    for _ in range(3):
        logits.normal_(std=2.0)
        given_arguments[1].copy_(given_arguments[1].roll(1))
        graph.replay()
        assert torch.equal(thresholds, sampling_thresholds.kernel(logits, *given_arguments))
