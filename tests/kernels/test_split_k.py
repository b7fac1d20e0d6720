"""The linear kernels of decode batches against their plain-torch twins."""

from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from linear_inputs import linear_add_torch, linear_silu_torch, linear_torch, make_linear, make_rows
from linear_inputs import split_k_linear as linear
from linear_inputs import split_k_linear_add as linear_add
from linear_inputs import split_k_linear_silu as linear_silu

from nanovllm.kernels.dependent_launch import has_pdl
from nanovllm.kernels.matmul.split_k import (
    MAX_ROWS,
    MAX_TOKENS,
    TILE_TOKENS,
    SplitKConfig,
    make_arrivals,
    split_k,
)
from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.matmul.table import package_table

# Of results of order one; the activation's factors may come to lie one rounding apart.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
FLOAT16 = torch.float16
# Triton's interpreter multiplies bfloat16 wrongly.
BFLOAT16 = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def some_config(tile_rows=32, tile_k=128, splits=1, num_stages=6, prefetch=1024) -> SplitKConfig:
    return SplitKConfig(tile_rows, tile_k, splits, num_stages, prefetch)


# A GPU takes a second or more to compile each: M, N, K, dtype, config.
CASES = [
    (17, 48, 96, FLOAT16, some_config(num_stages=4, prefetch=0)),
    (33, 304, 1024, BFLOAT16, some_config(splits=2)),
    (64, 80, 1040, FLOAT16, some_config(splits=2)),
    (64, 80, 1040, FLOAT16, some_config(num_stages=4, prefetch=0)),
    (1, 2, 3, FLOAT16, some_config(num_stages=4, prefetch=0)),
    (33, 50, 210, BFLOAT16, some_config(32, 64)),
    (40, 64, 384, FLOAT16, some_config(64, 128, splits=2, num_stages=3, prefetch=128)),
    (50, 112, 256, BFLOAT16, some_config(16, 64, splits=4, num_stages=4, prefetch=0)),
    # Two tiles of tokens, with splits and without.
    (128, 80, 256, BFLOAT16, some_config(num_stages=4, prefetch=0)),
    (65, 48, 256, FLOAT16, some_config(16, 64, splits=2)),
    # The last two splits have nothing to add up.
    (20, 33, 112, FLOAT16, some_config(16, 64, splits=4)),
]
CONFIG = some_config()
cases = pytest.mark.parametrize(("M", "N", "K", "dtype", "config"), CASES)


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """New tensors hold NaN: an output that is not written can't pass for one that lay in the same memory before."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))


def make_inputs(M: int, N: int, K: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """x, residual, weight, bias, and a weight of N gates and N ups."""
    x, residual = make_rows(M, K, dtype, device), make_rows(M, N, dtype, device)
    return x, residual, *make_linear(N, K, dtype, device), make_linear(2 * N, K, dtype, device)[0]


def run(functions, inputs, biased: bool = True, **options) -> tuple[torch.Tensor, ...]:
    """The three functions' results; the residual a strided copy."""
    linear, linear_silu, linear_add = functions
    x, residual, weight, bias, gate_up_weight = inputs
    bias = bias if biased else None
    residual = residual._base.clone()[:, 8 : 8 + len(weight)]
    assert linear_add(x, weight, residual, bias, **options) is residual
    return linear(x, weight, bias, **options), linear_silu(x, gate_up_weight, **options), residual


KERNELS = linear, linear_silu, linear_add
TWINS = linear_torch, linear_silu_torch, linear_add_torch


def check_all(M, N, K, dtype, device, **options):
    """The functions against their twins; what lies between the residual's rows stays."""
    inputs = make_inputs(M, N, K, dtype, device)
    biased = N % 3 > 0
    actual = run(KERNELS, inputs, biased, **options)
    for result, expected in zip(actual, run(TWINS, inputs, biased), strict=True):
        torch.testing.assert_close(result, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert actual[2]._base.isnan().sum() == M * 24


@cases
def test_kernels_equal_twins(M, N, K, dtype, config, device):
    check_all(M, N, K, dtype, device, config=config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would compile each example")
@settings(max_examples=10)
@given(
    M=st.integers(1, MAX_TOKENS),
    N=st.integers(1, 5).map(lambda n: 16 * n),
    K=st.integers(1, 24).map(lambda n: 16 * n),
    config=st.builds(
        some_config,
        tile_rows=st.sampled_from([16, 32, 64]),
        tile_k=st.sampled_from([16, 64, 128]),
        splits=st.sampled_from([1, 2, 4]),
    ),
)
def test_any_shape_and_config(M, N, K, config):
    check_all(M, N, K, FLOAT16, "cpu", config=config)


@pytest.mark.parametrize("M", [40, 100])
@pytest.mark.parametrize("splits", [1, 4])
def test_rows_are_independent_and_calls_equal(splits, M, device):
    options = {"config": some_config(16, 64, splits), "arrivals": make_arrivals(device)}
    inputs = make_inputs(M, 48, 256, BFLOAT16, device)
    before, again = run(KERNELS, inputs, **options), run(KERNELS, inputs, **options)
    others = [row for row in range(M) if row != M // 2]
    for rows in inputs[:2]:
        rows[others] = float("nan")
    for first, same, poisoned in zip(before, again, run(KERNELS, inputs, **options), strict=True):
        assert torch.equal(first, same)
        assert torch.equal(first[M // 2], poisoned[M // 2])
        assert poisoned[others].isnan().all()
    assert not options["arrivals"].any()


def test_every_config_is_launchable():
    cases = [(MAX_ROWS, some_config(tile_rows=16))]
    tables = map(package_table, ("NVIDIA H200", "NVIDIA H100 80GB HBM3"))
    for key, row in chain.from_iterable(table.rows.items() for table in tables):
        if key.format.startswith("float8"):  # Their tiles without counters are not split.
            continue
        choices = set().union(*row.choices)
        cases += [(key.N, SplitKConfig(*constants)) for name, constants in choices if name == "split-k"]
    assert len(cases) > 15
    for N, config in cases:
        assert all(value & (value - 1) == 0 for value in config[:3])
        assert min(config[:2]) >= 16
        assert 2 * config.num_stages * config.tile_k * (config.tile_tokens + config.tile_rows) <= 227 * 1024
        assert -(-N // config.tile_rows) * (MAX_TOKENS // TILE_TOKENS) <= len(make_arrivals())


def test_a_result_goes_where_it_is_wanted(device):
    x, _, weight, bias, _ = make_inputs(20, 48, 96, FLOAT16, device)
    out = make_rows(20, 48, FLOAT16, device)
    assert linear(x, weight, bias, out, config=CONFIG) is out
    assert torch.equal(out, linear(x, weight, bias, config=CONFIG))
    assert out._base.isnan().sum() == 20 * 24


def test_wrong_arguments_are_refused(device):
    x, weight, residual = (torch.zeros(*shape, device=device).half() for shape in ((2, 32), (8, 32), (2, 8)))
    for bad in (x.new_zeros(129, 32), x.new_zeros(0, 32), x[:, :16], x.new_zeros(32, 2).t(), x[0]):
        for call in (linear, linear_silu):
            with pytest.raises(ValueError, match=r"^x must be \[1\.\.128, 32\]"):
                call(bad, weight, config=CONFIG)
        with pytest.raises(ValueError, match=r"^x must be \[1\.\.128, 32\]"):
            linear_add(bad, weight, residual, config=CONFIG)
    with pytest.raises(ValueError, match=r"^x must be bfloat16 or float16"):
        linear(x.float(), weight.float(), config=CONFIG)
    for bad in (weight[0], weight[:, :16], weight[:0]):
        with pytest.raises(ValueError, match=r"^weight must be a contiguous"):
            linear(x, bad, config=CONFIG)
    with pytest.raises(ValueError, match=r"^weight_scale must be given"):
        split_k(x, weight, residual, None, CONFIG, None, x_scale=torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"^weight must have x's dtype"):
        linear_add(x, weight.bfloat16(), residual, config=CONFIG)
    with pytest.raises(ValueError, match=r"^weight must have an even number"):
        linear_silu(x, weight[:7], config=CONFIG)
    for bad in (residual[:1], residual[:, :4], residual.float(), residual.new_zeros(8, 2).t()):
        with pytest.raises(ValueError, match=r"^y must be"):
            linear_add(x, weight, bad, config=CONFIG)
        with pytest.raises(ValueError, match=r"^y must be"):
            linear(x, weight, out=bad, config=CONFIG)
    with pytest.raises(ValueError, match=r"^bias must be"):
        linear(x, weight, x[0], config=CONFIG)
    config, arrivals = some_config(16, 16, splits=2), make_arrivals(device)[:1]
    with pytest.raises(ValueError, match=r"^arrivals must hold the counters of 2 tiles, not 1"):
        linear(x, weight.new_zeros(20, 32), config=config, arrivals=arrivals)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("prefetch", [0, 256, 1024])
@pytest.mark.parametrize("M", [17, 64])
def test_dependent_launches_in_a_graph(M, prefetch, splits, device):
    """Layers in which each launch needs the last one's result and the residual is overwritten twice: with and without
    dependent launches, the same bits."""
    if not has_pdl(torch.device(device)):
        pytest.skip("no programmatic dependent launch here")
    hidden, intermediate, num_layers = 1024, 3072, 8
    dtype, config = torch.bfloat16, some_config(splits=splits, prefetch=prefetch)
    shapes = (intermediate, hidden), (hidden, intermediate), (2 * intermediate, hidden), (hidden, intermediate)
    layers = [[make_linear(*shape, dtype, device)[0] for shape in shapes] for _ in range(num_layers)]
    norm_weight = 1 + 0.1 * torch.randn(hidden, device=device, dtype=dtype)
    start = torch.randn(M, hidden, device=device, dtype=dtype)
    residual, arrivals = start.clone(), make_arrivals(device)

    def chain(pdl: bool):
        options = {"config": config, "arrivals": arrivals, "pdl": pdl}
        for first, second, gate_up, down in layers:
            y = linear(rms_norm(residual, norm_weight, 1e-6), first, **options)
            linear_add(y, second, residual, **options)
            y = linear_silu(rms_norm(residual, norm_weight, 1e-6), gate_up, **options)
            linear_add(y, down, residual, **options)

    torch.cuda.synchronize()
    chain(False)
    expected = residual.clone()
    assert expected.isfinite().all()
    assert not torch.equal(expected, start)
    residual.copy_(start)
    chain(True)
    torch.cuda.synchronize()
    assert torch.equal(residual, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        residual.copy_(start)
        chain(True)
    for _ in range(50):
        graph.replay()
        assert torch.equal(residual, expected)
    assert not arrivals.any()
