"""The RMS norm kernels against their plain-torch twins, and the twins against float64."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.rms_norm import rms_norm
from nanovllm.layers.layernorm import RMSNorm, rms_norm_torch

# One unit in the last place, and for float32 the few that a sum in another order costs.
RTOL = {torch.float32: 4e-6, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
EPS = 1e-6


def random_case(num_tokens: int, hidden: int, dtype: torch.dtype, device: str):
    weight = 1 + 0.5 * torch.randn(hidden, device=device)
    return torch.randn(num_tokens, hidden, device=device, dtype=dtype) * 3, weight.to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=RTOL[expected.dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(3, 1), (5, 7), (2, 100), (3, 1024), (2, 5120), (0, 64)])
def test_kernels_equal_twins(num_tokens, hidden, dtype, device):
    x, weight = random_case(num_tokens, hidden, dtype, device)
    assert_close(rms_norm(x, weight, EPS), rms_norm_torch(x, weight, EPS))


def test_strided_rows(device):
    wide, weight = random_case(4, 96, torch.float32, device)
    x, weight = wide[:, 16:80], weight[:64]
    assert_close(rms_norm(x, weight, EPS), rms_norm_torch(x, weight, EPS))


def test_wrong_layouts_are_refused(device):
    x, weight = random_case(8, 8, torch.float32, device)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        rms_norm(x.t(), weight, EPS)
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm(x, weight[:4], EPS)


@pytest.mark.parametrize("dtype", RTOL)
def test_twin_equals_float64(dtype):
    x, weight = random_case(6, 333, dtype, "cpu")
    wide = x.double()
    norm = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert_close(rms_norm_torch(x, weight, EPS), norm.to(dtype))


def test_module(device):
    norm = RMSNorm(48, eps=1e-5).to(device)
    with torch.no_grad():
        norm.weight.normal_()
        x, _ = random_case(3, 48, torch.float32, device)
        assert_close(norm(x), torch.nn.functional.rms_norm(x, (48,), norm.weight, 1e-5))
