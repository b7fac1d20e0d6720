"""The fused linear layers of small batches against their plain-torch twins, and the twins against float64."""

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import DTYPES, HALF, assert_refused, hold, rounding
from linear_inputs import (
    gemv_linear_add,
    gemv_norm_linear,
    gemv_norm_linear_silu,
    linear_add_torch,
    make_linear,
    norm_linear_silu_torch,
    norm_linear_torch,
    same_bits_in_a_graph,
)

from nanovllm.kernels.dependent_launch import has_pdl
from nanovllm.kernels.matmul.gemv import MAX_TOKENS, GemvConfig
from nanovllm.kernels.matmul.linear_checks import MAX_NORM_SIZE
from nanovllm.layers.matmul.table import package_table

EPS = 1e-6
CONFIG = GemvConfig(4, 1024, 2)
FLOAT32, FLOAT16 = torch.float32, torch.float16

# A GPU takes a second to compile a kernel, and each M, K, dtype, config, presence of a bias and divisibility of N and
# the strides makes three: so there are few cases, which differ in as much as they can.
# M, N, K, dtype, config: the smallest, rows for several programs, several tiles, tiles that reach past K, model shapes,
# rows in one tile and in several.
CASES = [
    (1, 1, 1, FLOAT32, GemvConfig(4, 16, 2)),
    (4, 2, 3, FLOAT16, GemvConfig(4, 16, 2)),
    (1, 8, 5120, HALF, CONFIG),
    (2, 21, 1000, FLOAT16, CONFIG),
    (3, 21, 333, HALF, GemvConfig(4, 512, 2)),
    (3, 10, 2501, FLOAT32, CONFIG),
    (4, 12, 3072, HALF, CONFIG),
    (4, 17, 201, FLOAT16, GemvConfig(4, 64, 1)),
    (3, 18, 201, HALF, GemvConfig(8, 256, 2)),
    (1, 17, 201, HALF, GemvConfig(2, 1024, 8)),
    (2, 18, 201, FLOAT16, GemvConfig(16, 128, 4)),
]


def table_cases() -> dict[GemvConfig, tuple[int, int, int]]:
    """The constants of the H200's table, each with the largest M, and N and K, that it is for."""
    cases = {}
    for key, row in package_table("NVIDIA H200").rows.items():
        for bound, choices in zip(row.bounds, row.choices, strict=True):
            for name, constants in choices:
                if name == "gemv":
                    cases[GemvConfig(*constants)] = (min(bound, MAX_TOKENS), key.N, min(key.K, MAX_NORM_SIZE))
    return cases


def make_norm(K: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return (1 + 0.5 * torch.randn(K, device=device)).to(dtype)


def close(dtype: torch.dtype, K: int) -> dict[str, float]:
    """In 16 bits the norm, gate and up are rounded, and then the result."""
    return rounding(dtype, 4, K)


def hold_all(M, N, K, dtype, device, config):
    """The three functions. For odd N, norm_linear is the one with a bias, for even N linear_add."""
    x, residual = (torch.randn(M, width, device=device).to(dtype) for width in (K, N))
    norm_weight, (weight, bias) = make_norm(K, dtype, device), make_linear(N, K, dtype, device)
    gate_up_weight, _ = make_linear(2 * N, K, dtype, device)
    biases, options = (bias, None) if N % 2 else (None, bias), {"close": close(dtype, K)}
    normed = x, norm_weight, EPS
    hold(partial(gemv_norm_linear, config=config), norm_linear_torch, (*normed, weight, biases[0]), **options)
    hold(partial(gemv_norm_linear_silu, config=config), norm_linear_silu_torch, (*normed, gate_up_weight), **options)
    args = x, weight, residual, biases[1]
    hold(partial(gemv_linear_add, config=config), linear_add_torch, args, written=(2,), **options)


@pytest.mark.parametrize(("M", "N", "K", "dtype", "config"), CASES)
def test_kernels_equal_twins(M, N, K, dtype, config, device):
    hold_all(M, N, K, dtype, device, config)


@pytest.mark.gpu
@pytest.mark.parametrize(("config", "shape"), table_cases().items())
def test_constants_of_the_table(config, shape, device):
    M, N, K = shape
    hold_all(M, min(N, 8192), K, torch.bfloat16, device, config)


def test_every_config_of_the_table_is_launchable():
    assert len(table_cases()) > 5
    for rows, k_tile, num_warps in table_cases():
        assert all(value > 0 and value & (value - 1) == 0 for value in (rows, k_tile, num_warps))
        assert k_tile >= 16
        assert num_warps <= 8


def test_wrong_arguments_are_refused(device):
    x, weight, residual = (torch.zeros(*shape, device=device) for shape in ((2, 32), (8, 32), (2, 8)))
    norm_weight = torch.ones(32, device=device)
    x_wrong = [x.new_zeros(5, 32), x.new_zeros(0, 32), x[:, :16], x.new_zeros(32, 2).t(), x[0]]
    weight_wrong = [weight[0], weight[:, :16], weight[:0], weight.half()]
    normed = {"x": x, "norm_weight": norm_weight, "eps": EPS, "weight": weight}
    wrong = {"x": x_wrong, "weight": weight_wrong, "norm_weight": norm_weight[:8]}
    assert_refused(partial(gemv_norm_linear, config=CONFIG), normed, wrong | {"bias": norm_weight})
    assert_refused(partial(gemv_norm_linear_silu, config=CONFIG), normed, {"weight": weight[:7]})
    y_wrong = [residual[:1], residual[:, :4], residual.half(), residual.new_zeros(8, 2).t()]

    def add(x, weight, y):
        return gemv_linear_add(x, weight, y, config=CONFIG)

    assert_refused(add, {"x": x, "weight": weight, "y": residual}, {"x": x_wrong, "weight": weight_wrong, "y": y_wrong})
    with pytest.raises(ValueError, match=r"^norm_weight must be .* at most 8192"):
        gemv_norm_linear(x.new_zeros(1, 8208), x.new_zeros(8208), EPS, x.new_zeros(1, 8208), config=CONFIG)


@pytest.mark.parametrize("dtype", DTYPES)
def test_twins_equal_float64(dtype):
    M, N, K = 3, 10, 100
    x, residual = torch.randn(M, K).to(dtype), torch.randn(M, N).to(dtype)
    norm_weight, (weight, bias) = make_norm(K, dtype, "cpu"), make_linear(N, K, dtype, "cpu")
    double = x.double()
    norm = double / (double.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_weight.double()
    product = norm @ weight.double().t()
    gate, up = product.chunk(2, -1)
    found = norm_linear_torch(x, norm_weight, EPS, weight, bias), norm_linear_silu_torch(x, norm_weight, EPS, weight)
    expected = [product + bias.double(), torch.nn.functional.silu(gate) * up]
    expected.append(residual.double() + double @ weight.double().t() + bias.double())
    for one, other in zip((*found, linear_add_torch(x, weight, residual.clone(), bias)), expected, strict=True):
        torch.testing.assert_close(one, other.to(dtype), **close(dtype, K))


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

    def chain(residual: torch.Tensor, pdl: bool):
        for layer, (up, down) in enumerate(zip(ups, downs, strict=True)):
            if layer % 2:
                x = gemv_norm_linear_silu(residual, norm_weight, EPS, up, config=CONFIG, pdl=pdl)
            else:
                x = gemv_norm_linear(residual, norm_weight, EPS, up[:intermediate], config=CONFIG, pdl=pdl)
            gemv_linear_add(x, down, residual, config=CONFIG, pdl=pdl)

    same_bits_in_a_graph(chain, start)
