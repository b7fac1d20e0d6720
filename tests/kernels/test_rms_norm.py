"""The RMS norm kernels against their plain-torch twins, and the twins against float64."""

import pytest
import torch

pytest.importorskip("triton")

from kernel_harness import DTYPES, hold, rounding

from nanovllm.kernels.rms_norm import rms_norm, rms_norm_add, rms_norm_heads, rms_norm_of_sum
from nanovllm.layers.layernorm import RMSNorm

EPS = 1e-6
HEADS = 3


def in_place(function):
    return lambda x, weight, eps: function(x, weight, eps, x)


def of_heads(function):
    def run(x, weight, eps):
        found = function(x.unflatten(1, (HEADS, -1)), weight, eps)
        assert found.is_contiguous()
        return found

    return run


# kernel, twin, the number of rows' tensors before the weight, whether the first is written, roundings of a result.
FUNCTIONS = {
    "norm": (rms_norm.kernel, rms_norm.twin, 1, False, 1),
    "in place": (in_place(rms_norm.kernel), in_place(rms_norm.twin), 1, True, 1),
    "heads": (of_heads(rms_norm_heads.kernel), of_heads(rms_norm.twin), 1, False, 1),
    "added": (rms_norm_add.kernel, rms_norm_add.twin, 2, True, 1),
    "added and scaled": (rms_norm_add.kernel, rms_norm_add.twin, 2, True, 1),
    "of a sum": (rms_norm_of_sum.kernel, rms_norm_of_sum.twin, 2, False, 3),  # which is rounded, and so moves its norm
}


def random_case(num_tokens: int, hidden: int, dtype: torch.dtype, device: str):
    weight = 1 + 0.5 * torch.randn(hidden, device=device)
    return torch.randn(num_tokens, hidden, device=device, dtype=dtype) * 3, weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "hidden"), [(3, 1), (4, 100), (2, 5120), (0, 64)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_kernels_equal_twins(name, num_tokens, hidden, dtype, device):
    kernel, twin, num_inputs, is_written, roundings = FUNCTIONS[name]
    width = HEADS * hidden if name == "heads" else hidden
    inputs = [random_case(num_tokens, width, dtype, device)[0] for _ in range(num_inputs)]
    args = [*inputs, random_case(1, hidden, dtype, device)[1], EPS]
    if name == "added and scaled":
        args.append(torch.full((1,), 0.7, dtype=dtype, device=device))
    rows = list(range(is_written, num_inputs))
    # A sum's terms cancel, and a norm's do not.
    close = rounding(dtype, roundings, hidden, terms=3 * (num_inputs - 1))
    hold(kernel, twin, args, close=close, rows=rows, written=[0] if is_written else [])


@pytest.mark.parametrize("dtype", DTYPES)
def test_twins_equal_float64(dtype):
    x, weight = random_case(6, 333, dtype, "cpu")
    residual, wide, scale = torch.randn_like(x), x.double(), torch.tensor([0.7], dtype=dtype)
    norm = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    close = rounding(dtype, 1, 333, terms=0)
    torch.testing.assert_close(rms_norm.twin(x, weight, EPS), norm.to(dtype), **close)
    close = rounding(dtype, 1, 333, terms=3)
    for given, factor in ((None, 1.0), (scale, scale.double())):
        found = rms_norm_add.twin(residual.clone(), x, weight, EPS, given)
        torch.testing.assert_close(found, ((residual.double() + norm) * factor).to(dtype), **close)
    found, total = rms_norm_of_sum.twin(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert torch.equal(found, rms_norm.twin(total, weight, EPS))


@pytest.mark.parametrize("norm", [rms_norm.kernel, rms_norm.twin])
def test_eps_is_added_to_the_mean_square(norm, device):
    """Which decides where numbers are as small as its root, or zero."""
    sizes = torch.tensor([0.0, 1e-4, 1e-3, 1e-2], dtype=torch.float64, device=device)[:, None]
    x = sizes * torch.randn(4, 64, dtype=torch.float64, device=device)
    expected = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    found = norm(x.float(), torch.ones(64, device=device), EPS)
    torch.testing.assert_close(found, expected.float(), **rounding(torch.float32, 1, 64, terms=0))


def test_wrong_layouts_are_refused(device):
    x, weight = random_case(8, 8, torch.float32, device)
    for message, call in (
        ("weight must be as long", lambda: rms_norm.kernel(x, weight[:4], EPS)),
        ("contiguous in its last dimension", lambda: rms_norm.kernel(x.t(), weight, EPS)),
        ("the output must be", lambda: rms_norm.kernel(x, weight, EPS, x.t())),
        ("the output must be", lambda: rms_norm_add.kernel(x[:3], x, weight, EPS)),
        ("contiguous in its last dimension", lambda: rms_norm_of_sum.kernel(x, x[:3], weight, EPS)),
        ("contiguous in its last dimension", lambda: rms_norm_heads.kernel(x.view(2, 4, 8)[:, ::2], weight, EPS)),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layer(dtype, device):
    """As torch's module; the residual is added and kept."""
    norm = RMSNorm(12, eps=1e-5).to(device, dtype)
    norm.weight.normal_()
    x, residual = torch.randn(2, 5, 12, device=device).to(dtype)
    before, close = (x.clone(), residual.clone()), rounding(dtype, 2, 12, terms=3)
    expected = torch.nn.functional.rms_norm(x.float(), (12,), norm.weight.float(), 1e-5).to(dtype)
    torch.testing.assert_close(norm(x), expected, **close)
    torch.testing.assert_close(norm.add_to(x.clone(), x), x + expected, **close)
    normed, total = norm(x, residual)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, norm(x + residual), **close)
    assert torch.equal(norm.rms_forward(x), norm(x))
    assert torch.equal(norm.add_rms_forward(x, residual)[0], normed)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])
    heads = torch.randn(5, 6, 12, device=device).to(dtype)[:, 1:4]
    torch.testing.assert_close(norm(heads), torch.stack([norm(heads[:, i]) for i in range(3)], dim=1), **close)
    assert norm.norm_in_place(x) is x
    torch.testing.assert_close(x, norm(before[0]), **close)


def test_a_weight_that_the_checkpoint_stores_less_one():
    stored = torch.tensor([0.001, -0.5, 3.0])
    norm = RMSNorm(3, offset=1.0)
    norm.weight.weight_loader(norm.weight, stored)
    assert norm.weight.dtype == torch.float32
    assert torch.equal(norm.weight.data, stored + 1)
