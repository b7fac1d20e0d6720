"""The SwiGLU kernel against its plain-torch twin, and the twin against float64."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.silu_and_mul import silu_and_mul
from nanovllm.layers.activation import SiluAndMul, silu_and_mul_torch

RTOL = {torch.float32: 4e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=RTOL[expected.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize(("num_tokens", "size"), [(3, 1), (2, 7), (5, 100), (2, 1024), (2, 3072), (0, 64)])
def test_kernel_equals_twin(num_tokens, size, dtype, device):
    x = torch.randn(num_tokens, 2 * size, device=device, dtype=dtype) * 4
    assert_close(silu_and_mul(x), silu_and_mul_torch(x))


def test_strided_rows_and_extreme_gates(device):
    x = torch.randn(3, 70, device=device)[:, 2:66]
    x[0, :4] = torch.tensor([1e4, -1e4, 88.0, -104.0])
    assert_close(silu_and_mul(x), silu_and_mul_torch(x))
    assert silu_and_mul(x).isfinite().all()


def test_wrong_layouts_are_refused(device):
    with pytest.raises(ValueError, match="2 \\* intermediate"):
        silu_and_mul(torch.zeros(2, 5, device=device))
    with pytest.raises(ValueError, match="contiguous rows"):
        silu_and_mul(torch.zeros(6, 6, device=device).t())


@pytest.mark.parametrize("dtype", RTOL)
def test_twin_equals_float64(dtype):
    x = torch.randn(7, 60, dtype=dtype) * 4
    gate, up = x.double().chunk(2, -1)
    assert_close(silu_and_mul_torch(x), (gate * gate.sigmoid() * up).to(dtype))


def test_module(device):
    x = torch.randn(4, 32, device=device)
    assert_close(SiluAndMul()(x), silu_and_mul_torch(x))
