"""The fused linear layers of small batches against their plain-torch twins, and the twins against float64."""

import pytest
import torch

pytest.importorskip("triton")

from linear_inputs import (
    gemv_linear_add,
    gemv_norm_linear,
    gemv_norm_linear_silu,
    linear_add_torch,
    make_linear,
    make_rows,
    norm_linear_silu_torch,
    norm_linear_torch,
)

from nanovllm.kernels.dependent_launch import has_pdl
from nanovllm.kernels.matmul.gemv import MAX_TOKENS, GemvConfig
from nanovllm.kernels.matmul.linear_checks import MAX_NORM_SIZE
from nanovllm.layers.matmul.table import package_table

EPS = 1e-6
CONFIG = GemvConfig(4, 1024, 2)
# Of results of order one. In 16 bits, the input of the product may come to lie one rounding apart here and there.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FLOAT32, FLOAT16 = torch.float32, torch.float16
# Triton's interpreter multiplies bfloat16 wrongly.
BFLOAT16 = torch.bfloat16 if torch.cuda.is_available() else torch.float16

KERNELS = gemv_norm_linear, gemv_norm_linear_silu, gemv_linear_add
TWINS = norm_linear_torch, norm_linear_silu_torch, linear_add_torch

# A GPU takes a second to compile a kernel, and each M, K, dtype, config, presence of a bias and divisibility of N and
# the strides makes three: so there are few cases, which differ in as much as they can.
# M, N, K, dtype: the smallest, rows for many programs, several tiles, tiles that reach past K, model shapes.
SHAPES = [
    (1, 1, 1, FLOAT32),
    (4, 2, 3, FLOAT16),
    (1, 8, 5120, BFLOAT16),
    (2, 301, 1000, FLOAT16),
    (3, 301, 333, BFLOAT16),
    (3, 20, 2501, FLOAT32),
    (4, 24, 3072, BFLOAT16),
]
# config, M, N, dtype at K = 201: rows in one tile and in several.
CONFIGS = [
    (GemvConfig(4, 64, 1), 4, 17, FLOAT16),
    (GemvConfig(8, 256, 2), 3, 18, BFLOAT16),
    (GemvConfig(2, 1024, 8), 1, 17, BFLOAT16),
    (GemvConfig(16, 128, 4), 2, 18, FLOAT16),
]
configs = pytest.mark.parametrize(("config", "M", "N", "dtype"), CONFIGS)


def table_cases() -> dict[GemvConfig, tuple[int, int, int]]:
    """The constants of the H200's table, each with the largest M, and N and K, that it is for."""
    cases = {}
    for key, row in package_table("NVIDIA H200").rows.items():
        for bound, choices in zip(row.bounds, row.choices, strict=True):
            for name, constants in choices:
                if name == "gemv":
                    cases[GemvConfig(*constants)] = (min(bound, MAX_TOKENS), key.N, min(key.K, MAX_NORM_SIZE))
    return cases


@pytest.fixture(autouse=True)
def _poisoned_outputs(monkeypatch):
    """New tensors hold NaN: an output that is not written can't pass for one that lay in the same memory before."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(float("nan")))


def make_norm(K: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (1 + 0.5 * torch.randn(K, device=device)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def make_inputs(M: int, N: int, K: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """x, residual, norm weight, weight, bias, and a weight of N gates and N ups."""
    x, residual = make_rows(M, K, dtype, device), make_rows(M, N, dtype, device)
    gate_up_weight, _ = make_linear(2 * N, K, dtype, device)
    return x, residual, make_norm(K, dtype, device), *make_linear(N, K, dtype, device), gate_up_weight


def run(functions, inputs, **options) -> tuple[torch.Tensor, ...]:
    """The three functions' results, the residual a strided copy. For odd N, norm_linear is the one with a bias, for
    even N linear_add."""
    norm_linear, norm_linear_silu, linear_add = functions
    x, residual, norm_weight, weight, bias, gate_up_weight = inputs
    biases = (bias, None) if len(weight) % 2 else (None, bias)
    residual = residual._base.clone()[:, 8 : 8 + len(weight)]
    normed = norm_linear(x, norm_weight, EPS, weight, biases[0], **options)
    silu = norm_linear_silu(x, norm_weight, EPS, gate_up_weight, **options)
    assert linear_add(x, weight, residual, biases[1], **options) is residual
    return normed, silu, residual


def check_all(M, N, K, dtype, device, config):
    """The three functions against their twins; what lies between the residual's rows stays."""
    inputs = make_inputs(M, N, K, dtype, device)
    actual = run(KERNELS, inputs, config=config)
    for result, expected in zip(actual, run(TWINS, inputs), strict=True):
        assert_close(result, expected)
    assert actual[2]._base.isnan().sum() == M * 24


@pytest.mark.parametrize(("M", "N", "K", "dtype"), SHAPES)
def test_kernels_equal_twins(M, N, K, dtype, device):
    check_all(M, N, K, dtype, device, GemvConfig(4, min(1024, max(16, 1 << (K - 1).bit_length())), 2))


@pytest.mark.gpu
@pytest.mark.parametrize(("config", "shape"), table_cases().items())
def test_constants_of_the_table(config, shape, device):
    M, N, K = shape
    check_all(M, min(N, 8192), K, torch.bfloat16, device, config)


@configs
def test_every_launch_constant_gives_the_twins_result(config, M, N, dtype, device):
    check_all(M, N, 201, dtype, device, config)


@configs
def test_rows_are_independent(config, M, N, dtype, device):
    inputs = make_inputs(M, N, 201, dtype, device)
    before, again = run(KERNELS, inputs, config=config), run(KERNELS, inputs, config=config)
    others = [row for row in range(M) if row != M // 2]
    for rows in inputs[:2]:
        rows[others] = float("nan")
    for first, same, poisoned in zip(before, again, run(KERNELS, inputs, config=config), strict=True):
        assert torch.equal(first, same)
        assert torch.equal(first[M // 2], poisoned[M // 2])
        assert poisoned[others].isnan().all()


def test_every_config_of_the_table_is_launchable():
    assert len(table_cases()) > 5
    for rows, k_tile, num_warps in table_cases():
        assert all(value > 0 and value & (value - 1) == 0 for value in (rows, k_tile, num_warps))
        assert k_tile >= 16
        assert num_warps <= 8


def test_wrong_arguments_are_refused(device):
    x, weight, residual = torch.zeros(2, 32), torch.zeros(8, 32), torch.zeros(2, 8)
    x, weight, residual = x.to(device), weight.to(device), residual.to(device)
    norm_weight = torch.ones(32, device=device)
    for bad in (x.new_zeros(5, 32), x.new_zeros(0, 32), x[:, :16], x.new_zeros(32, 2).t(), x[0]):
        with pytest.raises(ValueError, match=r"^x must be \[1\.\.4, 32\]"):
            gemv_norm_linear(bad, norm_weight, EPS, weight, config=CONFIG)
        with pytest.raises(ValueError, match=r"^x must be \[1\.\.4, 32\]"):
            gemv_linear_add(bad, weight, residual, config=CONFIG)
    for bad in (weight[0], weight[:, :16], weight[:0]):
        with pytest.raises(ValueError, match=r"^weight must be a contiguous"):
            gemv_norm_linear(x, norm_weight, EPS, bad, config=CONFIG)
    with pytest.raises(ValueError, match=r"^weight must have x's dtype"):
        gemv_linear_add(x, weight.half(), residual, config=CONFIG)
    with pytest.raises(ValueError, match=r"^weight must have an even number"):
        gemv_norm_linear_silu(x, norm_weight, EPS, weight[:7], config=CONFIG)
    for bad in (residual[:1], residual[:, :4], residual.half(), residual.new_zeros(8, 2).t()):
        with pytest.raises(ValueError, match=r"^y must be"):
            gemv_linear_add(x, weight, bad, config=CONFIG)
    with pytest.raises(ValueError, match=r"^bias must be"):
        gemv_norm_linear(x, norm_weight, EPS, weight, norm_weight, config=CONFIG)
    with pytest.raises(ValueError, match=r"^norm_weight must be"):
        gemv_norm_linear(x, norm_weight[:8], EPS, weight, config=CONFIG)
    with pytest.raises(ValueError, match=r"^norm_weight must be .* at most 8192"):
        gemv_norm_linear(x.new_zeros(1, 8208), x.new_zeros(8208), EPS, x.new_zeros(1, 8208), config=CONFIG)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_twins_equal_float64(dtype):
    M, N, K = 3, 10, 100
    x, residual = make_rows(M, K, dtype, "cpu"), make_rows(M, N, dtype, "cpu")
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


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 4])
def test_dependent_launches_in_a_graph(M, device):
    """A chain of all three functions in which each launch needs the last one's result, and every other one's
    input is the residual that is overwritten next: with and without dependent launches, the same bits."""
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
                x = gemv_norm_linear_silu(residual, norm_weight, EPS, up, config=CONFIG, pdl=pdl)
            else:
                x = gemv_norm_linear(residual, norm_weight, EPS, up[:intermediate], config=CONFIG, pdl=pdl)
            gemv_linear_add(x, down, residual, config=CONFIG, pdl=pdl)

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
