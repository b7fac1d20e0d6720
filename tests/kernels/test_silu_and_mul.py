"""The kernels of gated activations against their plain-torch twins, and the twins against float64."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.silu_and_mul import gelu_tanh_and_mul, silu_and_mul
from nanovllm.layers.activation import GeluTanhAndMul, SiluAndMul

RTOL = {torch.float32: 4e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=RTOL[expected.dtype], atol=1e-6)


BOTH = pytest.mark.parametrize(
    ("kernel", "twin"), [(silu_and_mul.kernel, silu_and_mul.twin), (gelu_tanh_and_mul.kernel, gelu_tanh_and_mul.twin)]
)


@BOTH
@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize(("num_tokens", "size"), [(3, 1), (2, 7), (5, 100), (2, 1024), (2, 3072), (0, 64)])
def test_kernel_equals_twin(num_tokens, size, dtype, kernel, twin, device):
    x = torch.randn(num_tokens, 2 * size, device=device, dtype=dtype) * 4
    # The twin's gelu cancels digits where the gate is far below zero.
    atol = 1e-5 if kernel is gelu_tanh_and_mul.kernel else 1e-6
    torch.testing.assert_close(kernel(x), twin(x), rtol=RTOL[dtype], atol=atol)


@BOTH
def test_strided_rows_and_extreme_gates(kernel, twin, device):
    x = torch.randn(3, 70, device=device)[:, 2:66]
    x[0, :4] = torch.tensor([1e4, -1e4, 88.0, -104.0])
    torch.testing.assert_close(kernel(x), twin(x), rtol=4e-6, atol=1e-5)
    assert kernel(x).isfinite().all()


@BOTH
def test_wrong_layouts_are_refused(kernel, twin, device):
    with pytest.raises(ValueError, match="2 \\* intermediate"):
        kernel(torch.zeros(2, 5, device=device))
    with pytest.raises(ValueError, match="contiguous rows"):
        kernel(torch.zeros(6, 6, device=device).t())


@pytest.mark.parametrize("dtype", RTOL)
def test_twin_equals_float64(dtype):
    x = torch.randn(7, 60, dtype=dtype) * 4
    gate, up = x.double().chunk(2, -1)
    assert_close(silu_and_mul.twin(x), (gate * gate.sigmoid() * up).to(dtype))
    gelu = torch.nn.functional.gelu(gate, approximate="tanh") * up
    torch.testing.assert_close(gelu_tanh_and_mul.twin(x), gelu.to(dtype), rtol=RTOL[dtype], atol=1e-5)


def test_the_layers_equal_the_twins(device):
    x = torch.randn(4, 32, device=device)
    assert_close(SiluAndMul()(x), silu_and_mul.twin(x))
    torch.testing.assert_close(GeluTanhAndMul()(x), gelu_tanh_and_mul.twin(x), rtol=4e-6, atol=1e-5)
