"""The RMS norm kernels against their plain-torch twins, and the twins against float64."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm
from nanovllm.layers.layernorm import RMSNorm, add_rms_norm_torch, rms_norm_torch

# One unit in the last place, and for float32 the few that a sum in another order costs.
RTOL = {torch.float32: 4e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
EPS = 1e-6


def random_case(num_tokens: int, hidden: int, dtype: torch.dtype, device: str):
    x, residual = torch.randn(2, num_tokens, hidden, device=device, dtype=dtype) * 3
    weight = 1 + 0.5 * torch.randn(hidden, device=device)
    return x, residual, weight.to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=RTOL[expected.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(3, 1), (5, 7), (2, 100), (3, 1024), (2, 5120), (0, 64)])
def test_kernels_equal_twins(num_tokens, hidden, dtype, device):
    x, residual, weight = random_case(num_tokens, hidden, dtype, device)
    assert_close(rms_norm(x, weight, EPS), rms_norm_torch(x, weight, EPS))

    expected_residual = residual.clone()
    expected, _ = add_rms_norm_torch(x, expected_residual, weight, EPS)
    y, returned = add_rms_norm(x, residual, weight, EPS)
    assert_close(y, expected)
    assert returned is residual
    if device == "cpu" and dtype == torch.bfloat16:  # Triton's interpreter truncates to bfloat16
        assert_close(residual, expected_residual)
    else:
        assert torch.equal(residual, expected_residual)


def test_strided_rows(device):
    wide, wide_residual, weight = random_case(4, 96, torch.float32, device)
    x, residual, weight = wide[:, 16:80], wide_residual[:, :64], weight[:64]
    untouched = wide_residual[:, 64:].clone()
    expected, expected_residual = add_rms_norm_torch(x, residual.clone(), weight, EPS)
    assert_close(rms_norm(x, weight, EPS), rms_norm_torch(x, weight, EPS))
    assert_close(add_rms_norm(x, residual, weight, EPS)[0], expected)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(wide_residual[:, 64:], untouched)


def test_wrong_layouts_are_refused(device):
    x, residual, weight = random_case(8, 8, torch.float32, device)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        rms_norm(x.t(), weight, EPS)
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(x, weight[:4], EPS)
    with pytest.raises(ValueError, match="residual must be"):
        add_rms_norm(x, residual[:4], weight, EPS)


@pytest.mark.parametrize("dtype", RTOL)
def test_twin_equals_float64(dtype):
    x, residual, weight = random_case(6, 333, dtype, "cpu")
    total = x.double() + residual.double()
    norm = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    y, new_residual = add_rms_norm_torch(x, residual, weight, EPS)
    assert_close(y, norm.to(dtype))
    assert torch.equal(new_residual, total.float().to(dtype))


def test_module(device):
    norm = RMSNorm(48, eps=1e-5).to(device)
    with torch.no_grad():
        norm.weight.normal_()
        x, residual, _ = random_case(3, 48, torch.float32, device)
        total = x + residual
        reference = torch.nn.functional.rms_norm(total, (48,), norm.weight, 1e-5)
        y, returned = norm(x, residual)
        assert_close(y, reference)
        assert torch.equal(returned, total)
        assert_close(norm(total), reference)
