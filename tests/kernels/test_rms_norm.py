"""The RMS norm kernels against their plain-torch twins, and the twins against float64."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.rms_norm import rms_norm, rms_norm_add, rms_norm_heads, rms_norm_of_sum
from nanovllm.layers.layernorm import RMSNorm

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
    assert_close(rms_norm.kernel(x, weight, EPS), rms_norm.twin(x, weight, EPS))


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(3, 1), (5, 100), (2, 1024), (0, 64)])
def test_sums_equal_twins(num_tokens, hidden, dtype, device):
    x, weight = random_case(num_tokens, hidden, dtype, device)
    residual = torch.randn_like(x)
    expected, found = residual.clone(), residual.clone()
    assert rms_norm_add.twin(expected, x, weight, EPS) is expected
    assert rms_norm_add.kernel(found, x, weight, EPS) is found
    # A sum near zero is a difference of larger numbers.
    torch.testing.assert_close(found, expected, rtol=RTOL[dtype], atol=1e-5)
    assert_close(expected, (residual.float() + rms_norm.twin(x.float(), weight, EPS)).to(dtype))
    scale = torch.full((1,), 0.7, dtype=dtype, device=device)
    expected, found = residual.clone(), residual.clone()
    rms_norm_add.twin(expected, x, weight, EPS, scale)
    rms_norm_add.kernel(found, x, weight, EPS, scale)
    torch.testing.assert_close(found, expected, rtol=RTOL[dtype], atol=1e-5)
    total = residual.float() + rms_norm.twin(x.float(), weight, EPS)
    assert_close(expected, (total * scale.float()).to(dtype))


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize(
    ("num_tokens", "heads", "head_dim"), [(5, 3, 20), (2, 1, 7), (3, 16, 128), (1, 9, 1), (0, 2, 64)]
)
def test_heads_equal_twins(num_tokens, heads, head_dim, dtype, device):
    rows, weight = random_case(num_tokens * (heads + 2), head_dim, dtype, device)
    x = rows.view(num_tokens, heads + 2, head_dim)[:, 1:-1]
    expected = rms_norm.twin(x, weight, EPS)
    for norm in (rms_norm_heads.kernel, rms_norm_heads):
        found = norm(x, weight, EPS)
        assert found.is_contiguous()
        assert_close(found, expected)


@pytest.mark.parametrize("dtype", RTOL)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(3, 1), (5, 100), (2, 1024), (0, 64)])
def test_norms_of_sums_equal_twins(num_tokens, hidden, dtype, device):
    wide, weight = random_case(num_tokens, 3 * hidden, dtype, device)
    x, residual, weight = wide[:, :hidden], wide[:, hidden : 2 * hidden], weight[:hidden]
    before = wide.clone()
    _, total = rms_norm_of_sum.twin(x, residual, weight, EPS)
    for norm in (rms_norm_of_sum.kernel, rms_norm_of_sum):
        found, found_total = norm(x, residual, weight, EPS)
        # Triton's interpreter rounds towards zero. The norm is that of the rounded sum.
        torch.testing.assert_close(found_total, total, rtol=RTOL[dtype], atol=1e-6)
        assert_close(found, rms_norm.twin(found_total, weight, EPS))
    assert torch.equal(wide, before), "it overwrote its input"
    assert torch.equal(total, x + residual)


@pytest.mark.parametrize("norm", [rms_norm.kernel, rms_norm.twin])
def test_eps_is_added_to_the_mean_square(norm, device):
    """Which decides where numbers are as small as its root, or zero."""
    sizes = torch.tensor([0.0, 1e-4, 1e-3, 1e-2], dtype=torch.float64, device=device)[:, None]
    x = sizes * torch.randn(4, 64, dtype=torch.float64, device=device)
    expected = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    assert_close(norm(x.float(), torch.ones(64, device=device), EPS), expected.float())


def test_strided_rows(device):
    wide, weight = random_case(4, 96, torch.float32, device)
    x, weight = wide[:, 16:80], weight[:64]
    expected = rms_norm.twin(x, weight, EPS)
    assert_close(rms_norm.kernel(x, weight, EPS), expected)
    # In place, without a change of what is beside it.
    for norm in (rms_norm.kernel, rms_norm.twin):
        changed = wide.clone()
        part = changed[:, 16:80]
        assert norm(part, weight, EPS, part) is part
        assert_close(part, expected)
        assert torch.equal(changed[:, :16], wide[:, :16])
        assert torch.equal(changed[:, 80:], wide[:, 80:])


def test_wrong_layouts_are_refused(device):
    x, weight = random_case(8, 8, torch.float32, device)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        rms_norm.kernel(x.t(), weight, EPS)
    with pytest.raises(ValueError, match="weight must be"):
        rms_norm.kernel(x, weight[:4], EPS)
    with pytest.raises(ValueError, match="the output must be"):
        rms_norm.kernel(x, weight, EPS, x.t())
    with pytest.raises(ValueError, match="the output must be"):
        rms_norm_add.kernel(x[:3], x, weight, EPS)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        rms_norm_of_sum.kernel(x, x[:3], weight, EPS)
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        rms_norm_heads.kernel(x.view(2, 4, 8)[:, ::2], weight, EPS)


@pytest.mark.parametrize("dtype", RTOL)
def test_twin_equals_float64(dtype):
    x, weight = random_case(6, 333, dtype, "cpu")
    wide = x.double()
    norm = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    assert_close(rms_norm.twin(x, weight, EPS), norm.to(dtype))


def test_the_layer_equals_torchs_rms_norm(device):
    norm = RMSNorm(48, eps=1e-5).to(device)
    with torch.no_grad():
        norm.weight.normal_()
        x, _ = random_case(3, 48, torch.float32, device)
        expected = torch.nn.functional.rms_norm(x, (48,), norm.weight, 1e-5)
        assert_close(norm(x), expected)
        torch.testing.assert_close(norm.add_to(x.clone(), x), x + expected)


@pytest.mark.parametrize("dtype", RTOL)
def test_a_residual_is_added_and_kept(dtype, device):
    norm = RMSNorm(12, eps=1e-5).to(device, dtype)
    norm.weight.normal_()
    x, residual = torch.randn(2, 5, 12, device=device).to(dtype)
    before = x.clone(), residual.clone()
    normed, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    assert_close(normed, norm(x + residual))
    assert torch.equal(norm.rms_forward(x), norm(x))
    assert torch.equal(norm.add_rms_forward(x, residual)[0], normed)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    heads = torch.randn(5, 6, 12, device=device).to(dtype)[:, 1:4]
    assert_close(norm(heads), torch.stack([norm(heads[:, i]) for i in range(3)], dim=1))
    assert norm.norm_in_place(x) is x
    assert_close(x, norm(before[0]))


def test_a_weight_that_the_checkpoint_stores_less_one():
    stored = torch.tensor([0.001, -0.5, 3.0])
    norm = RMSNorm(3, offset=1.0)
    norm.weight.weight_loader(norm.weight, stored)
    assert norm.weight.dtype == torch.float32
    assert torch.equal(norm.weight.data, stored + 1)
