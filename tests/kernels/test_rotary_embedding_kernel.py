"""The rotation alone: kernel against twin."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.attention.rotary_embedding import rotary_embedding

TOLERANCE = {torch.float32: (4e-6, 4e-6), torch.float16: (2.0**-10, 4e-6), torch.bfloat16: (2.0**-7, 4e-6)}
MAX_POSITION = 64


def random_case(num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, dtype, device, index_dtype=torch.int64):
    """q and k inside longer rows, with NaN between them."""
    rows = torch.full((num_tokens, num_heads + num_kv_heads + 2, head_dim), torch.nan, dtype=dtype, device=device)
    q, k = rows[:, :num_heads], rows[:, num_heads + 1 : -1]
    q.normal_()
    k.normal_()
    positions = torch.randint(MAX_POSITION, (num_tokens,), device=device).to(index_dtype)
    return positions, q, k, torch.randn(MAX_POSITION, 1, rotary_dim, device=device)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_scales", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim"),
    [
        (5, 16, 8, 128, 128),
        (3, 3, 1, 100, 100),
        (4, 12, 2, 80, 20),
        (2, 9, 9, 2, 2),
        (1, 1, 1, 96, 94),
        (0, 4, 2, 16, 16),
    ],
)
def test_kernel_equals_twin(num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, has_scales, dtype, device):
    index_dtype = torch.int32 if has_scales else torch.int64
    case = random_case(num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, dtype, device, index_dtype)
    scales = 1 + torch.rand(MAX_POSITION, device=device) if has_scales else None
    before = [x.clone() for x in case]
    expected = rotary_embedding.twin(*case, scales)
    for function in (rotary_embedding.kernel, rotary_embedding):
        for found, other in zip(function(*case, scales), expected, strict=True):
            assert found.is_contiguous()
            torch.testing.assert_close(found, other, rtol=TOLERANCE[dtype][0], atol=TOLERANCE[dtype][1])
    assert all(torch.equal(x, other) for x, other in zip(case, before, strict=True)), "it overwrote its input"


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (1, torch.zeros(6, 8, 32)[:, ::2], "packed"),
        (2, torch.zeros(6, 2, 16), "q and k must be"),
        (2, torch.zeros(5, 2, 32), "q and k must be"),
        (3, torch.zeros(MAX_POSITION, 1, 34), "cos_sin_cache must have an even number of columns up to 32, not 34"),
        (3, torch.zeros(MAX_POSITION, 1, 15), "not 15"),
    ],
)
def test_other_layouts_are_refused(index, value, message):
    case = list(random_case(6, 4, 2, 32, 32, torch.float32, "cpu"))
    case[index] = value
    with pytest.raises(ValueError, match=message):
        rotary_embedding.kernel(*case)
