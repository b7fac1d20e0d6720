"""The linear kernels of decode batches against their plain-torch twins."""

from functools import partial
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from kernel_harness import HALF, apart, assert_refused, assert_untouched_around, hold, rounding
from linear_inputs import linear_add_torch, linear_silu_torch, linear_torch, make_linear, same_bits_in_a_graph
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

FLOAT16 = torch.float16


def some_config(tile_rows=32, tile_k=128, splits=1, num_stages=6, prefetch=1024) -> SplitKConfig:
    return SplitKConfig(tile_rows, tile_k, splits, num_stages, prefetch)


# A GPU takes a second or more to compile each: M, N, K, dtype, config.
CASES = [
    (17, 48, 96, FLOAT16, some_config(num_stages=4, prefetch=0)),
    (33, 70, 1024, HALF, some_config(splits=2)),
    (64, 40, 1040, FLOAT16, some_config(num_stages=4, prefetch=0)),
    (1, 2, 3, FLOAT16, some_config(num_stages=4, prefetch=0)),
    (33, 50, 210, HALF, some_config(32, 64)),
    (40, 64, 384, FLOAT16, some_config(64, 128, splits=2, num_stages=3, prefetch=128)),
    (50, 40, 256, HALF, some_config(16, 64, splits=4, num_stages=4, prefetch=0)),
    # Two tiles of tokens, with splits and without.
    (128, 40, 256, HALF, some_config(num_stages=4, prefetch=0)),
    (65, 24, 256, FLOAT16, some_config(16, 64, splits=2)),
    # A router's few rows and more tokens than other weights may have.
    (150, 32, 256, HALF, SplitKConfig(16, 64, 2, 3, 0, 16)),
    # The last two splits have nothing to add up.
    (20, 33, 112, FLOAT16, some_config(16, 64, splits=4)),
]
CONFIG = some_config()


def hold_all(M, N, K, dtype, device, config):
    """The three functions."""
    x, residual = (torch.randn(M, width, device=device).to(dtype) for width in (K, N))
    (weight, bias), (gate_up_weight, _) = make_linear(N, K, dtype, device), make_linear(2 * N, K, dtype, device)
    bias, arrivals = bias if N % 3 else None, make_arrivals(device)
    options = {"config": config, "arrivals": arrivals}
    # Gate and up are rounded, and then the result.
    close = rounding(dtype, 3, K)
    hold(partial(linear, **options), linear_torch, (x, weight, bias), close=close)
    hold(partial(linear_silu, **options), linear_silu_torch, (x, gate_up_weight), close=close)
    hold(partial(linear_add, **options), linear_add_torch, (x, weight, residual, bias), written=(2,), close=close)
    assert not arrivals.any()


@pytest.mark.parametrize(("M", "N", "K", "dtype", "config"), CASES)
def test_kernels_equal_twins(M, N, K, dtype, config, device):
    hold_all(M, N, K, dtype, device, config)


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would compile each example")
@settings(max_examples=30)
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
    hold_all(M, N, K, FLOAT16, "cpu", config)


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
    x, (weight, bias) = torch.randn(20, 96, device=device).half(), make_linear(48, 96, FLOAT16, device)
    out = apart(torch.zeros(20, 48, device=device).half())
    assert linear(x, weight, bias, out, config=CONFIG) is out
    assert torch.equal(out, linear(x, weight, bias, config=CONFIG))
    assert_untouched_around(out)


def test_wrong_arguments_are_refused(device):
    x, weight, residual = (torch.zeros(*shape, device=device).half() for shape in ((2, 32), (8, 32), (2, 8)))
    given = {"x": x, "weight": weight, "y": residual, "bias": None, "config": CONFIG, "arrivals": None}
    wrong = {
        "x": [x.new_zeros(1025, 32), x.new_zeros(0, 32), x[:, :16], x.new_zeros(32, 2).t(), x[0]],
        "weight": [weight[0], weight[:, :16], weight[:0], weight.bfloat16()],
        "y": [residual[:1], residual[:, :4], residual.float(), residual.new_zeros(8, 2).t()],
        "bias": x[0],
    }
    assert_refused(split_k, given, wrong)
    wide = {"weight": weight.new_zeros(65, 32), "x": x.new_zeros(128, 32), "y": x.new_zeros(128, 65)}
    assert_refused(split_k, given | wide, {"x": x.new_zeros(129, 32)})
    assert_refused(partial(split_k, silu=True), given | {"y": residual[:, :4]}, {"weight": weight[:7]})
    with pytest.raises(ValueError, match=r"^x must be bfloat16 or float16"):
        linear(x.float(), weight.float(), config=CONFIG)
    with pytest.raises(ValueError, match=r"^weight_scale must be given"):
        split_k(**given, x_scale=torch.ones(2, 1))
    config, arrivals = some_config(16, 16, splits=2), make_arrivals(device)[:1]
    with pytest.raises(ValueError, match=r"^arrivals must hold the counters of 2 tiles, not 1"):
        linear(x, weight.new_zeros(20, 32), config=config, arrivals=arrivals)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("prefetch", [0, 256, 1024])
@pytest.mark.parametrize("M", [17, 64])
def test_dependent_launches_in_a_graph(M, prefetch, splits, device):
    """Layers in which each launch needs the last one's result and the residual is overwritten twice."""
    if not has_pdl(torch.device(device)):
        pytest.skip("no programmatic dependent launch here")
    hidden, intermediate, num_layers = 1024, 3072, 8
    dtype, config = torch.bfloat16, some_config(splits=splits, prefetch=prefetch)
    shapes = (intermediate, hidden), (hidden, intermediate), (2 * intermediate, hidden), (hidden, intermediate)
    layers = [[make_linear(*shape, dtype, device)[0] for shape in shapes] for _ in range(num_layers)]
    norm_weight = 1 + 0.1 * torch.randn(hidden, device=device, dtype=dtype)
    start, arrivals = torch.randn(M, hidden, device=device, dtype=dtype), make_arrivals(device)

    def chain(residual: torch.Tensor, pdl: bool):
        options = {"config": config, "arrivals": arrivals, "pdl": pdl}
        for first, second, gate_up, down in layers:
            y = linear(rms_norm(residual, norm_weight, 1e-6), first, **options)
            linear_add(y, second, residual, **options)
            y = linear_silu(rms_norm(residual, norm_weight, 1e-6), gate_up, **options)
            linear_add(y, down, residual, **options)

    same_bits_in_a_graph(chain, start)
    assert not arrivals.any()
