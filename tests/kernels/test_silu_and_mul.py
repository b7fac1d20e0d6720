"""The kernels of gated activations against their plain-torch twins, and the twins against float64."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import DTYPES, hold, rounding

from nanovllm.kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul
from nanovllm.layers.activation import GeluTanhAndMul, SiluAndMul

BOTH = pytest.mark.parametrize("function", [silu_and_mul, gelu_tanh_and_mul])


def close(dtype: torch.dtype) -> dict[str, float]:
    """In float32, 1 + tanh cancels where the gate is far below zero. That is times gate and up, numbers of about 4."""
    return rounding(dtype, terms=0) | {"atol": rounding(torch.float32, terms=16)["atol"]}


@BOTH
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(3, 1), (5, 100), (2, 3072), (0, 64)])
def test_kernel_equals_twin(num_tokens, size, dtype, function, device):
    x = torch.randn(num_tokens, 2 * size, device=device, dtype=dtype) * 4
    hold(function.kernel, function.twin, (x,), close=close(dtype))


@BOTH
def test_extreme_gates(function, device):
    x = torch.randn(3, 64, device=device)
    x[0, :4] = torch.tensor([1e4, -1e4, 88.0, -104.0])
    (found,) = hold(function.kernel, function.twin, (x,), close=close(torch.float32))
    assert found.isfinite().all()


@BOTH
def test_wrong_layouts_are_refused(function, device):
    for x in (torch.zeros(2, 5, device=device), torch.zeros(6, 6, device=device).t()):
        with pytest.raises(ValueError, match=r"^x must be .*2 \* intermediate.* with contiguous rows"):
            function.kernel(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_twins_and_layers_equal_float64(dtype):
    x = torch.randn(7, 60, dtype=dtype) * 4
    gate, up = x.double().chunk(2, -1)
    gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
    for expected, functions in (
        (gate * gate.sigmoid() * up, (silu_and_mul.twin, SiluAndMul())),
        (gelu, (gelu_tanh_and_mul.twin, GeluTanhAndMul())),
    ):
        for function in functions:
            torch.testing.assert_close(function(x), expected.to(dtype), **close(dtype))
