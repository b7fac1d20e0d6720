"""The fused linear layers of small batches against their plain-torch twins, and the twins against float64."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.skinny_kernel import MAX_TOKENS, SkinnyConfig, choose_config, has_pdl
from nanovllm.kernels.skinny_linear import linear_add, norm_linear, norm_linear_silu, silu_linear_add
from nanovllm.layers import skinny_linear as layers
from nanovllm.layers.skinny_linear import (
    linear_add_torch,
    norm_linear_silu_torch,
    norm_linear_torch,
    silu_linear_add_torch,
)

EPS = 1e-6
# Of results of order one. In 16 bits, the input of the product may come to lie one rounding apart here and there.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HALF_DTYPES = [
    torch.float16,
    # Triton's interpreter multiplies bfloat16 wrongly.
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
]
DTYPES = [torch.float32, *HALF_DTYPES]

# Rows in one tile and in several, plain and tensor cores, tiles that reach past K.
CONFIGS = [
    SkinnyConfig(4, 1024, 4),
    SkinnyConfig(4, 64, 1),
    SkinnyConfig(8, 256, 2),
    SkinnyConfig(8, 1024, 8, tensor_cores=True, prefetch=1024),
    SkinnyConfig(16, 128, 4, tensor_cores=True),
    SkinnyConfig(8, 64, 1, tensor_cores=True, prefetch=128),
]


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """New tensors hold NaN: an output that is not written can't pass for one that lay in the same memory before."""
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.full(size, float("nan"), **options))


def make_linear(N: int, K: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight whose products with standard normal rows are of order one, and a bias."""
    weight = torch.randn(N, K, device=device) / K**0.5
    return weight.to(dtype), torch.randn(N, device=device).to(dtype)


def make_rows(M: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Rows that lie further apart than they are wide, in a tensor that is NaN elsewhere."""
    wide = torch.full((M, width + 24), float("nan"), device=device, dtype=dtype)
    wide[:, 8 : 8 + width] = torch.randn(M, width, device=device)
    return wide[:, 8 : 8 + width]


def make_norm(K: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (1 + 0.5 * torch.randn(K, device=device)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def check_all(M, N, K, dtype, device, config=None, pdl=False):
    """The four functions against their twins; residuals are strided, and what lies between their rows stays."""
    options = {"config": config, "pdl": pdl}
    x, gate_up = make_rows(M, K, dtype, device), make_rows(M, 2 * K, dtype, device)
    norm_weight = make_norm(K, dtype, device)
    weight, bias = make_linear(N, K, dtype, device)
    for b in (None, bias):
        actual = norm_linear(x, norm_weight, EPS, weight, b, **options)
        assert_close(actual, norm_linear_torch(x, norm_weight, EPS, weight, b))
    if N % 2 == 0:
        actual = norm_linear_silu(x, norm_weight, EPS, weight, **options)
        assert_close(actual, norm_linear_silu_torch(x, norm_weight, EPS, weight))
    for kernel, twin, source, extra in (
        (linear_add, linear_add_torch, x, ()),
        (linear_add, linear_add_torch, x, (bias,)),
        (silu_linear_add, silu_linear_add_torch, gate_up, ()),
    ):
        residual = make_rows(M, N, dtype, device)
        expected = twin(source, weight, residual.clone(), *extra)
        assert kernel(source, weight, residual, *extra, **options) is residual
        assert_close(residual, expected)
        assert residual._base.isnan().sum() == M * 24


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize(("N", "K"), [(7, 96), (20, 1000)])
def test_kernels_equal_twins(M, N, K, dtype, device):
    check_all(M, N, K, dtype, device)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize(
    ("M", "N", "K"), [(1, 74, 1024), (16, 40, 1024), (2, 12, 2048), (3, 24, 3072), (8, 24, 3072), (1, 8, 5120)]
)
def test_model_shapes(M, N, K, dtype, device):
    check_all(M, N, K, dtype, device)


@pytest.mark.parametrize("M", [1, 16])
def test_many_rows(M, device):
    x, residual = make_rows(M, 96, torch.float16, device), make_rows(M, 1000, torch.float16, device)
    weight, bias = make_linear(1000, 96, torch.float16, device)
    expected = linear_add_torch(x, weight, residual.clone(), bias)
    assert_close(linear_add(x, weight, residual, bias), expected)


@pytest.mark.parametrize("dtype", HALF_DTYPES)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("M", [1, 3, 16])
def test_configs(M, config, dtype, device):
    check_all(M, 18, 200, dtype, device, config)


@pytest.mark.parametrize("dtype", DTYPES)
def test_smallest(dtype, device):
    check_all(1, 1, 1, dtype, device)
    check_all(16, 2, 3, dtype, device)


@pytest.mark.parametrize("config", CONFIGS)
def test_rows_are_independent(config, device):
    M, N, K = 5, 12, 320
    weight, _ = make_linear(N, K, torch.float16, device)
    norm_weight = make_norm(K, torch.float16, device)
    x, gate_up = make_rows(M, K, torch.float16, device), make_rows(M, 2 * K, torch.float16, device)
    residual = make_rows(M, N, torch.float16, device)

    def run():
        return (
            norm_linear(x, norm_weight, EPS, weight, config=config),
            norm_linear_silu(x, norm_weight, EPS, weight, config=config),
            linear_add(x, weight, residual.clone(), config=config),
            silu_linear_add(gate_up, weight, residual.clone(), config=config),
        )

    before, again = run(), run()
    for row in (0, 1, 3, 4):
        for tensor in (x, gate_up, residual):
            tensor[row] = float("nan")
    for first, same, poisoned in zip(before, again, run(), strict=True):
        assert torch.equal(first, same)
        assert torch.equal(first[2], poisoned[2])
        assert poisoned[[0, 1, 3, 4]].isnan().all()


def test_every_config_is_launchable():
    for M in range(1, MAX_TOKENS + 1):
        for N in (1, 1024, 2048, 4096, 6144, 24576, 51200):
            for K in (1, 96, 1024, 2048, 2560, 3072, 4096, 8192, 9728, 12288, 25600):
                for itemsize in (2, 4):
                    rows, k_tile, num_warps, tensor_cores, prefetch = choose_config(M, N, K, itemsize)
                    powers = (rows, k_tile, num_warps, prefetch or 1)
                    assert all(value > 0 and value & (value - 1) == 0 for value in powers)
                    assert k_tile >= 16
                    assert num_warps <= 8
                    assert not tensor_cores or (itemsize == 2 and rows >= 8 and k_tile // num_warps >= 16)
                    # 227 KiB of shared memory: a tile of weights, and of 16 gates and ups two each in a pipeline.
                    pipeline = 1 if k_tile >= K else 2
                    assert not tensor_cores or 2 * k_tile * (rows + 2 * 16 * pipeline) <= 227 * 1024


def test_wrong_arguments_are_refused(device):
    x, weight, residual = torch.zeros(2, 32), torch.zeros(8, 32), torch.zeros(2, 8)
    x, weight, residual = x.to(device), weight.to(device), residual.to(device)
    norm_weight = torch.ones(32, device=device)
    for bad in (x.new_zeros(17, 32), x.new_zeros(0, 32), x[:, :16], x.new_zeros(32, 2).t(), x[0]):
        with pytest.raises(ValueError, match=r"^x must be \[1\.\.16, 32\]"):
            norm_linear(bad, norm_weight, EPS, weight)
        with pytest.raises(ValueError, match=r"^x must be \[1\.\.16, 32\]"):
            linear_add(bad, weight, residual)
        with pytest.raises(ValueError, match=r"^gate_up must be \[1\.\.16, 64\]"):
            silu_linear_add(bad, weight, residual)
    for bad in (weight[0], weight[:, :16], weight[:0]):
        with pytest.raises(ValueError, match=r"^weight must be a contiguous"):
            norm_linear(x, norm_weight, EPS, bad)
    with pytest.raises(ValueError, match=r"^weight must have x's dtype"):
        linear_add(x, weight.half(), residual)
    with pytest.raises(ValueError, match=r"^weight must have an even number"):
        norm_linear_silu(x, norm_weight, EPS, weight[:7])
    for bad in (residual[:1], residual[:, :4], residual.half(), residual.new_zeros(8, 2).t()):
        with pytest.raises(ValueError, match=r"^residual must be"):
            linear_add(x, weight, bad)
    with pytest.raises(ValueError, match=r"^bias must be"):
        norm_linear(x, norm_weight, EPS, weight, norm_weight)
    with pytest.raises(ValueError, match=r"^norm_weight must be"):
        norm_linear(x, norm_weight[:8], EPS, weight)
    with pytest.raises(ValueError, match=r"^norm_weight must be .* at most 8192"):
        norm_linear(x.new_zeros(1, 8208), x.new_zeros(8208), EPS, x.new_zeros(1, 8208))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_twins_equal_float64(dtype):
    M, N, K = 3, 10, 100
    x, gate_up, residual = (make_rows(M, width, dtype, "cpu") for width in (K, 2 * K, N))
    norm_weight = make_norm(K, dtype, "cpu")
    weight, bias = make_linear(N, K, dtype, "cpu")
    double = x.double()
    norm = double / (double.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_weight.double()
    product = norm @ weight.double().t()
    assert_close(norm_linear_torch(x, norm_weight, EPS, weight, bias), (product + bias.double()).to(dtype))
    gate, up = product.chunk(2, -1)
    silu = torch.nn.functional.silu(gate) * up
    assert_close(norm_linear_silu_torch(x, norm_weight, EPS, weight), silu.to(dtype))
    total = residual.double() + double @ weight.double().t() + bias.double()
    assert_close(linear_add_torch(x, weight, residual.clone(), bias), total.to(dtype))
    gate, up = gate_up.double().chunk(2, -1)
    total = residual.double() + (torch.nn.functional.silu(gate) * up) @ weight.double().t()
    assert_close(silu_linear_add_torch(gate_up, weight, residual.clone()), total.to(dtype))


def test_dispatch(device):
    x, weight, norm_weight = torch.randn(2, 32), torch.randn(8, 32), torch.ones(32)
    x, weight, norm_weight = x.to(device), weight.to(device), norm_weight.to(device)
    gate_up, residual = torch.cat((x, x), 1), x[:, :8].contiguous()
    assert layers.is_skinny(x) == (device == "cuda")
    assert not layers.is_skinny(x.new_zeros(17, 32))
    assert_close(layers.norm_linear(x, norm_weight, EPS, weight), norm_linear_torch(x, norm_weight, EPS, weight))
    assert_close(
        layers.norm_linear_silu(x, norm_weight, EPS, weight), norm_linear_silu_torch(x, norm_weight, EPS, weight)
    )
    expected = linear_add_torch(x, weight, residual.clone())
    assert_close(layers.linear_add(x, weight, residual.clone()), expected)
    expected = silu_linear_add_torch(gate_up, weight, residual.clone())
    assert_close(layers.silu_linear_add(gate_up, weight, residual.clone()), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 4, 16])
def test_dependent_launches_in_a_graph(M, device):
    """A chain in which each launch needs the last one's result, and the third one's input is the first one's residual:
    with and without dependent launches, the same bits."""
    if not has_pdl(torch.device(device)):
        pytest.skip("no programmatic dependent launch here")
    hidden, intermediate, num_layers = 1024, 3072, 12
    ups = [make_linear(2 * intermediate, hidden, torch.bfloat16, device)[0] for _ in range(num_layers)]
    downs = [make_linear(hidden, intermediate, torch.bfloat16, device)[0] for _ in range(num_layers)]
    norm_weight = make_norm(hidden, torch.bfloat16, device)
    start = torch.randn(M, hidden, device=device, dtype=torch.bfloat16)
    residual = start.clone()

    def chain(pdl: bool):
        for layer, (up, down) in enumerate(zip(ups, downs, strict=True)):
            if layer % 2:
                linear_add(norm_linear_silu(residual, norm_weight, EPS, up, pdl=pdl), down, residual, pdl=pdl)
            else:
                silu_linear_add(norm_linear(residual, norm_weight, EPS, up, pdl=pdl), down, residual, pdl=pdl)

    chain(False)
    expected = residual.clone()
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
